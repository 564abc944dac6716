"""Backward pass of a TPU's attention: one kernel for the gradients of queries, keys and values.

Five products of a block (scores, weights' gradients, and the three gradients) where a kernel for
the queries and one for keys and values make seven. Queries by queries: a block's gradients are
complete before the next one's begin; those of a key-value head's keys and values stay on the chip,
in float32, until all its queries' heads have added to them, and each block leaves it with its last
visit. The mathematics is FlashAttention-2's (Dao 2023, arXiv 2307.08691).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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

    def kernel(*refs: Any) -> None:
        step = Step(how, refs[:numbers], refs[numbers + 6 : numbers + 6 + rows])
        q, k, v, d_out, log_total, meant = refs[numbers : numbers + 6]
        d_q, d_k, d_v, sum_q, sum_k, sum_v = refs[numbers + 6 + rows :]
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

    def totals(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
        # A block is written when the next one's turn comes: that is in the last of the heads that
        # share keys and values.
        return row, kv, lists[5][jnp.where(member == each - 1, visit, 0)], 0

    of_totals = pl.BlockSpec((None, None, block, dim), totals)
    lines = log_total[:, :, None], meant[:, :, None]
    return pl.pallas_call(
        kernel,
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
        cost_estimate=_estimate(how, *arrays[:2]),
        interpret=how.interpret,
        name="attention_backward",
    )(*beside.numbers, *arrays, d_out, *lines, *beside.rows)  # fmt: skip


def _estimate(how: How, q: jax.Array, k: jax.Array) -> Any:
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
