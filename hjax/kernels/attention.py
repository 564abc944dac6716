"""Attention over whole sequences: what may be seen, the plain form, and the forms for platforms.

One function, ``attend``, for training and prefill: causal, sliding windows, capped scores, sinks,
padding, packed sequences, and prompts shared by their responses. ``reference`` computes it as its
mathematics reads, with scores [length, length]; ``hjax.kernels.blockwise`` (any platform),
``hjax.kernels.splash`` (TPU) and ``hjax.kernels.cudnn`` hold no array with two length dimensions,
forward or backward (FlashAttention; Dao et al. 2022, arXiv 2205.14135).

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

MASKED = -1e30  # in place of scores that must not be seen; finite, so that empty rows stay finite
WHOLE = 512  # places of a sequence up to which scores [length, length] are held
PART = 128  # of a split length each device has a multiple of so many places
# Places of a block of a TPU's kernel: the first that divides a row, else the first that pads it by
# little.
TPU_WHOLE, TPU_PADDED = (512, 640, 384), (512, 256, 128)
KEPT = "attention"  # name under which a rematerialisation policy keeps outputs and log-sums


def tpu_block(length: int) -> int:
    """Queries of a block of a TPU's kernel: one that divides the row, as what pads it and cuts it
    again passes through memory for every array; else one that pads it by at most an eighth."""
    whole = next((b for b in TPU_WHOLE if length % b == 0), 0)
    return whole or next((b for b in TPU_PADDED if -length % b <= length // 8), TPU_PADDED[-1])


def tpu_places(length: int) -> int:
    """Places of a row in a TPU's kernel, whole blocks."""
    block = tpu_block(length)
    return -(-length // block) * block


def lengthened(x: jax.Array, more: int) -> jax.Array:
    """[batch, length, ...] with so many places more, of zeros."""
    return jnp.pad(x, ((0, 0), (0, more), *[(0, 0)] * (x.ndim - 2))) if more else x


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """How scores are made; static when traced.

    Attributes:
      scale: of the products of queries and keys; None: ``head_dim ** -0.5``.
      softcap: scores become ``softcap * tanh(scores / softcap)``; 0: they stay.
      window: tokens of its own sequence that a token sees, itself included; 0: all before it.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0

    def factor(self, head_dim: int) -> float:
        """The scale."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def bend(self, scores: jax.Array) -> jax.Array:
        """Scaled scores, capped."""
        return self.softcap * jnp.tanh(scores / self.softcap) if self.softcap else scores


@dataclasses.dataclass(frozen=True)
class MaskSpec:
    """Which places of a row each place sees, before padding and packing are looked at.

    Attributes:
      prompt: places, from the first on, that all responses of the row share.
      response: places of each response after them; 0: the row is one sequence.
      window: as of ``ScoreOptions``, in tokens of prompt and response.
      packed: the row holds several sequences, as its segments say; blocks that share none are
        left out where a kernel can.
    """

    prompt: int = 0
    response: int = 0
    window: int = 0
    packed: bool = False

    def start(self, place: Any) -> Any:
        """First place of the response that a place belongs to, of the first one in a prompt."""
        if not self.response:
            return place * 0
        after = (abs(place - self.prompt) + place - self.prompt) // 2  # max(., 0), NumPy or JAX
        return self.prompt + after // self.response * self.response

    def sees(self, query: Any, start: Any, key: Any) -> Any:
        """Whether the place ``query``, of a response from ``start`` on, sees the place ``key``."""
        own = key >= start
        visible = key <= query
        if self.response:
            visible &= own | (key < self.prompt)
        if self.window:
            distance = query - key
            if self.response:
                # Of a response's token, its prompt's last token is next to its own first one.
                distance += (key < start) * (self.prompt - start)
            visible &= distance < self.window
        return visible

    def table(self, length: int) -> np.ndarray:
        """bool [length, length]: queries by keys."""
        place = np.arange(length)
        return self.sees(place[:, None], self.start(place)[:, None], place)

    def reach(self, places: np.ndarray) -> tuple[np.ndarray, ...]:
        """First and last place seen in the prompt, and of a place's own response; last excluded.

        Of a row that is one sequence the first pair is empty.
        """
        start = self.start(places)
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

    def blocks(self, length: int, block: int, keys: int = 0) -> np.ndarray:
        """int32 [pairs, 2]: blocks of queries and of keys of which something is seen.

        Args:
          length: of a row, a multiple of ``block`` and ``keys``.
          block, keys: places of a block of queries, and of keys; 0: as many.
        """
        size = keys or block
        low, high, own, after = (x.reshape(-1, block) for x in self.reach(np.arange(length)))
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

    def seen(self, length: int) -> int:
        """Pairs of a query and a key that it sees, in a row of ``length`` places."""
        low, high, own, after = self.reach(np.arange(length))
        return int(np.maximum(high - low, 0).sum() + (after - own).sum())


class PackedPrompts(NamedTuple):
    """Prompts inside packs that stand there once for several responses.

    Attributes:
      prompts: int32 [batch, length], number of the segment that a place sees besides its own: its
        prompt's; in a prompt its own.
      positions: int32 [batch, length], of each place in its own sequence; windows count in them.
    """

    prompts: jax.Array
    positions: jax.Array


Kernel = Callable[..., jax.Array]


def check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    shared: PackedPrompts | None = None,
) -> None:
    """Shapes as of ``attend``."""
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
    sight: MaskSpec = MaskSpec(),
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """The same as its mathematics reads; see ``attend``."""
    check(q, k, v, segments, sinks, shared)
    window = scoring.window if shared is None else 0
    visible = jnp.asarray(dataclasses.replace(sight, window=window).table(q.shape[1]))[None]
    if segments is not None:
        visible = visible & meeting(segments, segments, shared)
    if shared is not None and scoring.window:
        visible = visible & within(scoring.window, shared.positions, shared.positions)
    q, k, v = split_heads(q, k.shape[2]), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return merge_heads(in_one_piece(q, k, v, visible, scoring, sinks))


