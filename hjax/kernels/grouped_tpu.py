"""Grouped products on TPUs: JAX's megablox kernels (``jax.experimental.pallas.ops.tpu.megablox``;
Gale et al. 2022, arXiv 2211.15841), with tiles of our choice.

They visit the tiles of rows that stand in a group, and no others. ``jax.lax.ragged_dot`` does so in
its forward pass alone: a TPU's compiler makes of its weights' gradient a dense product for each
group.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from hjax.kernels.attention import cost_label
from hjax.kernels.reference import GroupFill, filled

_ROWS = (512, 256, 128)  # of a tile, largest first
_INNER, _OUTER = (2048, 1024, 512), (1024, 512, 256)  # of a tile of weights, at most
# Bytes of tiles, of a product and of a gradient: a kernel has 16 MiB, with what it needs besides.
_PRODUCT_ROOM, _GRADIENT_ROOM = 12 << 20, 15 << 20
_BALANCE = 240.0  # operations that a TPU does while it reads a byte: v5e 240, v5p 166, v6e 560
_LANES = 128
_ABOUT = 17 / 16  # of the least, for larger tiles: a kernel has fewer steps


def product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped``, whose arguments these are.

    Args:
      interpret: runs on any platform, slowly.
    """
    tile = _tile_rows(rows, weights, fill)
    short = -rows.shape[0] % tile
    padded = jnp.pad(rows, ((0, short), (0, 0))) if short else rows
    out = _product(padded, weights, sizes, before, tile, fill, interpret)
    return out[: rows.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    before: jax.Array | None,
    tile: int,
    fill: GroupFill,
    interpret: bool,
) -> jax.Array:
    return _times(rows, weights, sizes, tile, fill, interpret)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _product(*arguments), arguments[:4]


def _backward(tile: int, fill: GroupFill, interpret: bool, kept: Any, given: jax.Array) -> Any:
    rows, weights, sizes, before = kept
    made = _times(given, weights, sizes, tile, fill, interpret, transposed=True)
    if weights.dtype.itemsize == 1:
        return made, None, None, None
    tiling = _gradient_tiling(rows, weights, fill, tile)
    moved = gradient_bytes(rows, weights, tiling, fill)
    if before is not None:  # is read
        moved += before.size * before.dtype.itemsize
    with _told(rows, weights, tile, fill, moved):
        back = tgmm(
            rows.swapaxes(0, 1), given, sizes, weights.dtype, tiling, existing_out=before,
            interpret=interpret,
        )  # fmt: skip
    return made, back, None, None


_product.defvjp(_forward, _backward)


def _times(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    tile: int,
    fill: GroupFill,
    interpret: bool,
    transposed: bool = False,
) -> jax.Array:
    weights = weights.astype(rows.dtype)  # of one byte the kernel takes none
    tiling = _product_tiling(rows, weights, fill, tile, transposed)
    moved = product_bytes(rows, weights, tiling, fill, transposed)
    with _told(rows, weights, tile, fill, moved):
        return gmm(
            rows, weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=interpret
        )


def multiple(count: int, weights: jax.Array, share: float) -> int:
    """``hjax.kernels.reference.multiple``: of those with which a product, forward and back, takes
    about the least the one that multiplies least. No two groups meet in a tile of so many rows, and
    half a tile of each is empty."""
    rows = jax.ShapeDtypeStruct((count, weights.shape[1]), weights.dtype)
    costs, products = {}, {}
    for each in (1, *_ROWS):
        fill = filled(count, weights.shape[0], share, each)
        tile = _tile_rows(rows, weights, fill)
        costs[each] = _both_ways(rows, weights, fill, tile)
        products[each] = _flops(rows, weights, tile, fill)
    least = min(costs.values()) * _ABOUT
    return min((each for each in costs if costs[each] <= least), key=lambda each: products[each])


def _both_ways(rows: Any, weights: jax.Array, fill: GroupFill, tile: int) -> float:
    """What a product with a tile of so many rows takes, forward and back, in operations."""
    given = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2]), rows.dtype)
    return sum(
        _cost(x, weights, fill, _product_tiling(x, weights, fill, tile, back), back)
        for x, back in ((rows, False), (given, True))
    )


def _tile_rows(rows: Any, weights: jax.Array, fill: GroupFill) -> int:
    """Rows of a tile: as many as groups are multiples of, or the most, with which a product,
    forward and back, takes about the least. One in which two groups meet is computed for both; of
    small ones weights are read often. Arguments as of ``product_bytes``."""
    costs = {tile: _both_ways(rows, weights, fill, tile) for tile in _ROWS}
    least = min(costs.values()) * _ABOUT
    order = sorted(costs, key=lambda tile: tile != fill.multiple)
    return next(tile for tile in order if costs[tile] <= least)


def _product_tiling(
    rows: Any, weights: jax.Array, fill: GroupFill, tile: int, transposed: bool = False
) -> tuple[int, int, int]:
    """Tiles of rows, inner, outer that have room on the chip: of those that take about the least
    the largest. A weight is read for each tile of rows, unless one tile has all of the summed
    dimension. Arguments as of ``product_bytes``."""
    inner, outer = weights.shape[1:][:: -1 if transposed else 1]
    element = rows.dtype.itemsize

    def fits(inner: int, outer: int) -> bool:
        # Each twice, as one is read while another is multiplied, and the sums in float32.
        given = tile * inner + inner * outer + tile * outer
        return 2 * element * given + 4 * tile * outer <= _PRODUCT_ROOM

    def cost(inner: int, outer: int) -> float:
        return _cost(rows, weights, fill, (tile, inner, outer), transposed)

    return tile, *_largest(
        cost, fits, [(i, o) for i in (inner, *_INNER) for o in _OUTER], inner, outer
    )


