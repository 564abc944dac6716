"""Attention on TPUs: kernels of our own, told what our rows look like.

They compute what a row's ``Sight`` leaves in steps of 128 places (``attention_visits``). JAX's
splash attention (``splash``) computes where the length is split over devices, and rows so long that
a head's gradients of keys and values have no room on the chip.

The backward pass is one kernel for the gradients of queries, keys and values: five products of a
block (scores, weights' gradients, and the three gradients) where a kernel for the queries and one
for keys and values make seven. Queries by queries: a block's gradients are complete before the next
one's begin; those of a key-value head's keys and values stay on the chip, in float32, until all its
queries' heads have added to them, and each block leaves it with its last visit. The mathematics is
FlashAttention-2's (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels import splash
from hjax.kernels.attention import (
    KEPT,
    MASKED,
    Scoring,
    Sight,
    lengthened,
    tpu_block,
    tpu_places,
)
from hjax.kernels.attention_block_tpu import (
    LIMIT,
    Given,
    Hide,
    How,
    Specs,
    Step,
    dot,
    lanes,
    params,
)
from hjax.kernels.attention_visits import FIRST, FIRST_KEYS, LAST, LAST_KEYS
from hjax.kernels.spread import Axes

_TILES = 7  # blocks [places, head_dim] read and written in a step: four and three
_BETWEEN = 8  # arrays [keys, queries] between the products, float32


def has_room(length: int, block: int, dim: int, element: int) -> bool:
    """Whether a head's gradients of keys and values have room on the chip, with the blocks of a
    step, twice, as one is read while another is multiplied. ``element``: bytes of one."""
    wide = lanes(dim)
    kept = 2 * 4 * length * wide + 4 * block * wide
    return kept + 2 * _TILES * element * block * wide + _BETWEEN * 4 * block**2 <= LIMIT


def backward(
    how: How,
    arrays: tuple[jax.Array, jax.Array, jax.Array],
    log_total: jax.Array,
    d_out: jax.Array,
    meant: jax.Array,
    segments: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values, in their dtypes.

    Args:
      arrays: queries [batch, heads, length, head_dim], times the scale; keys, values [batch,
        kv_heads, length, head_dim].
      log_total: float32 [batch, heads, length], logarithm of what weights were divided by.
      d_out: like queries, the gradient of what attention gave.
      meant: float32 [batch, heads, length], the sum over a head's elements of ``d_out`` times what
        attention gave.
      segments: int32 [batch, length].
    """
    batch, heads, length, dim = arrays[0].shape
    kv_heads, block = arrays[1].shape[1], how.block
    each = heads // kv_heads
    beside = Given.of(how, segments)
    specs = Specs.of(how, each, dim, beside)
    numbers, rows = len(beside.numbers), len(beside.rows)

    def totals(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
        # A block is written when the next one's turn comes: that is in the last of the heads that
        # share keys and values.
        return row, kv, lists[5][jnp.where(member == each - 1, visit, 0)], 0

    of_totals = pl.BlockSpec((None, None, block, dim), totals)
    q, k, v = arrays
    return pl.pallas_call(
        functools.partial(_backward_kernel, how, each, numbers, rows),
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=numbers,
            in_specs=[
                specs.queries, specs.keys, specs.keys, specs.queries, specs.line, specs.line,
                *specs.rows,
            ],
            out_specs=(specs.queries, of_totals, of_totals),
            grid=(batch, kv_heads, each, len(how.visits.queries)),
            scratch_shapes=[
                pltpu.VMEM((rows, dim), jnp.float32) for rows in (block, length, length)
            ],
        ),
        compiler_params=params(),
        cost_estimate=_backward_estimate(how, q, k),
        interpret=how.interpret,
        name="attention_backward",
    )(
        *beside.numbers, q, k, v, d_out, log_total[:, :, None], meant[:, :, None], *beside.rows
    )  # fmt: skip


