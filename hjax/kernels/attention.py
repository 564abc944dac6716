"""Attention over whole sequences: what may be seen, the plain form, and the forms for platforms.

One function, ``attend``, for training and prefill: causal, sliding windows, capped scores, sinks,
padding, packed sequences, and prompts shared by their responses. ``reference`` computes it as its
mathematics reads, with scores [length, length]; ``hjax.kernels.blockwise`` (any platform) and
``hjax.kernels.attention_tpu`` (TPU) hold no array with two length dimensions, forward or backward
(FlashAttention; Dao et al. 2022, arXiv 2205.14135).

Shapes: queries [batch, length, heads, head_dim]; keys and values [batch, length, kv_heads,
head_dim]; ``heads = kv_heads * q_per_kv``. Scores and softmax are float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from hjax.kernels import cache_axis, int8_cache
from hjax.kernels.int8_cache import Held
from hjax.kernels.spread import Axes, Spread

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
class Scoring:
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
class Sight:
    """Which places of a row each place sees, before padding and packing are looked at.

    Attributes:
      prompt: places, from the first on, that all responses of the row share.
      response: places of each response after them; 0: the row is one sequence.
      window: as of ``Scoring``, in tokens of prompt and response.
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
        low, high, own, after = (
            x.reshape(-1, block) for x in self.reach(np.arange(length))
        )
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


