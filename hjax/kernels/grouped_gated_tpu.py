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
from hjax.kernels.reference import Fill

Activation = Callable[[jax.Array, jax.Array], jax.Array]

_ROWS = (512, 256, 128)  # of a tile, largest first
_WIDTHS = (2048, 1024, 512)  # columns of a tile of the product; of the summed dimension, backwards
_ROOM = 40 << 20  # bytes on the chip of a kernel's tiles and what it makes of them
_LIMIT = 56 << 20  # that a kernel may have
_LANES = 64  # a half is a multiple of so many wide
_PART = 128


def product(
    both: jax.Array,
    shares: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    activation: Activation,
    fill: Fill = Fill(),
    before: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped_gated``, whose arguments these are. Where a tile has no room
    on the chip, or half of ``both`` is no whole number of registers wide: two passes.

    Args:
      interpret: runs on any platform, slowly.
    """
    checks.check_grouped_gated(both, shares, weights, sizes)
    rows = _tile_rows(both, weights, fill)
    if not rows:
        plain = functools.partial(grouped_tpu.product, interpret=interpret)
        return reference.grouped_gated(
            both, shares, weights, sizes, activation, fill, before, plain
        )
    short = -both.shape[0] % rows
    if short:
        both, shares = jnp.pad(both, ((0, short), (0, 0))), jnp.pad(shares, (0, short))
    how = activation, rows, fill, interpret
    out = _product(both, shares, weights, sizes, before, how)
    return out[: out.shape[0] - short] if short else out


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _product(
    both: jax.Array,
    shares: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    before: jax.Array | None,
    how: tuple[Activation, int, Fill, bool],
) -> jax.Array:
    activation, rows, fill, interpret = how
    inner, outer = weights.shape[1:]
    width = _width(rows, weights, _forward_room)

    def kernel(
        offsets: Any, groups: Any, tiles: Any, both: Any, shares: Any, weights: Any, out: Any,
        active: Any,
    ) -> None:  # fmt: skip
        visit = pl.program_id(1)
        for at in _parts(rows):
            gate, up = _halves(both[at, :])
            here = activation(gate, up) * _column(shares[0, :, at])
            active[at, :] = here.astype(active.dtype)
        made = _dot(active[...], weights[...], ((1,), (0,)))
        inside = _inside(offsets, groups, tiles, visit, rows, slice(0, rows))
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
    moved = _forward_bytes(both, weights, fill, rows, width)
    with grouped_tpu.told(both, weights, rows, fill, moved):
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
                scratch_shapes=[pltpu.VMEM((rows, inner), both.dtype)],
            ),
            compiler_params=_params("parallel", "arbitrary"),
            cost_estimate=_estimate(both, weights, rows, fill, moved),
            interpret=interpret,
        )(*metadata, both, shares.reshape(-1, 1, rows), weights)


def _forward(both: Any, shares: Any, weights: Any, sizes: Any, before: Any, how: Any) -> Any:
    out = _product(both, shares, weights, sizes, before, how)
    return out, (both, shares, weights, sizes, before)


def _backward(how: tuple[Activation, int, Fill, bool], kept: Any, given: jax.Array) -> Any:
    activation, rows, fill, interpret = how
    both, shares, weights, sizes, before = kept
    inner, outer = weights.shape[1:]
    width = _width(rows, weights, _backward_room)
    steps = pl.cdiv(outer, width)

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
    moved = _backward_bytes(both, weights, fill, rows, width)
    with grouped_tpu.told(both, weights, rows, fill, moved):
        d_both, active, d_shares = pl.pallas_call(
            functools.partial(_backward_kernel, activation, rows, outer % width),
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
            cost_estimate=_estimate(both, weights, rows, fill, moved),
            interpret=interpret,
        )(*metadata, given, weights, both, shares.reshape(-1, 1, rows))
    gradient = grouped_tpu.gradient(active, given, weights, sizes, before, fill, rows, interpret)
    return d_both, d_shares.reshape(-1), gradient, None, None


def _backward_kernel(
    activation: Activation, rows: int, left: int, offsets: Any, groups: Any, tiles: Any, given: Any,
    weights: Any, both: Any, shares: Any, d_both: Any, active: Any, d_shares: Any, sums: Any,
) -> None:  # fmt: skip
    """A visit of a tile of rows to a tile of columns; the last one has ``left`` columns, 0: all.
    """
    inner = weights.shape[0]
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
        for at in _parts(rows):
            made, column = sums[at, :], _column(shares[0, :, at])
            plain, back = jax.vjp(activation, *_halves(both[at, :]))
            of_gate, of_up = back(made * column)
            inside = _inside(offsets, groups, tiles, visit, rows, at)
            for out, columns, new in (
                (d_both, slice(0, inner), of_gate),
                (d_both, slice(inner, 2 * inner), of_up),
                (active, slice(0, inner), plain * column),
            ):
                held = out[at, columns].astype(jnp.float32)
                out[at, columns] = jnp.where(inside, new, held).astype(out.dtype)
            # Sums over a row's columns, one after another in a register: by a product.
            ones = jnp.ones((8, inner), jnp.float32)
            across = _dot(ones, made * plain, ((1,), (1,)), jax.lax.Precision.HIGHEST)[:1]
            inside = _inside(offsets, groups, tiles, visit, rows, at, along=1)
            d_shares[0, :, at] = jnp.where(inside, across, d_shares[0, :, at])

    jax.lax.cond(step == pl.num_programs(1) - 1, lambda: add(True), lambda: add(False))


_product.defvjp(_forward, _backward)


# Within a kernel


def _halves(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gate and up, float32."""
    gate, up = jnp.split(both.astype(jnp.float32), 2, axis=1)
    return gate, up


def _parts(rows: int) -> list[slice]:
    """Of a tile, as many rows as are made active at a time: what is between has little room."""
    return [slice(at, at + _PART) for at in range(0, rows, _PART)]


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
    offsets: Any, groups: Any, tiles: Any, visit: Any, rows: int, at: slice, along: int = 0
) -> jax.Array:
    """Which of these rows of a tile of so many are of the visit's group, in this dimension of two.
    """
    count, group = at.stop - at.start, groups[visit]
    shape = (count, 1) if along == 0 else (1, count)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, along) + tiles[visit] * rows + at.start
    return (row >= offsets[group]) & (row < offsets[group + 1])


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