def in_one_piece(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    scoring: ScoreOptions,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention with scores [length, length], in the dtype of v.

    Args:
      q: [batch, kv_heads, q_per_kv, length, head_dim], as of ``split_heads``; so is the result.
      k, v: [batch, kv_heads, length, head_dim].
      visible: bool [batch or 1, queries, keys].
      scoring, sinks: as of ``attend``.
    """
    q = q * scoring.factor(q.shape[-1])
    scores = jnp.einsum("bkgtd,bksd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None, None], scoring.bend(scores), MASKED)
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


def meeting(
    segments: jax.Array, of_keys: jax.Array, shared: PackedPrompts | None = None
) -> jax.Array:
    """bool [batch, queries, keys]: whether a key's segment is the query's, or its prompt's."""
    same = segments[:, :, None] == of_keys[:, None, :]
    return same if shared is None else same | (shared.prompts[:, :, None] == of_keys[:, None, :])


def within(window: int, positions: jax.Array, of_keys: jax.Array) -> jax.Array:
    """bool [batch, queries, keys]: whether a key is in its query's window."""
    return positions[:, :, None] - of_keys[:, None, :] < window


def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scoring: ScoreOptions = ScoreOptions(),
    sight: MaskSpec = MaskSpec(),
    sharding: KernelSharding = KernelSharding(),
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """What each token makes of the values it sees; every device computes its own rows and heads.

    Differentiable once, in reverse mode.

    Args:
      kernel: ``blockwise.attend``, ``splash.attend`` or ``cudnn.attend``.
      q: [batch, length, heads, head_dim], of any float dtype; products are made in it.
      k, v: [batch, length, kv_heads, head_dim].
      segments: int32 [batch, length]: a token sees tokens of its own number only (packed
        sequences; padding against the rest); None: all are of one. Where ``sight.packed`` 0 is
        padding, of which the result is undefined.
      sinks: [heads], a score per head that takes part in the softmax and has no value.
      scoring: how scores are made.
      sight: which places see which.
      sharding: over which devices; where the length is split, keys and values come from the others.
      shared: prompts that stand once in a pack; for ``blockwise.attend`` alone.

    Returns:
      [batch, length, heads, head_dim], of q's dtype; undefined where a row sees nothing.

    Raises:
      AssertionError: other shapes or dtypes, when traced.
    """
    check(q, k, v, segments, sinks, shared)
    more = {} if shared is None else {"shared": shared}
    sight = dataclasses.replace(sight, window=scoring.window if shared is None else 0)
    inside = jax.sharding.get_abstract_mesh()
    mesh, manual = sharding.mesh, set(inside.manual_axes) if not inside.empty else set()
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, segments, sinks, scoring, sight, **more)
    if manual:
        mesh = inside
    around = sharding.shard_count(sharding.length)
    length = q.shape[1]
    short = -length % (around * PART if around > 1 else 1)
    if short:
        q, k, v, segments, more = jax.tree.map(
            functools.partial(lengthened, more=short), (q, k, v, segments, more)
        )
    rows, places = _fitting(sharding, q.shape[0]) or None, sharding.length or None
    own = PartitionSpec(rows, places, sharding.kv_heads or None, None)
    whole_heads = bool(sharding.heads) and not sharding.kv_heads
    heads_each = q.shape[2] // sharding.shard_count(sharding.heads)
    per_kv = q.shape[2] // k.shape[2]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any, more: Any) -> Any:
        if whole_heads:
            k, v = (_of_heads(x, sharding.heads, heads_each, per_kv) for x in (k, v))
        # The stages of a pipeline take branches of their own, where devices can gather from each
        # other, but not send to neighbours.
        return kernel(
            q, k, v, segments, sinks, scoring, sight, axes=sharding.length, around=around,
            gather=bool(manual), **more,
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


def _fitting(sharding: KernelSharding, rows: int) -> Axes:
    """The first axes of ``rows`` that divide a number of rows; over the others it is whole."""
    axes = sharding.rows
    while axes and rows % sharding.shard_count(axes):
        axes = axes[:-1]
    return axes


def _of_heads(x: jax.Array, axes: Axes, heads: int, per_kv: int) -> jax.Array:
    """Of keys or values that every device has whole, those that its queries read."""
    first = jax.lax.axis_index(axes) * heads // per_kv
    count = max(heads // per_kv, 1)
    return jax.lax.dynamic_slice_in_dim(x, first, count, axis=2)


@functools.lru_cache(maxsize=64)
def cost_label(costs: tuple[tuple[str, float, float], ...], part: bool = False) -> str:
    """Name of a scope that tells ``hjax.xla`` what kernels in it do, which they do not say.

    Args:
      costs: per kernel a part of its name, FLOPs of matrix products, bytes to and from memory.
      part: whether they read parts of their arguments; else these are read once at least.
    """
    told = ":".join(f"{name}={flops:.12e},{moved:.6e}" for name, flops, moved in costs)
    return ("part-cost:" if part else "cost:") + told