def _cost(
    rows: Any, weights: jax.Array, fill: GroupFill, tiling: tuple[int, int, int], transposed: bool
) -> float:
    """Of a product, in operations."""
    moved = product_bytes(rows, weights, tiling, fill, transposed)
    if rows.shape[0] % tiling[0]:  # rows are copied to be filled up, results to be cut
        moved += 2 * rows.dtype.itemsize * rows.shape[0] * sum(weights.shape[1:])
    return max(_flops(rows, weights, tiling[0], fill), _BALANCE * moved)


def _gradient_tiling(
    rows: jax.Array, weights: jax.Array, fill: GroupFill, tile: int
) -> tuple[int, int, int]:
    """As ``_product_tiling``, of ``gradient_bytes``."""
    element, made = rows.dtype.itemsize, weights.dtype.itemsize

    def fits(inner: int, outer: int) -> bool:
        # What it is added to is read.
        each = 2 * element * tile * (inner + outer) + (4 * made + 4) * inner * outer
        return each <= _GRADIENT_ROOM

    def cost(inner: int, outer: int) -> float:
        return gradient_bytes(rows, weights, (tile, inner, outer), fill)

    every = [(i, o) for i in _OUTER for o in _OUTER]
    return tile, *_largest(cost, fits, every, *weights.shape[1:])


def _largest(
    cost: Callable[[int, int], float],
    fits: Callable[[int, int], bool],
    most: Iterable[tuple[int, int]],
    inner: int,
    outer: int,
) -> tuple[int, int]:
    """The first that fits of which the cost is about the least.

    Args:
      most: inner and outer dimension of a tile, at most; largest first.
      inner, outer: the dimensions that are cut.
    """
    cut = dict.fromkeys((_cut(inner, i), _cut(outer, o)) for i, o in most)
    costs = {tile: cost(*tile) for tile in cut if fits(*tile)}
    return next(tile for tile, found in costs.items() if found <= min(costs.values()) * _ABOUT)


def _cut(size: int, most: int) -> int:
    """A multiple of the lanes, at most ``most``, of which ``size`` wastes least."""
    whole = -(-size // _LANES) * _LANES
    if whole <= max(most, _LANES) or size == most:
        return whole
    return min(range(most, most // 2, -_LANES), key=lambda part: -(-size // part) * part)


def product_bytes(
    rows: jax.Array,
    weights: jax.Array,
    tiling: tuple[int, int, int],
    fill: GroupFill = GroupFill(),
    transposed: bool = False,
) -> float:
    """To and from main memory of ``gmm``, groups equally large.

    The kernel goes over columns of the result, of each over the tiles of rows that a group has, of
    each over the summed dimension; a block that stands where the one before stood is not read again
    (a weight is, then, for each tile of rows, unless one tile has the whole summed dimension). The
    kernel's own estimate reads it for each tile always.

    Args:
      rows: [rows, inner].
      weights: [groups, inner, outer], ``transposed`` [groups, outer, inner].
      tiling: of rows, inner, outer.
      fill: see ``hjax.kernels.reference.GroupFill``.
    """
    groups, (inner, outer) = weights.shape[0], weights.shape[1:][:: -1 if transposed else 1]
    used = rows.shape[0] * fill.share
    computed = _visits(rows.shape[0], groups, tiling[0], fill)
    columns, whole = -(-outer // tiling[2]), inner <= tiling[1]
    read = columns * inner * (used if whole else computed * tiling[0])
    read += inner * outer * (groups if whole else computed)
    return rows.dtype.itemsize * (read + used * outer)


def gradient_bytes(
    rows: jax.Array, weights: jax.Array, tiling: tuple[int, int, int], fill: GroupFill = GroupFill()
) -> float:
    """To and from main memory of ``tgmm``, which makes the gradient of ``weights``; arguments as of
    ``product_bytes``. Rows are read for each tile of the gradient's other dimension."""
    groups, inner, outer = weights.shape
    used = rows.shape[0] * fill.share
    read = used * (-(-outer // tiling[2]) * inner + -(-inner // tiling[1]) * outer)
    return rows.dtype.itemsize * read + weights.size * weights.dtype.itemsize


def _visits(count: int, groups: int, tile: int, fill: GroupFill) -> int:
    """Tiles of so many rows that are computed: one in which groups meet for each of them. Groups
    that are multiples of a part of a tile meet in as many fewer, of a whole one in none."""
    meet = 1 - min(fill.multiple, tile) / tile if fill.multiple > 1 else 1
    return math.ceil(count * fill.share / tile + (groups - 1) * meet)


def _told(rows: jax.Array, weights: jax.Array, tile: int, fill: GroupFill, moved: float) -> Any:
    """A scope with what a kernel does where groups are equally large, and so many bytes move."""
    costs = (("pallas_call", _flops(rows, weights, tile, fill), moved),)
    return jax.named_scope(cost_label(costs, part=True))


def _flops(rows: Any, weights: jax.Array, tile: int, fill: GroupFill) -> float:
    """Of a product, tiles in which groups meet for each of them."""
    groups, inner, outer = weights.shape
    return 2.0 * _visits(rows.shape[0], groups, tile, fill) * tile * inner * outer
