"""Attention over whole sequences, for training and prefill: mask spec, reference, dispatch.

``attend`` covers causal masks, sliding windows, soft-capped scores, sinks, padding, packed
sequences, and prompts shared by their responses. ``reference`` follows the mathematics, with
scores [length, length]. ``hjax.kernels.blockwise`` (any platform), ``hjax.kernels.splash`` (TPU)
and ``hjax.kernels.cudnn`` hold no array with two length dimensions, forward or backward
(FlashAttention; Dao et al. 2022, arXiv 2205.14135).

Shapes: queries [batch, length, heads, head_dim]; keys and values [batch, length, kv_heads,
head_dim]; ``heads = kv_heads * q_per_kv``. Scores and softmax are float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hjax.kernels.kernel_sharding import Axes, KernelSharding

MASKED = -1e30  # replaces masked scores; finite, so that fully masked rows stay finite
DENSE_LENGTH = 512  # sequence length up to which scores [length, length] are held
LENGTH_MULTIPLE = 128  # under context parallelism each device's length is a multiple of this
# Block sizes of the TPU kernel: the first that divides a row, else the first that pads it little.
TPU_DIVIDING_BLOCKS, TPU_PADDING_BLOCKS = (512, 640, 384), (512, 256, 128)
CHECKPOINT_NAME = "attention"  # of outputs and log-sums, for rematerialisation policies


def tpu_block(length: int) -> int:
    """Queries in a block of the TPU kernel. A block that divides the row is preferred, because
    padding copies every array; else one that pads by at most an eighth."""
    dividing = (b for b in TPU_DIVIDING_BLOCKS if length % b == 0)
    padding = (b for b in TPU_PADDING_BLOCKS if -length % b <= length // 8)
    return next(dividing, 0) or next(padding, TPU_PADDING_BLOCKS[-1])


def tpu_padded_length(length: int) -> int:
    """Row length padded to whole blocks of the TPU kernel."""
    block = tpu_block(length)
    return -(-length // block) * block


def pad_length(x: jax.Array, more: int) -> jax.Array:
    """[batch, length, ...] padded with ``more`` zeros at the end of each row."""
    return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How attention scores are computed; static when traced.

    Attributes:
      scale: of the products of queries and keys; None: ``head_dim ** -0.5``.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0: no cap.
      window: sliding window, in tokens of a sequence, the query included; 0: no window.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0

    def query_scale(self, head_dim: int) -> float:
        """The scale of query-key products."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def apply_softcap(self, scores: jax.Array) -> jax.Array:
        """Scaled scores, soft-capped."""
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Static attention mask of a row: the keys that each position sees, before segments apply.

    Attributes:
      prompt: length of the prompt at the row's start, which all its responses share.
      response: length of each response after it; 0: the row is one sequence.
      window: sliding window as in ``ScoreOptions``, in tokens of prompt and response.
      packed: the row holds several sequences, given by its segments; a kernel may skip blocks
        without a common segment.
    """

    prompt: int = 0
    response: int = 0
    window: int = 0
    packed: bool = False

    def response_start(self, place: Any) -> Any:
        """First position of the response that ``place`` is in; in a prompt, of the first one."""
        if not self.response:
            return place * 0
        after = (abs(place - self.prompt) + place - self.prompt) // 2  # max(., 0), NumPy or JAX
        return self.prompt + after // self.response * self.response

    def is_visible(self, query: Any, start: Any, key: Any) -> Any:
        """Whether position ``query``, in a response that starts at ``start``, sees ``key``."""
        own = key >= start
        visible = key <= query
        if self.response:
            visible &= own | (key < self.prompt)
        if self.window:
            distance = query - key
            if self.response:
                # The prompt's last token directly precedes every response's first one.
                distance += (key < start) * (self.prompt - start)
            visible &= distance < self.window
        return visible

    def dense_mask(self, length: int) -> np.ndarray:
        """bool [length, length], queries by keys."""
        place = np.arange(length)
        return self.is_visible(place[:, None], self.response_start(place)[:, None], place)

    def visible_ranges(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """Half-open ranges of visible keys per position: in the prompt, and in its own response.

        If the row is one sequence, the first range is empty.
        """
        start = self.response_start(places)
        nothing = np.zeros_like(places)
        low, high = nothing, np.minimum(self.prompt, places + 1)
        own = start
        if self.window:
            own = np.maximum(start, places - self.window + 1)
            beyond = self.window - 1 - (places - start)  # tokens of the window before the response
            low = np.clip(self.prompt - beyond, 0, self.prompt) if self.response else nothing
        if not self.response:
            high = nothing
        else:
            own = np.minimum(own, places + 1)  # in the prompt: nothing of a response
            inside = places < self.prompt
            low = np.where(inside & (self.window > 0), np.maximum(places - self.window + 1, 0), low)
            own = np.where(inside, places + 1, own)
        return low, high, own, places + 1

    def block_pairs(self, length: int, block: int, keys: int = 0) -> np.ndarray:
        """int32 [pairs, 2]: the (query block, key block) pairs that are not fully masked.

        Args:
          length: of a row, a multiple of ``block`` and ``keys``.
          block, keys: sizes of a query block and of a key block (0: the same).
        """
        size = keys or block
        ranges = self.visible_ranges(np.arange(length))
        low, high, own, after = (x.reshape(-1, block) for x in ranges)
        pairs = []
        for i in range(length // block):
            seen: set[int] = set()
            for first, last in ((low[i], high[i]), (own[i], after[i])):
                some = last > first
                if some.any():
                    begin, end = first[some].min(), last[some].max()
                    seen.update(range(begin // size, -(-end // size)))
            pairs += [(i, j) for j in sorted(seen)]
        return np.asarray(pairs, np.int32)


class PackedPrompts(NamedTuple):
    """Prompts that occur once in a pack for several responses (prefix sharing in training).

    Attributes:
      prompts: int32 [batch, length], the prompt's segment, which a response's tokens see besides
        their own; for a prompt's tokens its own.
      positions: int32 [batch, length], of each token in its sequence; windows count in them.
    """

    prompts: jax.Array
    positions: jax.Array


Kernel = Callable[..., jax.Array]


def check_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    shared: PackedPrompts | None = None,
) -> None:
    """Check the shapes and dtypes that ``attend`` documents."""
    chex.assert_rank((q, k, v), 4)
    chex.assert_equal_shape((k, v))
    batch, length, heads, dim = q.shape
    chex.assert_shape(k, (batch, length, None, dim))
    chex.assert_is_divisible(heads, k.shape[2])
    if segments is not None:
        chex.assert_shape(segments, (batch, length))
        chex.assert_type(segments, int)
    if shared is not None:
        chex.assert_equal_shape((segments, *shared))
        chex.assert_type(list(shared), int)
    if sinks is not None:
        chex.assert_shape(sinks, (heads,))


def reference(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scoring: ScoreOptions = ScoreOptions(),
    mask_spec: MaskSpec = MaskSpec(),
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """Reference implementation of ``attend``."""
    check_attention(q, k, v, segments, sinks, shared)
    mask_spec = dataclasses.replace(mask_spec, window=scoring.window if shared is None else 0)
    visible = jnp.asarray(mask_spec.dense_mask(q.shape[1]))[None]
    if segments is not None:
        visible = visible & same_segment(segments, segments, shared)
    if shared is not None and scoring.window:
        visible = visible & in_window(scoring.window, shared.positions, shared.positions)
    q, k, v = split_heads(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return merge_heads(dense_attention(q, k, v, visible, scoring, sinks))


def dense_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    scoring: ScoreOptions,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention that materialises scores [length, length], in the dtype of v.

    Args:
      q: [batch, kv_heads, q_per_kv, length, head_dim] (``split_heads``), like the result.
      k, v: [batch, kv_heads, length, head_dim].
      visible: bool [batch or 1, queries, keys].
      scoring, sinks: as of ``attend``.
    """
    q = q * scoring.query_scale(q.shape[-1])
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scoring.apply_softcap(scores), MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        sink = sinks.astype(jnp.float32).reshape(scores.shape[1:3])[None, :, :, None, None]
        sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum("bkgts,bksd->bkgtd", weights.astype(v.dtype), v)


