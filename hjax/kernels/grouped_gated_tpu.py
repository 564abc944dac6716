"""An MLP's second grouped product on TPUs, gate and up made active inside.

Gate and up are read where they are multiplied, and their gradients written where the product of
their results' gradients ends: no active rows and no gradients of them are written, read and joined
between. The kernels visit tiles of rows as megablox does (Gale et al. 2022, arXiv 2211.15841).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata

from hjax.kernels import checks, grouped_tpu, reference

Activation = Callable[[jax.Array, jax.Array], jax.Array]

_ROWS = (512, 256, 128)  # of a tile, largest first
_WIDTHS = (2048, 1024, 512)  # columns of a tile of the product; of the summed dimension, backwards
_ROOM = 40 << 20  # bytes on the chip of a kernel's tiles and what it makes of them
_LIMIT = 56 << 20  # that a kernel may have
_LANES = 64


def product(
    both: jax.Array,
    shares: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    activation: Activation,
    share: float = 1.0,
    before: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped_gated``, whose arguments these are. Where a tile has no room
    on the chip, or half of ``both`` is no whole number of registers wide: two passes.

    Args:
      interpret: runs on any platform, slowly.
    """
    checks.check_grouped_gated(both, shares, weights, sizes)
    rows = _tile_rows(both, weights, share)
    if not rows:
        plain = functools.partial(grouped_tpu.product, interpret=interpret)
        return reference.grouped_gated(
            both, shares, weights, sizes, activation, share, before, plain
        )
    short = -both.shape[0] % rows
    if short:
        both, shares = jnp.pad(both, ((0, short), (0, 0))), jnp.pad(shares, (0, short))
    how = activation, rows, share, interpret
    out = _product(both, shares, weights, sizes, before, how)
    return out[: out.shape[0] - short] if short else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _product(
    both: jax.Array,
    shares: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    before: jax.Array | None,
    how: tuple[Activation, int, float, bool],
) -> jax.Array:
    activation, rows, share, interpret = how
    inner, outer = weights.shape[1:]
    width = _width(outer, lambda width: _forward_bytes(rows, inner, width, both.dtype.itemsize))

    def kernel(
        offsets: Any, groups: Any, tiles: Any, both: Any, shares: Any, weights: Any, out: Any
    ) -> None:
        visit = pl.program_id(1)
        active = _active(both[...], _column(shares[0]), activation).astype(weights.dtype)
        made = _dot(active, weights[...], ((1,), (0,)))
        inside = _inside(offsets, groups, tiles, visit, (rows, 1))
        out[...] = jnp.where(inside, made, out[...].astype(jnp.float32)).astype(out.dtype)

    def of_rows(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], 0

    def of_shares(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], 0, 0

    def of_weights(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return groups[visit], 0, column

    def of_out(column: Any, visit: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], column

    columns = pl.cdiv(outer, width)
    visits, metadata = _visits(sizes, both.shape[0], rows)
    used, element = both.shape[0] * share, both.dtype.itemsize
    moved = used * (columns * 2 * inner + outer) * element + weights.size * element
    with grouped_tpu.told(both, weights, rows, share, moved):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct((both.shape[0], outer), both.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                in_specs=[
                    pl.BlockSpec((rows, 2 * inner), of_rows),
                    pl.BlockSpec((1, 1, rows), of_shares),
                    pl.BlockSpec((None, inner, width), of_weights),
                ],
                out_specs=pl.BlockSpec((rows, width), of_out),
                grid=(columns, visits),
            ),
            compiler_params=_params("parallel", "arbitrary"),
            cost_estimate=_estimate(both, weights, rows, share, moved),
            interpret=interpret,
        )(*metadata, both, shares.reshape(-1, 1, rows), weights)


def _forward(both: Any, shares: Any, weights: Any, sizes: Any, before: Any, how: Any) -> Any:
    out = _product(both, shares, weights, sizes, before, how)
    return out, (both, shares, weights, sizes, before)