def _estimate(both: Any, weights: Any, rows: int, fill: Fill, moved: float) -> Any:
    return pl.CostEstimate(
        flops=round(grouped_tpu.flops(both, weights, rows, fill)),
        bytes_accessed=round(moved),
        transcendentals=round(both.size * fill.share / 2),
    )


def _tile_rows(both: jax.Array, weights: jax.Array, fill: Fill) -> int:
    """Rows of a tile, as ``grouped_tpu`` chooses them; 0: none has room. Of small ones weights are
    read often, of large ones two groups meet in more."""
    if weights.shape[1] % _LANES or weights.dtype.itemsize == 1:
        return 0
    costs = {}
    for rows in _ROWS:
        widths = [_width(rows, weights, bytes_of) for bytes_of in (_forward_room, _backward_room)]
        if all(widths):
            moved = _forward_bytes(both, weights, fill, rows, widths[0])
            back = _backward_bytes(both, weights, fill, rows, widths[1])
            flops = grouped_tpu.flops(both, weights, rows, fill)
            costs[rows] = sum(max(flops, grouped_tpu.BALANCE * m) for m in (moved, back))
    return grouped_tpu.about_least(costs, fill) if costs else 0


def _width(rows: int, weights: jax.Array, room: Callable[[int, int, int, int], int]) -> int:
    """Columns of a tile: all of them, or the most that have room; 0: none have."""
    inner, outer = weights.shape[1:]
    every = (outer, *(w for w in _WIDTHS if w < outer))
    return next((w for w in every if room(rows, inner, w, weights.dtype.itemsize) <= _ROOM), 0)


def _forward_room(rows: int, inner: int, width: int, element: int) -> int:
    """Bytes on the chip: tiles twice, as one is read while another is multiplied; what is between
    of a part of the rows, active rows, and the product."""
    tiles = rows * 2 * inner + inner * width + rows * width
    return 2 * element * tiles + 4 * 8 * _PART * inner + element * rows * inner + 4 * rows * width


def _backward_room(rows: int, inner: int, width: int, element: int) -> int:
    """The same; with sums of a tile."""
    tiles = rows * width + inner * width + rows * 5 * inner
    return 2 * element * tiles + 4 * 8 * _PART * inner + 4 * rows * inner


def _forward_bytes(both: jax.Array, weights: jax.Array, fill: Fill, rows: int, width: int) -> float:
    """To and from main memory, groups equally large: gate and up are read for each tile of columns,
    weights once."""
    used, (inner, outer) = both.shape[0] * fill.share, weights.shape[1:]
    moved = used * (pl.cdiv(outer, width) * 2 * inner + outer) + weights.size
    return moved * weights.dtype.itemsize


def _backward_bytes(
    both: jax.Array, weights: jax.Array, fill: Fill, rows: int, width: int
) -> float:
    """Weights are read for each tile of rows, unless one has all columns."""
    used, (groups, inner, outer) = both.shape[0] * fill.share, weights.shape
    read = groups if width >= outer else grouped_tpu.visits(both.shape[0], groups, rows, fill)
    return (used * (5 * inner + outer) + read * inner * outer) * weights.dtype.itemsize
