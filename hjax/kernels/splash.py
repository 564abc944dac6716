"""Attention on TPUs by JAX's splash attention (``jax.experimental.pallas.ops.tpu``).

Splash attention computes only the blocks that a static mask leaves. This file adds the mask of
prompts shared by their responses, padding to blocks, and a cost estimate for the compiler. If the
length is split, each device gathers keys and values and computes its own queries. Rows with too
many responses for the mask use ``blockwise``.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from hjax.kernels import blockwise
from hjax.kernels.attention import (
    CHECKPOINT_NAME,
    TPU_PADDING_BLOCKS,
    MaskSpec,
    ScoreOptions,
    cost_label,
    pad_length,
    tpu_block,
    tpu_padded_length,
)
from hjax.kernels.kernel_sharding import Axes

_KEY_BLOCKS = {640: 256}  # query block -> key block, where they differ
_BITS = 31  # of an int32 with a position and, above it, the response's number


class SplashMask(masks._ComputableMask):  # the base of what its kernel computes as it goes
    """A row's ``MaskSpec``, computed in the kernel without divisions: each query carries its
    response's number."""

    def __init__(self, mask_spec: MaskSpec, length: int):
        self.mask_spec, self._bits = mask_spec, (length - 1).bit_length()
        super().__init__((length, length), self._sees)
        place = self.q_sequence
        if mask_spec.response:
            number = (mask_spec.response_start(place) - mask_spec.prompt) // mask_spec.response
            self.q_sequence = (number << self._bits | place).astype(np.int32)

    @staticmethod
    def fits(mask_spec: MaskSpec, length: int) -> bool:
        """Whether a position and its response's number fit in one int32: always for rows of 2 ** 15
        tokens, for rows of 2 ** 20 with up to 2047 responses."""
        if not mask_spec.response:
            return True
        responses = max(length - mask_spec.prompt, 1) // mask_spec.response
        return (length - 1).bit_length() + responses.bit_length() <= _BITS

    def _sees(self, query: Any, key: Any) -> Any:
        mask_spec = self.mask_spec
        if not mask_spec.response:
            return mask_spec.is_visible(query, 0, key)
        start = mask_spec.prompt + (query >> self._bits) * mask_spec.response
        return mask_spec.is_visible(query & ((1 << self._bits) - 1), start, key)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SplashMask):
            return False
        return (self.mask_spec, self.shape) == (other.mask_spec, other.shape)

    def __hash__(self) -> int:
        return hash((self.mask_spec, self.shape))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    scoring: ScoreOptions,
    mask_spec: MaskSpec,
    axes: Axes = (),
    length_shards: int = 1,
    gather: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` on one device's shard.

    Args:
      axes: mesh axes over which the length is split, inside their ``shard_map``.
      length_shards: devices along them.
      gather: as of ``blockwise.attend``; here keys and values are always gathered.
      interpret: run the kernel's steps in plain JAX, for tests without a TPU.
    """
    batch, length, heads, dim = q.shape
    block, each = tpu_block(length), tpu_padded_length(length)
    if length_shards > 1 and each != length:
        block = next(b for b in TPU_PADDING_BLOCKS if length % b == 0)
        each = length
    total = each * length_shards
    if not SplashMask.fits(mask_spec, total):
        return blockwise.attend(
            q, k, v, segments, sinks, scoring, mask_spec, axes=axes, length_shards=length_shards,
            gather=gather,
        )  # fmt: skip
    padded = functools.partial(pad_length, more=each - length)
    q, k, v = padded(q * scoring.query_scale(dim)), padded(k), padded(v)
    segs = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else padded(segments)
    key_segs = segs
    if length_shards > 1:
        k, v, key_segs = (jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (k, v, segs))
    kernel = _kernel(mask_spec, total, heads, scoring.softcap, block, length_shards, interpret)
    if length_shards > 1:
        kernel = _shard_kernel(kernel, jax.lax.axis_index(axes), length_shards)
    scope = cost_label(_costs(mask_spec, total, batch * heads, dim, block, length_shards))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    with jax.named_scope(scope):
        run = jax.vmap(
            lambda q, k, v, own, other: kernel(q, k, v, splash.SegmentIds(own, other), sinks=sinks)
        )
        out = run(q, k, v, segs, key_segs)
    return out.transpose(0, 2, 1, 3)[:, :length].astype(q.dtype)


def _key_block_size(block: int, length: int) -> int:
    """Keys in a block. With 640 queries there are fewer keys: short responses then waste half as
    many masked products."""
    keys = _KEY_BLOCKS.get(block, block)
    return keys if length % keys == 0 else block


def _kernel(
    mask_spec: MaskSpec, length: int, heads: int, softcap: float, block: int, parts: int,
    interpret: bool,
) -> Any:  # fmt: skip
    keys = _key_block_size(block, length // parts)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=block,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=block,
        block_kv_dq=keys,
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([SplashMask(mask_spec, length)] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=softcap or None,
        residual_checkpoint_name=CHECKPOINT_NAME,
        interpret=interpret,
    )


def _shard_kernel(kernel: Any, number: jax.Array, parts: int) -> Any:
    """The part of the kernel for one device's queries."""

    def cut(info: Any) -> Any:
        if info is None:
            return None

        def part(x: Any, axis: int) -> Any:
            if x is None:
                return None
            size = x.shape[axis] // parts
            return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis)

        return info._replace(
            data_next=part(info.data_next, 1),
            block_mask=part(info.block_mask, 1),
            q_sequence=part(info.q_sequence, 0),
        )

    (forward, dq, dkv), kept = kernel.tree_flatten()
    return type(kernel).tree_unflatten(kept, (cut(forward), cut(dq), cut(dkv)))


@functools.lru_cache(maxsize=64)
def _costs(
    mask_spec: MaskSpec, length: int, rows: int, dim: int, block: int, parts: int
) -> tuple[tuple[str, float, float], ...]:
    """Costs of each kernel on a device: products of whole blocks, bytes read and written.

    A block's products: scores and outputs in the forward pass; scores, the weights' gradients and
    the queries' in ``dq``; scores, weights' gradients, keys' and values' in ``dkv``.
    """
    keys = _key_block_size(block, length // parts)
    pairs = len(mask_spec.block_pairs(length, block, keys)) / parts
    product = 2.0 * rows * pairs * block * keys * dim
    tiles, own = 2 * 2.0 * rows * pairs * dim, 2.0 * rows * length / parts * dim
    return (
        ("_fwd", 2 * product, tiles * keys + 2 * own),
        ("_dq", 3 * product, tiles * keys + 4 * own),
        ("_dkv", 4 * product, tiles * block + 4 * own),
    )