def _backward(how: tuple[Activation, int, float, bool], kept: Any, given: jax.Array) -> Any:
    activation, rows, share, interpret = how
    both, shares, weights, sizes, before = kept
    inner, outer = weights.shape[1:]
    element = both.dtype.itemsize
    width = _width(outer, lambda width: _backward_bytes(rows, inner, width, element))
    steps, left = pl.cdiv(outer, width), outer % width

    def kernel(
        offsets: Any, groups: Any, tiles: Any, given: Any, weights: Any, both: Any, shares: Any,
        d_both: Any, active: Any, d_shares: Any, sums: Any,
    ) -> None:  # fmt: skip
        visit, step = pl.program_id(0), pl.program_id(1)

        @pl.when(step == 0)
        def _() -> None:
            sums[...] = jnp.zeros_like(sums)

        def add(last: bool) -> None:
            x, w = given[...], weights[...]
            if last and left:  # beyond the last column anything stands
                x, w = (_cut(part, left) for part in (x, w))
            sums[...] += _dot(x, w, ((1,), (1,)))
            if last:
                finish()

        def finish() -> None:
            column, made = _column(shares[0]), sums[...]
            halves = _halves(both[...])
            plain, back = jax.vjp(activation, *halves)
            whole = jnp.concatenate(back(made * column), axis=1)
            inside = _inside(offsets, groups, tiles, visit, (rows, 1))

            def put(out: Any, new: jax.Array) -> None:
                out[...] = jnp.where(inside, new, out[...].astype(jnp.float32)).astype(out.dtype)

            put(d_both, whole)
            put(active, plain * column)
            # Sums over a row's columns, one after another in a register: by a product.
            ones = jnp.ones((8, inner), jnp.float32)
            across = _dot(ones, made * plain, ((1,), (1,)), jax.lax.Precision.HIGHEST)[:1]
            inside = _inside(offsets, groups, tiles, visit, (1, rows))
            d_shares[0] = jnp.where(inside, across, d_shares[0])

        jax.lax.cond(step == steps - 1, lambda: add(True), lambda: add(False))

    def of_given(visit: Any, step: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], step

    def of_rows(visit: Any, step: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], 0

    def of_shares(visit: Any, step: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return tiles[visit], 0, 0

    def of_weights(visit: Any, step: Any, offsets: Any, groups: Any, tiles: Any) -> Any:
        return groups[visit], 0, step

    count = both.shape[0]
    visits, metadata = _visits(sizes, count, rows)
    used = count * share
    times = len(sizes) if steps == 1 else grouped_tpu.visits(used, len(sizes), rows)
    read = times * inner * outer
    moved = (used * (5 * inner + outer) + read) * element
    with grouped_tpu.told(both, weights, rows, share, moved):
        d_both, active, d_shares = pl.pallas_call(
            kernel,
            out_shape=(
                jax.ShapeDtypeStruct((count, 2 * inner), both.dtype),
                jax.ShapeDtypeStruct((count, inner), both.dtype),
                jax.ShapeDtypeStruct((count // rows, 1, rows), jnp.float32),
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=3,
                in_specs=[
                    pl.BlockSpec((rows, width), of_given),
                    pl.BlockSpec((None, inner, width), of_weights),
                    pl.BlockSpec((rows, 2 * inner), of_rows),
                    pl.BlockSpec((1, 1, rows), of_shares),
                ],
                out_specs=(
                    pl.BlockSpec((rows, 2 * inner), of_rows),
                    pl.BlockSpec((rows, inner), of_rows),
                    pl.BlockSpec((1, 1, rows), of_shares),
                ),
                grid=(visits, steps),
                scratch_shapes=[pltpu.VMEM((rows, inner), jnp.float32)],
            ),
            compiler_params=_params("arbitrary", "arbitrary"),
            cost_estimate=_estimate(both, weights, rows, share, moved),
            interpret=interpret,
        )(*metadata, given, weights, both, shares.reshape(-1, 1, rows))
    gradient = grouped_tpu.gradient(active, given, weights, sizes, before, share, rows, interpret)
    return d_both, d_shares.reshape(-1), gradient, None, None


_product.defvjp(_forward, _backward)


# Within a kernel


def _halves(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gate and up, float32."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
    return gate, up


def _active(both: jax.Array, column: jax.Array, activation: Activation) -> jax.Array:
    return activation(*_halves(both)) * column


def _column(row: jax.Array) -> jax.Array:
    """[rows, 1] of [1, rows]."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


def _dot(left: jax.Array, right: jax.Array, summed: Any, precision: Any = None) -> jax.Array:
    return jax.lax.dot_general(
        left, right, (summed, ((), ())), precision, preferred_element_type=jnp.float32
    )


def _cut(x: jax.Array, width: int) -> jax.Array:
    """0 from this column on."""
    at = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(at < width, x.astype(jnp.float32), 0).astype(x.dtype)


def _inside(
    offsets: Any, groups: Any, tiles: Any, visit: Any, shape: tuple[int, int]
) -> jax.Array:
    """Which rows of a tile are of the visit's group, along the longer dimension."""
    group, rows = groups[visit], max(shape)
    at = jax.lax.broadcasted_iota(jnp.int32, shape, shape.index(rows)) + tiles[visit] * rows
    return (at >= offsets[group]) & (at < offsets[group + 1])


# Before it


def _visits(sizes: jax.Array, count: int, rows: int) -> tuple[jax.Array, Any]:
    """How many tiles of rows are computed, and of each its group and place."""
    metadata, visits = make_group_metadata(
        group_sizes=sizes,
        m=count,
        tm=rows,
        start_group=jnp.int32(0),
        num_nonzero_groups=sizes.shape[0],
        visit_empty_groups=False,
    )
    return visits, metadata


def _params(*dimensions: Any) -> Any:
    return pltpu.CompilerParams(dimension_semantics=dimensions, vmem_limit_bytes=_LIMIT)


def _estimate(both: Any, weights: Any, rows: int, share: float, moved: float) -> Any:
    return pl.CostEstimate(
        flops=round(grouped_tpu.flops(both, weights, rows, share)),
        bytes_accessed=round(moved),
        transcendentals=round(both.size * share / 2),
    )


def _tile_rows(both: jax.Array, weights: jax.Array, share: float) -> int:
    """Rows of a tile: the most with which products take about the least, see
    ``grouped_tpu.flops``; 0: none has room."""
    inner, element = weights.shape[1], both.dtype.itemsize
    if inner % _LANES or weights.dtype.itemsize == 1:
        return 0
    least = inner, _WIDTHS[-1], element
    costs = {
        rows: grouped_tpu.flops(both, weights, rows, share)
        for rows in _ROWS
        if max(_forward_bytes(rows, *least), _backward_bytes(rows, *least)) <= _ROOM
    }
    return next(
        (rows for rows, cost in costs.items() if cost <= min(costs.values()) * grouped_tpu.ABOUT), 0
    )


def _width(outer: int, bytes_of: Callable[[int], int]) -> int:
    """Columns of a tile: all of them, or the most that have room."""
    whole = [outer] if outer <= _WIDTHS[0] else []
    return next(w for w in (*whole, *(w for w in _WIDTHS if w < outer)) if bytes_of(w) <= _ROOM)


def _forward_bytes(rows: int, inner: int, width: int, element: int) -> int:
    """Tiles twice, as one is read while another is multiplied; gate, up and active in float32, and
    the product."""
    tiles = rows * 2 * inner + inner * width + rows * width
    return 2 * element * tiles + 4 * rows * (4 * inner + width)


def _backward_bytes(rows: int, inner: int, width: int, element: int) -> int:
    tiles = rows * width + inner * width + rows * 5 * inner
    return 2 * element * tiles + 4 * rows * 8 * inner