def _backward_kernel(how: How, each: int, numbers: int, rows: int, *refs: Any) -> None:
    """A visit of a block of queries to one of keys.

    Args:
      each: heads of queries to one of keys and values.
      numbers, rows: how many of the refs are lists of visits, and rows of segments.
    """
    step = Step(how, refs[:numbers], refs[numbers + 6 : numbers + 6 + rows])
    q, k, v, d_out, log_total, meant = refs[numbers : numbers + 6]
    d_q, d_k, d_v, sum_q, sum_k, sum_v = refs[numbers + 6 + rows :]
    block, dim = how.block, q.shape[-1]
    member, own = pl.program_id(2), pl.ds(step.place, block)

    @step.on(FIRST)
    def _() -> None:
        sum_q[...] = jnp.zeros_like(sum_q)

    @step.on(FIRST_KEYS, member == 0)
    def _() -> None:
        for total in (sum_k, sum_v):
            total[own, :] = jnp.zeros((block, dim), jnp.float32)

    def add(queries: Any, keys: Any, hide: Hide) -> None:
        here = pl.ds(step.place + keys.start, keys.size)
        part_q, part_k, given = q[queries, :], k[keys, :], d_out[queries, :]
        scores = dot(part_k, part_q, 1, 1)
        if how.softcap:
            bent = jnp.tanh(scores / how.softcap)
            scores = how.softcap * bent
        scores = hide(scores)
        weights = jnp.exp(scores - log_total[:, queries])
        sum_v[here, :] += dot(weights.astype(given.dtype), given, 1, 0)
        d_scores = (dot(v[keys, :], given, 1, 1) - meant[:, queries]) * weights
        if how.softcap:
            d_scores *= 1 - bent * bent
        d_scores = d_scores.astype(part_q.dtype)
        sum_k[here, :] += dot(d_scores, part_q, 1, 0)
        sum_q[queries, :] += dot(d_scores, part_k, 0, 0)

    step.compute(add)

    @step.on(LAST)
    def _() -> None:
        d_q[...] = sum_q[...].astype(d_q.dtype)

    @step.on(LAST_KEYS, member == each - 1)
    def _() -> None:
        d_k[...] = sum_k[own, :].astype(d_k.dtype)
        d_v[...] = sum_v[own, :].astype(d_v.dtype)