def split_heads(q: jax.Array, kv_heads: int) -> jax.Array:
    """[batch, length, heads, dim] -> [batch, kv_heads, q_per_kv, length, dim]."""
    batch, length, heads, dim = q.shape
    return q.reshape(batch, length, kv_heads, heads // kv_heads, dim).transpose(0, 2, 3, 1, 4)


def merge_heads(out: jax.Array) -> jax.Array:
    """[batch, kv_heads, q_per_kv, length, dim] -> [batch, length, heads, dim]."""
    batch, kv_heads, groups, length, dim = out.shape
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * groups, dim)


def same_segment(
    segments: jax.Array, key_segments: jax.Array, shared: PackedPrompts | None = None
) -> jax.Array:
    """bool [batch, queries, keys]: whether a key is in the query's segment, or in its prompt."""
    same = segments[:, :, None] == key_segments[:, None, :]
    if shared is None:
        return same
    return same | (shared.prompts[:, :, None] == key_segments[:, None, :])


def in_window(window: int, positions: jax.Array, key_positions: jax.Array) -> jax.Array:
    """bool [batch, queries, keys]: whether a key is in its query's window."""
    return positions[:, :, None] - key_positions[:, None, :] < window


def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scoring: ScoreOptions = ScoreOptions(),
    mask_spec: MaskSpec = MaskSpec(),
    sharding: KernelSharding = KernelSharding(),
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """Attention in ``shard_map``: every device computes its own rows and heads.

    Differentiable once, in reverse mode.

    Args:
      kernel: ``blockwise.attend``, ``splash.attend`` or ``cudnn.attend``.
      q: [batch, length, heads, head_dim], of any float dtype, which products are computed in.
      k, v: [batch, length, kv_heads, head_dim].
      segments: int32 [batch, length]: a token sees only tokens of its own segment (for packing and
        padding); None: one segment. With ``mask_spec.packed`` segment 0 is padding, whose result
        is undefined.
      sinks: [heads], a score per head that takes part in the softmax and has no value.
      scoring: how scores are computed.
      mask_spec: the static mask.
      sharding: of the arrays; if the length is split, keys and values come from other devices.
      shared: prompts that occur once in a pack; only for ``blockwise.attend``.

    Returns:
      [batch, length, heads, head_dim], of q's dtype; undefined for fully masked queries.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    check_attention(q, k, v, segments, sinks, shared)
    more = {} if shared is None else {"shared": shared}
    mask_spec = dataclasses.replace(mask_spec, window=scoring.window if shared is None else 0)
    if sharding.mesh is None or sharding.mesh.size == 1:
        return kernel(q, k, v, segments, sinks, scoring, mask_spec, **more)
    return _attend_sharded(
        kernel, q, k, v, segments, sinks, scoring, mask_spec, sharding, more=more
    )


def _attend_sharded(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    scoring: ScoreOptions,
    mask_spec: MaskSpec,
    sharding: KernelSharding,
    more: dict[str, Any],
) -> jax.Array:
    """``attend`` over several devices; ``more`` are further arrays that the kernel takes."""
    inside = jax.sharding.get_abstract_mesh()
    manual = set() if inside.empty else set(inside.manual_axes)
    mesh: Any = inside if manual else sharding.mesh
    length_shards = sharding.shard_count(sharding.length)
    length = q.shape[1]
    short = -length % (length_shards * LENGTH_MULTIPLE if length_shards > 1 else 1)
    if short:
        q, k, v, segments, more = jax.tree.map(
            functools.partial(pad_length, more=short), (q, k, v, segments, more)
        )
    rows, places = _row_axes(sharding, q.shape[0]) or None, sharding.length or None
    own = PartitionSpec(rows, places, sharding.kv_heads or None, None)
    kv_replicated = bool(sharding.heads) and not sharding.kv_heads
    local_heads = q.shape[2] // sharding.shard_count(sharding.heads)
    per_kv = q.shape[2] // k.shape[2]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any, more: Any) -> Any:
        if kv_replicated:
            k, v = (_own_kv_heads(x, sharding.heads, local_heads, per_kv) for x in (k, v))
        # Pipeline stages take different branches. There a ppermute between neighbours is not
        # possible, so keys and values are all-gathered.
        return kernel(
            q, k, v, segments, sinks, scoring, mask_spec, axes=sharding.length,
            length_shards=length_shards, gather=bool(manual), **more,
        )  # fmt: skip

    out = jax.shard_map(
        run,
        mesh=mesh,
        axis_names=set(mesh.axis_names) - manual,
        in_specs=(
            PartitionSpec(rows, places, sharding.heads or None, None),
            own,
            own,
            PartitionSpec(rows, places),
            PartitionSpec(sharding.heads or None),
            PartitionSpec(rows, places),
        ),
        out_specs=PartitionSpec(rows, places, sharding.heads or None, None),
        check_vma=False,
    )(q, k, v, segments, sinks, more)
    return out[:, :length] if short else out


def _row_axes(sharding: KernelSharding, rows: int) -> Axes:
    """The leading axes of ``sharding.rows`` that divide a number of rows."""
    axes = sharding.rows
    while axes and rows % sharding.shard_count(axes):
        axes = axes[:-1]
    return axes


def _own_kv_heads(x: jax.Array, axes: Axes, heads: int, per_kv: int) -> jax.Array:
    """The heads of replicated keys or values that this device's queries read."""
    first = jax.lax.axis_index(axes) * heads // per_kv
    return jax.lax.dynamic_slice_in_dim(x, first, max(heads // per_kv, 1), axis=2)


@functools.lru_cache(maxsize=64)
def cost_label(costs: tuple[tuple[str, float, float], ...], part: bool = False) -> str:
    """Name of a scope that gives ``hjax.xla`` the costs of kernels without a cost estimate.

    Args:
      costs: per kernel a part of its name, FLOPs of matrix products, bytes to and from memory.
      part: whether kernels read only parts of their arguments; else at least all of them once.
    """
    costs_text = ":".join(f"{name}={flops:.12e},{moved:.6e}" for name, flops, moved in costs)
    return ("part-cost:" if part else "cost:") + costs_text
