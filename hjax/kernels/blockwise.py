"""Blockwise (flash) attention in plain JAX, for any platform, with ring attention.

An online softmax runs over pairs of query and key blocks (Rabe & Staats 2021, arXiv 2112.05682;
FlashAttention-2, arXiv 2307.08691); fully masked pairs are skipped. The backward pass recomputes
the scores of each block from the log-sums. Under context parallelism keys and values go round the
devices (Ring Attention; Liu et al. 2023, arXiv 2310.01889), and their gradients with them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels.attention import (
    CHECKPOINT_NAME,
    MASKED,
    MaskSpec,
    PackedPrompts,
    ScoreOptions,
    in_window,
    merge_heads,
    pad_length,
    same_segment,
    split_heads,
)
from hjax.kernels.kernel_sharding import Axes

BLOCK = 512  # largest block; halved until a device's scores of a pair fit in TILE_BYTES
TILE_BYTES = 8 * 2**20  # what a CPU's cache holds


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Static parameters. A device has ``length`` queries, and ``keys`` keys and values.

    ``axes`` split the length over ``length_shards`` devices; ``ring``: keys go round them.
    """

    scoring: ScoreOptions
    mask_spec: MaskSpec
    block: int
    length: int
    keys: int
    axes: Axes
    length_shards: int
    ring: bool

    @property
    def pairs(self) -> np.ndarray:
        """int32 [pairs, 2] of blocks; all pairs if a device's positions depend on the device."""
        if self.length_shards == 1:
            return self.mask_spec.block_pairs(self.length, self.block)
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
    mask_spec: MaskSpec,
    axes: Axes = (),
    length_shards: int = 1,
    gather: bool = False,
    block: int = 0,
    shared: PackedPrompts | None = None,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` on one device's shard.

    Args:
      axes: mesh axes over which the length is split, inside their ``shard_map``.
      length_shards: devices along them.
      gather: all-gather keys and values instead of sending them round a ring.
      block: block size; 0: chosen.
    """
    batch, length, heads, _ = q.shape
    block = block or _block(batch * heads, length)
    short = -length % block
    if length_shards > 1 and short:  # positions count over all devices, so no padding between them
        block, short = next(b for b in range(block, 0, -1) if length % b == 0), 0
    keys = (length + short) * (length_shards if gather else 1)
    ring = length_shards > 1 and not gather
    plan = _Plan(scoring, mask_spec, block, length + short, keys, axes, length_shards, ring)

    padded = functools.partial(pad_length, more=short)
    q, k, v = padded(q), padded(k), padded(v)
    segs = None if segments is None else jax.tree.map(padded, (segments, shared))
    kv = k, v, segs
    if length_shards > 1 and gather:
        kv = jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), kv)
    k, v, k_segs = kv
    q = split_heads(q, k.shape[2])
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return merge_heads(_attend(plan, q, k, v, segs, k_segs, sinks))[:, :length]


def _block(rows: int, length: int) -> int:
    block = BLOCK
    while block > 128 and 4 * rows * block**2 > TILE_BYTES:
        block //= 2
    return min(block, length)


# q [b, kv, g, t, d]; k, v [b, kv, t, d]; segs: segments [b, t] and ``shared``; sinks [kv * g]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segs: Any, k_segs: Any, sinks: Any
) -> jax.Array:
    return _forward(plan, q, k, v, segs, k_segs, sinks)[0]


def _forward(
    plan: _Plan, q: jax.Array, k: jax.Array, v: jax.Array, segs: Any, k_segs: Any, sinks: Any
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
        old_top, old_total, old_out = (_query_block(x, i, plan.block) for x in state)
        new_top = jnp.maximum(old_top, jnp.where(visible, scores, MASKED).max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_top[..., None]), 0.0)
        before = jnp.exp(old_top - new_top)
        values = _product("bkgts,bksd->bkgtd", weights.astype(v.dtype), tile.values(j))
        new = new_top, old_total * before + weights.sum(-1), old_out * before[..., None] + values
        return tuple(_store_block(x, y, i, plan.block) for x, y in zip(state, new))

    state = _scan_pairs(plan, q, (k, v, k_segs), segs, (top, total, out), pair)
    top, total, out = state
    total = jnp.where(total == 0, 1.0, total)  # fully masked queries
    out = checkpoint_name((out / total[..., None]).astype(q.dtype), CHECKPOINT_NAME)
    log_total = checkpoint_name(top + jnp.log(total), CHECKPOINT_NAME)
    return out, (q, k, v, segs, k_segs, sinks, out, log_total)


def _backward(plan: _Plan, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, segs, k_segs, sinks, out, log_total = kept
    wide = jnp.float32
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
    factor = plan.scoring.query_scale(q.shape[-1])

    def pair(state: Any, i: jax.Array, j: jax.Array, tile: _Tile) -> Any:
        d_q, (d_k, d_v) = state
        scores, slope, visible = tile.scores(i, j)
        weights = jnp.exp(scores - _query_block(log_total, i, plan.block)[..., None])
        weights = jnp.where(visible, weights, 0.0)
        d_block = _query_block(d_out, i, plan.block)
        own_v = _product("bkgts,bkgtd->bksd", weights.astype(q.dtype), d_block)
        d_weights = _product("bkgtd,bksd->bkgts", d_block, tile.values(j))
        d_scores = weights * (d_weights - _query_block(delta, i, plan.block)[..., None])
        d_scores = (d_scores * slope * factor).astype(q.dtype)
        own_q = _product("bkgts,bksd->bkgtd", d_scores, tile.keys(j))
        own_k = _product("bkgts,bkgtd->bksd", d_scores, tile.queries(i))
        d_q = _add_block(d_q, own_q, i, plan.block)
        return d_q, (_add_block(d_k, own_k, j, plan.block), _add_block(d_v, own_v, j, plan.block))

    zeros = jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)
    start = jnp.zeros(q.shape, wide), zeros
    d_q, (d_k, d_v) = _scan_pairs(plan, q, (k, v, k_segs), segs, start, pair, with_keys=True)
    d_sinks = None
    if sinks is not None:
        # A sink has no value: its weight only reduces the others.
        share = jnp.exp(_by_head(sinks, q) - log_total)
        d_sinks = -jnp.sum(share * delta, axis=(0, 3)).reshape(-1).astype(sinks.dtype)
    d_k, d_v = d_k.astype(k.dtype), d_v.astype(v.dtype)
    return d_q.astype(q.dtype), d_k, d_v, None, None, d_sinks


_attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Blocks of a device's queries, and of the keys and values that it has at the moment."""

    plan: _Plan
    q: jax.Array
    k: jax.Array
    v: jax.Array
    q_segs: Any
    k_segs: Any
    first: Any  # position of the first query
    k_first: Any

    def queries(self, i: jax.Array) -> jax.Array:
        return _query_block(self.q, i, self.plan.block)

    def keys(self, j: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.k, j * self.plan.block, self.plan.block, 2)

    def values(self, j: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(self.v, j * self.plan.block, self.plan.block, 2)

    def scores(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """For a pair of blocks: scores float32 [b, kv, g, t, s], the softcap's slope, the mask."""
        plan = self.plan
        raw = _product("bkgtd,bksd->bkgts", self.queries(i), self.keys(j))
        raw = raw * plan.scoring.query_scale(self.q.shape[-1])
        scores, slope = raw, jnp.ones((), jnp.float32)
        if cap := plan.scoring.softcap:
            squashed = jnp.tanh(raw / cap)
            scores, slope = cap * squashed, 1.0 - squashed * squashed
        return scores, slope, self.visible(i, j)[:, None, None]

    def visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Mask of a pair of blocks, bool [b or 1, t, s]."""
        block, visible = self.plan.block, self._static_visible(i, j)[None]
        if self.q_segs is None:
            return visible

        def cut(segs: Any, at: jax.Array) -> Any:
            at = at * block
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, block, 1), segs)

        (own, shared), (other, of_keys) = cut(self.q_segs, i), cut(self.k_segs, j)
        visible = visible & same_segment(own, other, shared)
        if self.plan.mask_spec.packed:
            visible &= own[:, :, None] > 0
        if shared is not None and self.plan.scoring.window:
            visible &= in_window(self.plan.scoring.window, shared.positions, of_keys.positions)
        return visible

    def _static_visible(self, i: jax.Array, j: jax.Array) -> jax.Array:
        block, mask_spec = self.plan.block, self.plan.mask_spec
        query = self.first + i * block + jnp.arange(block)
        key = self.k_first + j * block + jnp.arange(block)
        return mask_spec.is_visible(query[:, None], mask_spec.response_start(query)[:, None], key)


def _scan_pairs(
    plan: _Plan, q: jax.Array, kv: Any, segs: Any, state: Any, pair: Any, with_keys: bool = False
) -> Any:
    """Run ``pair`` on every pair of blocks; in a ring keys and values go once round the devices.

    Args:
      kv: keys, values and their segs.
      with_keys: the state's second part (gradients of keys and values) goes round with them.
    """
    # The barrier ties the pairs to the data. Otherwise, under rematerialisation, XLA computes and
    # keeps the masks of all pairs at once: a byte for every head, query and key.
    pairs, q = jax.lax.optimization_barrier((jnp.asarray(plan.pairs), q))

    def scan_blocks(state: Any, kv: Any, first: Any, k_first: Any) -> Any:
        k, v, k_segs = kv
        tile = _Tile(plan, q, k, v, segs, k_segs, first, k_first)

        def step(state: Any, at: jax.Array) -> Any:
            i, j = at[0], at[1]
            if plan.length_shards == 1 and not plan.mask_spec.packed:
                return pair(state, i, j, tile), None
            # Only packed rows look at segments.
            run = (tile.visible if tile.plan.mask_spec.packed else tile._static_visible)(i, j).any()
            return jax.lax.cond(run, lambda s: pair(s, i, j, tile), lambda s: s, state), None

        return jax.lax.scan(step, state, pairs)[0]

    if plan.length_shards == 1:
        return scan_blocks(state, kv, 0, 0)
    me = jax.lax.axis_index(plan.axes)
    if not plan.ring:
        return scan_blocks(state, kv, me * plan.length, 0)
    next_device = [(n, (n + 1) % plan.length_shards) for n in range(plan.length_shards)]

    def send_on(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axes, next_device), tree)

    def ring_step(carry: Any, number: jax.Array) -> Any:
        kv, state = carry
        owner = (me - number) % plan.length_shards
        next_kv = send_on(kv)  # overlaps with computing on the current ones
        state = scan_blocks(state, kv, me * plan.length, owner * plan.length)
        if with_keys:
            state = state[0], send_on(state[1])
        return (next_kv, state), None

    return jax.lax.scan(ring_step, (kv, state), jnp.arange(plan.length_shards))[0][1]


def _product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, y, preferred_element_type=jnp.float32)


def _by_head(sinks: jax.Array, q: jax.Array) -> jax.Array:
    return sinks.astype(jnp.float32).reshape(q.shape[1], q.shape[2])[None, :, :, None]


def _query_block(x: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, i * block, block, 3)


def _store_block(x: jax.Array, part: jax.Array, i: jax.Array, block: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, i * block, 3)


def _add_block(x: jax.Array, part: jax.Array, i: jax.Array, block: int) -> jax.Array:
    """Add to a block of x [..., length, head_dim]."""
    axis = x.ndim - 2
    before = jax.lax.dynamic_slice_in_dim(x, i * block, block, axis)
    return jax.lax.dynamic_update_slice_in_dim(x, before + part, i * block, axis)
