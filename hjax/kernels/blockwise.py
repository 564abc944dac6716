"""Attention a block of queries and a block of keys at a time, in plain JAX, for any platform.

One softmax over all blocks that a query sees, kept as a running maximum and sum (Rabe & Staats
2021, arXiv 2112.05682; FlashAttention-2, arXiv 2307.08691); blocks of which nothing is seen are
left out. The backward pass makes the scores of each block again from the log-sums. Where the length
is split, blocks of keys and values go round from device to device (Ring Attention; Liu et al. 2023,
arXiv 2310.01889), and their gradients with them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels.attention import (
    KEPT,
    MASKED,
    MaskSpec,
    PackedPrompts,
    ScoreOptions,
    lengthened,
    meeting,
    merge_heads,
    split_heads,
    within,
)
from hjax.kernels.kernel_sharding import Axes

BLOCK = 512  # the largest; halved until a device's scores of a block are small enough
TILE_BYTES = 8 * 2**20  # of scores: what a CPU's cache holds


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is static: of ``length`` places a device has the queries, of ``keys`` keys and values.

    ``axes`` split a row's length over ``around`` devices; ``travels``: keys go round them.
    """

    scoring: ScoreOptions
    sight: MaskSpec
    block: int
    length: int
    keys: int
    axes: Axes
    around: int
    travels: bool

    @property
    def pairs(self) -> np.ndarray:
        """int32 [pairs, 2] of blocks; all of them where a device's places depend on the device."""
        if self.around == 1:
            return self.sight.blocks(self.length, self.block)
        queries, keys = (np.arange(n // self.block) for n in (self.length, self.keys))
        grid = np.stack(np.meshgrid(queries, keys, indexing="ij"), -1)
        return grid.reshape(-1, 2).astype(np.int32)


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
    gather: bool = False,
    block: int = 0,
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` of what one device holds.

    Args:
      axes: mesh axes over which the length is split, inside their ``shard_map``.
      around: devices along them.
      gather: every device gets all keys and values at once, instead of one part after another.
      block: places of a block; 0: chosen.
    """
    batch, length, heads, _ = q.shape
    block = block or _block(batch * heads, length)
    short = -length % block
    if around > 1 and short:  # places are numbered through all devices
        block, short = next(b for b in range(block, 0, -1) if length % b == 0), 0
    keys = (length + short) * (around if gather else 1)
    travels = around > 1 and not gather
    plan = _Plan(scoring, sight, block, length + short, keys, axes, around, travels)

    padded = functools.partial(lengthened, more=short)
    q, k, v = padded(q), padded(k), padded(v)
    marks = None if segments is None else jax.tree.map(padded, (segments, shared))
    held = k, v, marks
    if around > 1 and gather:
        held = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), held)
    k, v, k_marks = held
    q = split_heads(q, k.shape[2])
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    out = _attend(plan, q, k, v, marks, k_marks, sinks)
    return merge_heads(out)[:, :length]


def _block(rows: int, length: int) -> int:
    block = BLOCK
    while block > 128 and 4 * rows * block**2 > TILE_BYTES:
        block //= 2
    return min(block, length)


# q [b, kv, g, t, d], k, v [b, kv, t, d], marks: segments [b, t] and what is shared, sinks [kv * g]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, marks: Any, k_marks: Any, sinks: Any
) -> jax.Array:
    return _forward(plan, q, k, v, marks, k_marks, sinks)[0]


def _forward(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, marks: Any, k_marks: Any, sinks: Any
) -> Any:
    shape = q.shape[:-1]
    top = jnp.full(shape, MASKED, jnp.float32)
    total, out = jnp.zeros(shape, jnp.float32), jnp.zeros(q.shape, jnp.float32)
    if sinks is not None:
        top = jnp.broadcast_to(_by_head(sinks, q), shape)
        total = jnp.ones(shape, jnp.float32)

    def pair(state: Any, i: jax.Array, j: jax.Array, tile: _Tile) -> Any:
        top, total, out = state
        scores, _, visible = tile.scores(i, j)
        old_top, old_total, old_out = (_cut(x, i, plan.block) for x in state)
        new_top = jnp.maximum(old_top, jnp.where(visible, scores, MASKED).max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        before = jnp.exp(old_top - new_top)
        values = _product("bkgts,bksd->bkgtd", weights.astype(v.dtype), tile.values(j))
        new = new_top, old_total * before + weights.sum(-1), old_out * before[..., None] + values
        return tuple(_put(x, y, i, plan.block) for x, y in zip(state, new))

    state = _round(plan, q, (k, v, k_marks), marks, (top, total, out), pair)
    top, total, out = state
    total = jnp.where(total == 0, 1.0, total)  # of rows that see nothing
    out = checkpoint_name((out / total[..., None]).astype(q.dtype), KEPT)
    log_total = checkpoint_name(top + jnp.log(total), KEPT)
    return out, (q, k, v, marks, k_marks, sinks, out, log_total)


def _backward(plan: _Plan, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, marks, k_marks, sinks, out, log_total = kept
    wide = jnp.float32
    meant = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
    factor = plan.scoring.factor(q.shape[-1])

    def pair(state: Any, i: jax.Array, j: jax.Array, tile: _Tile) -> Any:
        d_q, (d_k, d_v) = state
        scores, slope, visible = tile.scores(i, j)
        weights = jnp.exp(scores - _cut(log_total, i, plan.block)[..., None])
        weights = jnp.where(visible, weights, 0.0)
        given = _cut(d_out, i, plan.block)
        own_v = _product("bkgts,bkgtd->bksd", weights.astype(q.dtype), given)
        d_weights = _product("bkgtd,bksd->bkgts", given, tile.values(j))
        d_scores = weights * (d_weights - _cut(meant, i, plan.block)[..., None])
        d_scores = (d_scores * slope * factor).astype(q.dtype)
        own_q = _product("bkgts,bksd->bkgtd", d_scores, tile.keys(j))
        own_k = _product("bkgts,bkgtd->bksd", d_scores, tile.queries(i))
        d_q = _add(d_q, own_q, i, plan.block)
        return d_q, (_add(d_k, own_k, j, plan.block), _add(d_v, own_v, j, plan.block))

    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    begin = jnp.zeros(q.shape, wide), zeros
    d_q, (d_k, d_v) = _round(plan, q, (k, v, k_marks), marks, begin, pair, of_keys=True)
    d_sinks = None
    if sinks is not None:
        # A sink has no value: its weight only takes from the others.
        share = jnp.exp(_by_head(sinks, q) - log_total)
        d_sinks = -jnp.sum(share * meant, axis=(0, 3)).reshape(-1).astype(sinks.dtype)
    d_k, d_v = d_k.astype(k.dtype), d_v.astype(v.dtype)
    return d_q.astype(q.dtype), d_k, d_v, None, None, d_sinks


_attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """A device's queries, and the keys and values that are with it, by block."""

    plan: _Plan
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_marks: Any
    k_marks: Any
    first: Any  # place of the first query
    k_first: Any

    def queries(self, i: jax.Array) -> jax.Array:
        return _cut(self.q, i, self.plan.block)

    def keys(self, j: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.k, j * self.plan.block, self.plan.block, 2)

    def values(self, j: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.v, j * self.plan.block, self.plan.block, 2)

    def scores(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """float32 [b, kv, g, t, s] of a pair of blocks, the cap's slope, and what is visible."""
        plan = self.plan
        raw = _product("bkgtd,bksd->bkgts", self.queries(i), self.keys(j))
        raw = raw * plan.scoring.factor(self.q.shape[-1])
        scores, slope = raw, jnp.ones((), jnp.float32)
        if cap := plan.scoring.softcap:
            bent = jnp.tanh(raw / cap)
            scores, slope = cap * bent, 1.0 - bent * bent
        return scores, slope, self.visible(i, j)[:, None, None]

    def visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """bool [b or 1, t, s] of a pair of blocks."""
        block, visible = self.plan.block, self._by_place(i, j)[None]
        if self.q_marks is None:
            return visible

        def cut(marks: Any, at: jax.Array) -> Any:
            at = at * block
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, block, 1), marks)

        (own, shared), (other, of_keys) = cut(self.q_marks, i), cut(self.k_marks, j)
        visible = visible & meeting(own, other, shared)
        if self.plan.sight.packed:
            visible &= own[:, :, None] > 0
        if shared is not None and self.plan.scoring.window:
            visible &= within(self.plan.scoring.window, shared.positions, of_keys.positions)
        return visible

    def meets(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Whether something of a pair of blocks may be visible; at padding of rows that are one
        sequence nobody looks."""
        return (self.visible if self.plan.sight.packed else self._by_place)(i, j).any()

    def _by_place(self, i: jax.Array, j: jax.Array) -> jax.Array:
        block, sight = self.plan.block, self.plan.sight
        query = self.first + i * block + jnp.arange(block)
        key = self.k_first + j * block + jnp.arange(block)
        return sight.sees(query[:, None], sight.start(query)[:, None], key)


def _round(
    plan: _Plan, q: jax.Array, held: Any, marks: Any, state: Any, pair: Any, of_keys: bool = False
) -> Any:
    """``pair`` of every pair of blocks, keys and values going once round the devices.

    Args:
      held: keys, values and their marks.
      of_keys: the state's second part belongs to the keys and goes with them.
    """
    # Tied to the data: what each pair sees is known without it, and where layers are recomputed all
    # pairs' masks would be made at once and kept, a byte for every head, query and key.
    pairs, q = jax.lax.optimization_barrier((jnp.asarray(plan.pairs), q))

    def over(state: Any, held: Any, first: Any, k_first: Any) -> Any:
        k, v, k_marks = held
        tile = _Tile(plan, q, k, v, marks, k_marks, first, k_first)

        def step(state: Any, at: jax.Array) -> Any:
            i, j = at[0], at[1]
            if plan.around == 1 and not plan.sight.packed:
                return pair(state, i, j, tile), None
            meets = tile.meets(i, j)
            return jax.lax.cond(meets, lambda s: pair(s, i, j, tile), lambda s: s, state), None

        return jax.lax.scan(step, state, pairs)[0]

    if plan.around == 1:
        return over(state, held, 0, 0)
    me = jax.lax.axis_index(plan.axes)
    if not plan.travels:
        return over(state, held, me * plan.length, 0)
    ahead = [(n, (n + 1) % plan.around) for n in range(plan.around)]

    def on(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axes, ahead), tree)

    def turn(carry: Any, number: jax.Array) -> Any:
        held, state = carry
        whose = (me - number) % plan.around
        coming = on(held)  # on its way while this one's are read
        state = over(state, held, me * plan.length, whose * plan.length)
        if of_keys:
            state = state[0], on(state[1])
        return (coming, state), None

    return jax.lax.scan(turn, (held, state), jnp.arange(plan.around))[0][1]


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _by_head(sinks: jax.Array, q: jax.Array) -> jax.Array:
    return sinks.astype(jnp.float32).reshape(q.shape[1], q.shape[2])[None, :, :, None]


def _cut(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, 3)


def _put(x: jax.Array, part: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * block, 3)


def _add(x: jax.Array, part: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Of [..., length, head_dim]."""
    axis = x.ndim - 2
    before = jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)
    return jax.lax.dynamic_update_slice_in_dim(x, before + part, i * block, axis)