class Shared(NamedTuple):
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
    shared: Shared | None = None,
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
    scoring: Scoring = Scoring(),
    sight: Sight = Sight(),
    shared: Shared | None = None,
) -> jax.Array:
    """The same as its mathematics reads; see ``attend``."""
    check(q, k, v, segments, sinks, shared)
    batch, length, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    scores = scoring.bend(scores * scoring.factor(dim))
    window = scoring.window if shared is None else 0
    visible = jnp.asarray(dataclasses.replace(sight, window=window).table(length))[None]
    if segments is not None:
        visible = visible & meeting(segments, segments, shared)
    if shared is not None and scoring.window:
        visible = visible & within(scoring.window, shared.positions, shared.positions)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)[None, :, :, None]
        sink = jnp.broadcast_to(sink, scores.shape[:-1])[..., None]
        scores = jnp.concatenate([scores, sink], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length].astype(v.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
    return out.reshape(batch, length, heads, dim)


def meeting(segments: jax.Array, of_keys: jax.Array, shared: Shared | None = None) -> jax.Array:
    """bool [batch, queries, keys]: whether a key's segment is the query's, or its prompt's."""
    same = segments[:, :, None] == of_keys[:, None, :]
    return same if shared is None else same | (shared.prompts[:, :, None] == of_keys[:, None, :])


def within(window: int, positions: jax.Array, of_keys: jax.Array) -> jax.Array:
    """bool [batch, queries, keys]: whether a key is in its query's window."""
    return positions[:, :, None] - of_keys[:, None, :] < window


def shared_prompt(
    q: jax.Array,
    prompt_k: Held,
    prompt_v: Held,
    own_k: Held,
    own_v: Held,
    prompt_seen: jax.Array,
    own_seen: jax.Array,
    scoring: Scoring = Scoring(),
    sinks: jax.Array | None = None,
    axis: int = cache_axis.ROWS,
) -> jax.Array:
    """Tokens of several samples against one copy of their prompt and each one's own, in one piece.

    One softmax over both parts, divided out after the products with the values: scores are never
    concatenated, and no operand but the queries is transposed.

    Args:
      q: [groups, kv_heads, samples, per_kv, tokens, head_dim].
      prompt_k, prompt_v: [groups, kv_heads, prompt, head_dim].
      own_k, own_v: [groups, kv_heads, samples, length, head_dim]; ``Quantized`` as it may be.
      prompt_seen: bool [groups, samples, tokens, prompt], which of the prompt's keys a token sees.
      own_seen: bool [groups, samples, tokens, length], which of its own. Sizes of both but the
        last may be 1.
      scoring, sinks: as of ``attend``.
      axis: along which tokens lie in ``own_k``, see ``hjax.kernels.cache_axis``.

    Returns:
      like q, in its dtype.
    """
    groups, kv_heads, samples, per_kv, tokens, dim = q.shape
    prompt, wide = int8_cache.shape(prompt_v)[2], jnp.float32
    q = q * scoring.factor(dim)

    def hide(scores: jax.Array, seen: jax.Array) -> jax.Array:
        return jnp.where(seen[:, None, :, None], scoring.bend(scores), MASKED)

    # All samples' queries of a group meet the prompt's keys in one product.
    together = q.reshape(groups, kv_heads, samples * per_kv * tokens, dim)
    past = int8_cache.scores("xkqd,xkpd->xkqp", together, prompt_k)
    past = hide(past.reshape(groups, kv_heads, samples, per_kv, tokens, prompt), prompt_seen)
    own = int8_cache.own_scores(q, own_k, axis)
    own = hide(own, own_seen)
    top = jax.lax.stop_gradient(jnp.maximum(past.max(-1), own.max(-1)))[..., None]
    if sinks is not None:
        sink = sinks.astype(wide).reshape(kv_heads, 1, per_kv, 1, 1)
        top = jax.lax.stop_gradient(jnp.maximum(top, sink))
    past, own = jnp.exp(past - top), jnp.exp(own - top)
    total = past.sum(-1, keepdims=True) + own.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    past = past.reshape(groups, kv_heads, together.shape[2], prompt)
    out = int8_cache.values("xkqp,xkpd->xkqd", past, prompt_v, q.dtype)
    own_out = int8_cache.values("xksgtu,xksud->xksgtd", own, own_v, q.dtype)
    out = out.reshape(q.shape) + own_out
    return (out / total).astype(q.dtype)


def attend(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None = None,
    sinks: jax.Array | None = None,
    scoring: Scoring = Scoring(),
    sight: Sight = Sight(),
    spread: Spread = Spread(),
    shared: Shared | None = None,
) -> jax.Array:
    """What each token makes of the values it sees; every device computes its own rows and heads.

    Differentiable once, in reverse mode.

    Args:
      kernel: ``blockwise.attend`` or ``attention_tpu.attend``.
      q: [batch, length, heads, head_dim], of any float dtype; products are made in it.
      k, v: [batch, length, kv_heads, head_dim].
      segments: int32 [batch, length]: a token sees tokens of its own number only (packed
        sequences; padding against the rest); None: all are of one. Where ``sight.packed`` 0 is
        padding, of which the result is undefined.
      sinks: [heads], a score per head that takes part in the softmax and has no value.
      scoring: how scores are made.
      sight: which places see which.
      spread: over which devices; where the length is split, keys and values come from the others.
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
    mesh, manual = spread.mesh, set(inside.manual_axes) if not inside.empty else set()
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, segments, sinks, scoring, sight, **more)
    if manual:
        mesh = inside
    around = spread.ways(spread.length)
    length = q.shape[1]
    short = -length % (around * PART if around > 1 else 1)
    if short:
        q, k, v, segments, more = jax.tree.map(
            functools.partial(lengthened, more=short), (q, k, v, segments, more)
        )
    rows, places = _fitting(spread, q.shape[0]) or None, spread.length or None
    own = PartitionSpec(rows, places, spread.kv_heads or None, None)
    whole_heads = bool(spread.heads) and not spread.kv_heads
    heads_each = q.shape[2] // spread.ways(spread.heads)
    per_kv = q.shape[2] // k.shape[2]

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any, more: Any) -> Any:
        if whole_heads:
            k, v = (_of_heads(x, spread.heads, heads_each, per_kv) for x in (k, v))
        # The stages of a pipeline take branches of their own, where devices can gather from each
        # other, but not send to neighbours.
        return kernel(
            q, k, v, segments, sinks, scoring, sight, axes=spread.length, around=around,
            gather=bool(manual), **more,
        )  # fmt: skip

    out = jax.shard_map(
        run,
        mesh=mesh,
        axis_names=set(mesh.axis_names) - manual,
        in_specs=(
            PartitionSpec(rows, places, spread.heads or None, None),
            own,
            own,
            PartitionSpec(rows, places),
            PartitionSpec(spread.heads or None),
            PartitionSpec(rows, places),
        ),
        out_specs=PartitionSpec(rows, places, spread.heads or None, None),
        check_vma=False,
    )(q, k, v, segments, sinks, more)
    return out[:, :length] if short else out


def _fitting(spread: Spread, rows: int) -> Axes:
    """The first axes of ``rows`` that divide a number of rows; over the others it is whole."""
    axes = spread.rows
    while axes and rows % spread.ways(axes):
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