def _backward_estimate(how: How, q: jax.Array, k: jax.Array) -> Any:
    """Five products of what is computed, were no blocks kept apart by segments; queries, their
    gradients and outputs' once, keys and values as often as their blocks change, their gradients
    once."""
    batch, heads, length, dim = q.shape
    found = how.visits
    moved = batch * heads * (3 * length + 2 * found.reads * how.block) * dim + 2 * k.size
    return pl.CostEstimate(
        flops=5 * 2 * batch * heads * found.computed * dim,
        bytes_accessed=moved * q.dtype.itemsize + 2 * 4 * batch * heads * length,
        transcendentals=batch * heads * found.computed,
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array | None,
    sinks: jax.Array | None,
    scoring: Scoring,
    sight: Sight,
    axes: Axes = (),
    around: int = 1,
    gather: bool = True,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.attention.attend`` of what one device holds; arguments as of
    ``splash.attend``."""
    length, dim = q.shape[1], q.shape[3]
    block, places = tpu_block(length), tpu_places(length)
    if around > 1 or not has_room(places, block, dim, q.dtype.itemsize):
        return splash.attend(
            q, k, v, segments, sinks, scoring, sight, axes=axes, around=around, gather=gather,
            interpret=interpret,
        )  # fmt: skip
    how = How(sight, places, block, scoring.softcap, interpret)
    short = places - length

    padded = functools.partial(lengthened, more=short)
    q, k, v = (padded(x).transpose(0, 2, 1, 3) for x in (q * scoring.factor(dim), k, v))
    out = _attend(how, q, k, v, None if segments is None else padded(segments), sinks)
    return out.transpose(0, 2, 1, 3)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: How, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any
) -> jax.Array:
    return _forward(how, q, k, v, segments, sinks)[0]


def _keep(how: How, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any) -> Any:
    found = _forward(how, q, k, v, segments, sinks)
    out, log_total = (checkpoint_name(x, KEPT) for x in found)
    return out, (q, k, v, segments, sinks, out, log_total)


def _back(how: How, kept: Any, d_out: jax.Array) -> Any:
    q, k, v, segments, sinks, out, log_total = kept
    # Beside the kernel: what is kept of a layer is read where it lies among all layers'.
    meant = (out.astype(jnp.float32) * d_out.astype(jnp.float32)).sum(-1)
    gradients = backward(how, (q, k, v), log_total, d_out, meant, segments)
    d_sinks = None
    if sinks is not None:
        weights = jnp.exp(sinks.astype(jnp.float32)[:, None] - log_total)
        d_sinks = -(weights * meant).sum((0, 2)).astype(sinks.dtype)
    return *gradients, None, d_sinks


_attend.defvjp(_keep, _back)


# A program of its own: a kernel whose results nobody reads stays, a program goes. So where outputs
# are kept it is not run again.
@functools.partial(jax.jit, static_argnums=0)
def _forward(
    how: How, q: jax.Array, k: jax.Array, v: jax.Array, segments: Any, sinks: Any
) -> tuple[jax.Array, jax.Array]:
    """Outputs like queries, and the logarithm of what weights were divided by, float32 [batch,
    heads, length]. Arguments as of ``backward``; ``sinks`` [heads]."""
    batch, heads, length, dim = q.shape
    kv_heads, block = k.shape[1], how.block
    each = heads // kv_heads
    beside = Given.of(how, segments)
    specs = Specs.of(how, each, dim, beside)
    numbers, rows = list(beside.numbers), len(beside.rows)
    if sinks is not None:
        numbers.append(sinks.astype(jnp.float32))

    visits = len(beside.numbers)
    out, log_total = pl.pallas_call(
        functools.partial(_kernel, how, each, visits, rows, sinks is not None),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, length), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(numbers),
            in_specs=[specs.queries, specs.keys, specs.keys, *specs.rows],
            out_specs=(specs.queries, specs.line),
            grid=(batch, kv_heads, each, len(how.visits.queries)),
            scratch_shapes=[pltpu.VMEM((rows, block), jnp.float32) for rows in (1, 1, dim)],
        ),
        compiler_params=params(),
        cost_estimate=_estimate(how, q),
        interpret=how.interpret,
        name="attention_forward",
    )(*numbers, q, k, v, *beside.rows)
    return out, log_total[:, :, 0]


def _kernel(how: How, each: int, visits: int, rows: int, sinks: bool, *refs: Any) -> None:
    """A visit of a block of queries to one of keys.

    Args:
      each: heads of queries to one of keys and values.
      visits, rows: how many of the refs are lists of visits, and rows of segments.
      sinks: after the lists there are the heads' sinks.
    """
    listed, refs = refs[: visits + sinks], refs[visits + sinks :]
    step = Step(how, listed[:visits], refs[3 : 3 + rows])
    q, k, v = refs[:3]
    out, log_total, top, total, made = refs[3 + rows :]
    head = pl.program_id(1) * each + pl.program_id(2)

    @step.on(FIRST)
    def _() -> None:
        # A sink is a score that has no value.
        top[...] = jnp.full_like(top, listed[-1][head] if sinks else MASKED)
        total[...] = jnp.full_like(total, 1.0 if sinks else 0.0)
        made[...] = jnp.zeros_like(made)

    def add(queries: Any, keys: Any, hide: Hide) -> None:
        scores = dot(k[keys, :], q[queries, :], 1, 1)
        if how.softcap:
            scores = how.softcap * jnp.tanh(scores / how.softcap)
        scores = hide(scores)
        old = top[:, queries]
        new = jnp.maximum(old, scores.max(0, keepdims=True))
        weights, before = jnp.exp(scores - new), jnp.exp(old - new)
        top[:, queries] = new
        total[:, queries] = total[:, queries] * before + weights.sum(0, keepdims=True)
        values = dot(v[keys, :], weights.astype(v.dtype), 0, 0)
        made[:, queries] = made[:, queries] * before + values

    step.compute(add)

    @step.on(LAST)
    def _() -> None:
        out[...] = (made[...] / total[...]).T.astype(out.dtype)
        log_total[...] = top[...] + jnp.log(total[...])


def _estimate(how: How, q: jax.Array) -> Any:
    """Two products of what is computed, were no blocks kept apart by segments; queries and outputs
    once, keys and values as often as their blocks change."""
    batch, heads, length, dim = q.shape
    found = how.visits
    moved = batch * heads * (2 * length + 2 * found.reads * how.block) * dim
    return pl.CostEstimate(
        flops=2 * 2 * batch * heads * found.computed * dim,
        bytes_accessed=moved * q.dtype.itemsize + 4 * batch * heads * length,
        transcendentals=batch * heads * found.computed,
    )
