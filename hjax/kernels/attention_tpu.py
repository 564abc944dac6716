"""Attention on TPUs: kernels of our own, told what our rows look like.

They compute what a row's ``Sight`` leaves in steps of 128 places (``attention_visits``); the
backward pass is one kernel (``attention_backward_tpu``). JAX's splash attention (``splash``)
computes where the length is split over devices, and rows so long that a head's gradients of keys
and values have no room on the chip.
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
from hjax.kernels.attention_backward_tpu import backward, has_room
from hjax.kernels.attention_block_tpu import Given, Hide, How, Specs, Step, dot, params
from hjax.kernels.attention_visits import FIRST, LAST
from hjax.kernels.spread import Axes


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
        where = axes, around, gather, interpret
        return splash.attend(q, k, v, segments, sinks, scoring, sight, *where)
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

    def kernel(*refs: Any) -> None:
        listed, refs = refs[: len(numbers)], refs[len(numbers) :]
        step = Step(how, listed[: len(beside.numbers)], refs[3 : 3 + rows])
        q, k, v = refs[:3]
        out, log_total, top, total, made = refs[3 + rows :]
        head = pl.program_id(1) * each + pl.program_id(2)

        @step.on(FIRST)
        def _() -> None:
            # A sink is a score that has no value.
            top[...] = jnp.full_like(top, MASKED if sinks is None else listed[-1][head])
            total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
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

    out, log_total = pl.pallas_call(
        kernel,
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
