"""Attention on TPUs: JAX's splash attention, told what our rows look like.

A library's kernel (``jax.experimental.pallas.ops.tpu.splash_attention``), which reads and computes
only the blocks that a static mask leaves; here are the mask of prompts shared by their responses,
padding to its blocks, and the costs that it does not tell the compiler. Where the length is split,
each device gathers keys and values and computes its own queries. Rows whose mask has too many
responses for it are computed by blocks.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

from hjax.kernels import blockwise
from hjax.kernels.attention import (
    KEPT,
    TPU_PADDED,
    MaskSpec,
    ScoreOptions,
    cost_label,
    lengthened,
    tpu_block,
    tpu_places,
)
from hjax.kernels.kernel_sharding import Axes

_KEYS = {640: 256}  # keys of a block, where they are not as many as queries
_BITS = 31  # of a place and, above it, its response's number


class SplashMask(masks._ComputableMask):  # the base of what its kernel computes as it goes
    """A row's ``MaskSpec``, computed in the kernel without divisions: its queries carry their own
    response's number."""

    def __init__(self, sight: MaskSpec, length: int):
        self.sight, self._bits = sight, (length - 1).bit_length()
        super().__init__((length, length), self._sees)
        place = self.q_sequence
        if sight.response:
            number = (sight.start(place) - sight.prompt) // sight.response
            self.q_sequence = (number << self._bits | place).astype(np.int32)

    @staticmethod
    def takes(sight: MaskSpec, length: int) -> bool:
        """Whether a place and its response's number stand in one integer: of rows of 2 ** 15 places
        always, of 2 ** 20 with up to 2047 responses."""
        if not sight.response:
            return True
        responses = max(length - sight.prompt, 1) // sight.response
        return (length - 1).bit_length() + responses.bit_length() <= _BITS

    def _sees(self, query: Any, key: Any) -> Any:
        sight = self.sight
        if not sight.response:
            return sight.sees(query, 0, key)
        start = sight.prompt + (query >> self._bits) * sight.response
        return sight.sees(query & ((1 << self._bits) - 1), start, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SplashMask) and (self.sight, self.shape) == (
            other.sight,
            other.shape,
        )

    def __hash__(self) -> int:
        return hash((self.sight, self.shape))


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    scoring: ScoreOptions,
    sight: MaskSpec,
    axes: Axes = (),
    around: int = 1,
    gather: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` of what one device holds.

    Args:
      axes: mesh axes over which the length is split, inside their ``shard_map``.
      around: devices along them.
      gather: of ``blockwise.attend``; here keys and values are gathered in any case.
      interpret: run the kernel's steps in plain JAX, for tests without a TPU.
    """
    batch, length, heads, dim = q.shape
    block, each = tpu_block(length), tpu_places(length)
    if around > 1 and each != length:
        block = next(b for b in TPU_PADDED if length % b == 0)
        each = length
    if not SplashMask.takes(sight, each * around):
        return blockwise.attend(
            q, k, v, segments, sinks, scoring, sight, axes=axes, around=around, gather=gather
        )
    short = each - length

    padded = functools.partial(lengthened, more=short)
    q, k, v = padded(q * scoring.factor(dim)), padded(k), padded(v)
    marks = jnp.zeros(q.shape[:2], jnp.int32) if segments is None else padded(segments)
    key_marks = marks
    if around > 1:
        k, v, key_marks = (
            jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (k, v, marks)
        )
    kernel = _kernel(sight, each * around, heads, scoring.softcap, block, around, interpret)
    if around > 1:
        kernel = _part(kernel, jax.lax.axis_index(axes), around)
    scope = cost_label(_costs(sight, each * around, batch * heads, dim, block, around))
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    with jax.named_scope(scope):
        run = jax.vmap(
            lambda q, k, v, own, other: kernel(q, k, v, splash.SegmentIds(own, other), sinks=sinks)
        )
        out = run(q, k, v, marks, key_marks)
    return out.transpose(0, 2, 1, 3)[:, :length].astype(q.dtype)


def _keys(block: int, length: int) -> int:
    """Keys of a block. Fewer than queries beside 640: short responses leave half as many that are
    computed and not seen."""
    keys = _KEYS.get(block, block)
    return keys if length % keys == 0 else block


def _kernel(
    sight: MaskSpec, length: int, heads: int, softcap: float, block: int, parts: int, interpret:
bool ) -> Any:
    keys = _keys(block, length // parts)
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
    mask = masks.MultiHeadMask([SplashMask(sight, length)] * heads)
    return splash.make_splash_mha(
        mask,
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=softcap or None,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )


def _part(kernel: Any, number: jax.Array, parts: int) -> Any:
    """The kernel of one device's queries."""

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
    sight: MaskSpec, length: int, rows: int, dim: int, block: int, parts: int
) -> tuple[tuple[str, float, float], ...]:
    """Per kernel its products (of whole blocks) and what it reads and writes, on a device.

    A block's products: scores and outputs in the forward pass; scores, the weights' gradients and
    the queries' in ``dq``; scores, weights' gradients, keys' and values' in ``dkv``.
    """
    keys = _keys(block, length // parts)
    pairs = len(sight.blocks(length, block, keys)) / parts
    product = 2.0 * rows * pairs * block * keys * dim
    tiles, own = 2 * 2.0 * rows * pairs * dim, 2.0 * rows * length / parts * dim
    return (
        ("_fwd", 2 * product, tiles * keys + 2 * own),
        ("_dq", 3 * product, tiles * keys + 4 * own),
        ("_dkv", 4 * product, tiles * block + 4 * own),
    )
