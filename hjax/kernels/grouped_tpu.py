"""Grouped matrix products (of experts) on TPUs: JAX's megablox kernels, with chosen tile sizes.

The kernels (``jax.experimental.pallas.ops.tpu.megablox``; Gale et al. 2022, arXiv 2211.15841) visit
only row tiles that are in a group. ``jax.lax.ragged_dot`` does so in the forward pass only: for its
weight gradient the TPU compiler makes a dense product for each group.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from hjax.kernels.attention import cost_label
from hjax.kernels.reference import GroupFill, padded_fill

_ROWS = (512, 256, 128)  # of a tile, largest first
_INNER, _OUTER = (2048, 1024, 512), (1024, 512, 256)  # of a tile of weights, at most
# Bytes of tiles, of a product and of a gradient: a kernel has 16 MiB for all that it needs.
_PRODUCT_BYTES, _GRADIENT_BYTES = 12 << 20, 15 << 20
_BALANCE = 240.0  # operations that a TPU does while it reads a byte: v5e 240, v5p 166, v6e 560
_LANES = 128
_TOLERANCE = 17 / 16  # of the lowest cost: larger tiles, with fewer steps, are preferred


def product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped_product``, whose arguments these are.

    Args:
      interpret: runs on any platform, slowly.
    """
    tile = _tile_rows(rows, weights, fill)
    short = -rows.shape[0] % tile
    padded = jnp.pad(rows, ((0, short), (0, 0))) if short else rows
    return _product(padded, weights, sizes, before, tile, fill, interpret)[: rows.shape[0]]


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
    return _grouped_product(rows, weights, sizes, tile, fill, interpret)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _product(*arguments), arguments[:4]


def _backward(tile: int, fill: GroupFill, interpret: bool, kept: Any, g: jax.Array) -> Any:
    rows, weights, sizes, before = kept
    d_rows = _grouped_product(g, weights, sizes, tile, fill, interpret, transposed=True)
    if weights.dtype.itemsize == 1:
        return d_rows, None, None, None
    tiling = _gradient_tiling(rows, weights, fill, tile)
    moved = gradient_bytes(rows, weights, tiling, fill)
    if before is not None:  # it is read too
        moved += before.size * before.dtype.itemsize
    with _cost_scope(rows, weights, tile, fill, moved):
        back = tgmm(
            rows.swapaxes(0, 1), g, sizes, weights.dtype, tiling, existing_out=before,
            interpret=interpret,
        )  # fmt: skip
    return d_rows, back, None, None


_product.defvjp(_forward, _backward)


def _grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    tile: int,
    fill: GroupFill,
    interpret: bool,
    transposed: bool = False,
) -> jax.Array:
    weights = weights.astype(rows.dtype)  # the kernel takes no weights of one byte
    tiling = _product_tiling(rows, weights, fill, tile, transposed)
    moved = product_bytes(rows, weights, tiling, fill, transposed)
    with _cost_scope(rows, weights, tile, fill, moved):
        return gmm(
            rows, weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=interpret
        )


def row_multiple(count: int, weights: jax.Array, share: float) -> int:
    """``hjax.kernels.reference.row_multiple``: of the multiples with about the lowest cost, forward
    and backward, the one with the fewest FLOPs. With padding to a tile's rows no tile has two
    groups, and half a tile of each group is empty."""
    rows = jax.ShapeDtypeStruct((count, weights.shape[1]), weights.dtype)
    costs, products = {}, {}
    for each in (1, *_ROWS):
        fill = padded_fill(count, weights.shape[0], share, each)
        tile = _tile_rows(rows, weights, fill)
        costs[each] = _product_cost(rows, weights, fill, tile)
        products[each] = _flops(rows, weights, tile, fill)
    least = min(costs.values()) * _TOLERANCE
    return min((each for each in costs if costs[each] <= least), key=lambda each: products[each])


def _product_cost(rows: Any, weights: jax.Array, fill: GroupFill, tile: int) -> float:
    """Cost of a product with tiles of this many rows, forward and backward, in operations."""
    d_out = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2]), rows.dtype)
    return sum(
        _cost(x, weights, fill, _product_tiling(x, weights, fill, tile, back), back)
        for x, back in ((rows, False), (d_out, True))
    )


def _tile_rows(rows: Any, weights: jax.Array, fill: GroupFill) -> int:
    """Rows of a tile of about the lowest cost: the groups' multiple, or else the largest. A tile
    that two groups share is computed for both; with small tiles weights are read often. Arguments
    as of ``product_bytes``."""
    costs = {tile: _product_cost(rows, weights, fill, tile) for tile in _ROWS}
    least = min(costs.values()) * _TOLERANCE
    order = sorted(costs, key=lambda tile: tile != fill.multiple)
    return next(tile for tile in order if costs[tile] <= least)


def _product_tiling(
    rows: Any, weights: jax.Array, fill: GroupFill, tile: int, transposed: bool = False
) -> tuple[int, int, int]:
    """Tiles of rows, inner, outer that fit on the chip: the largest of about the lowest cost. A
    weight is read for each tile of rows, unless one tile has the whole contracted dimension.
    Arguments as of ``product_bytes``."""
    inner, outer = weights.shape[1:][:: -1 if transposed else 1]
    element = rows.dtype.itemsize

    def fits(inner: int, outer: int) -> bool:
        # Double-buffered, and the sums in float32.
        elements = tile * inner + inner * outer + tile * outer
        return 2 * element * elements + 4 * tile * outer <= _PRODUCT_BYTES

    def cost(inner: int, outer: int) -> float:
        return _cost(rows, weights, fill, (tile, inner, outer), transposed)

    return tile, *_largest_tile(
        cost, fits, [(i, o) for i in (inner, *_INNER) for o in _OUTER], inner, outer
    )


def _cost(
    rows: Any, weights: jax.Array, fill: GroupFill, tiling: tuple[int, int, int], transposed: bool
) -> float:
    """Cost of a product, in operations."""
    moved = product_bytes(rows, weights, tiling, fill, transposed)
    if rows.shape[0] % tiling[0]:  # rows are copied to be padded, results to be sliced
        moved += 2 * rows.dtype.itemsize * rows.shape[0] * sum(weights.shape[1:])
    return max(_flops(rows, weights, tiling[0], fill), _BALANCE * moved)


def _gradient_tiling(
    rows: jax.Array, weights: jax.Array, fill: GroupFill, tile: int
) -> tuple[int, int, int]:
    """As ``_product_tiling``, for ``gradient_bytes``."""
    element, weight_element = rows.dtype.itemsize, weights.dtype.itemsize

    def fits(inner: int, outer: int) -> bool:
        each = 2 * element * tile * (inner + outer) + (4 * weight_element + 4) * inner * outer
        return each <= _GRADIENT_BYTES

    def cost(inner: int, outer: int) -> float:
        return gradient_bytes(rows, weights, (tile, inner, outer), fill)

    every = [(i, o) for i in _OUTER for o in _OUTER]
    return tile, *_largest_tile(cost, fits, every, *weights.shape[1:])


def _largest_tile(
    cost: Callable[[int, int], float],
    fits: Callable[[int, int], bool],
    most: Iterable[tuple[int, int]],
    inner: int,
    outer: int,
) -> tuple[int, int]:
    """The first tile that fits and has about the lowest cost.

    Args:
      most: inner and outer dimension of a tile, at most; largest first.
      inner, outer: the dimensions that are tiled.
    """
    tiles = dict.fromkeys((_tile_size(inner, i), _tile_size(outer, o)) for i, o in most)
    costs = {tile: cost(*tile) for tile in tiles if fits(*tile)}
    return next(tile for tile, found in costs.items() if found <= min(costs.values()) * _TOLERANCE)


def _tile_size(size: int, most: int) -> int:
    """The multiple of the lanes, at most ``most``, that pads ``size`` least."""
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
    """Bytes that ``gmm`` moves to and from main memory, with groups of equal size.

    The kernel loops over columns of the result, then row tiles, then the contracted dimension. A
    block that is the same as in the step before is not read again. So a weight is read for each row
    tile, unless one tile has the whole contracted dimension. (The kernel's own estimate always
    reads it for each tile.)

    Args:
      rows: [rows, inner].
      weights: [groups, inner, outer], ``transposed`` [groups, outer, inner].
      tiling: of rows, inner, outer.
      fill: see ``hjax.kernels.reference.GroupFill``.
    """
    groups, (inner, outer) = weights.shape[0], weights.shape[1:][:: -1 if transposed else 1]
    used = rows.shape[0] * fill.fraction
    computed = _computed_tiles(rows.shape[0], groups, tiling[0], fill)
    columns, whole = -(-outer // tiling[2]), inner <= tiling[1]
    read = columns * inner * (used if whole else computed * tiling[0])
    read += inner * outer * (groups if whole else computed)
    return rows.dtype.itemsize * (read + used * outer)


def gradient_bytes(
    rows: jax.Array, weights: jax.Array, tiling: tuple[int, int, int], fill: GroupFill = GroupFill()
) -> float:
    """Bytes that ``tgmm``, the gradient of ``weights``, moves to and from main memory; arguments as
    of ``product_bytes``. Rows are read for each tile of the gradient's other dimension."""
    groups, inner, outer = weights.shape
    used = rows.shape[0] * fill.fraction
    read = used * (-(-outer // tiling[2]) * inner + -(-inner // tiling[1]) * outer)
    return rows.dtype.itemsize * read + weights.size * weights.dtype.itemsize


def _computed_tiles(count: int, groups: int, tile: int, fill: GroupFill) -> int:
    """Row tiles that are computed; a tile that several groups share counts for each. Padding groups
    to a part of a tile makes shared tiles rarer, padding to a whole tile avoids them."""
    shared = 1 - min(fill.multiple, tile) / tile if fill.multiple > 1 else 1
    return math.ceil(count * fill.fraction / tile + (groups - 1) * shared)


def _cost_scope(
    rows: jax.Array, weights: jax.Array, tile: int, fill: GroupFill, moved: float
) -> Any:
    """A scope with a kernel's cost: groups of equal size, and this many bytes."""
    costs = (("pallas_call", _flops(rows, weights, tile, fill), moved),)
    return jax.named_scope(cost_label(costs, part=True))


def _flops(rows: Any, weights: jax.Array, tile: int, fill: GroupFill) -> float:
    """FLOPs of a product; tiles that groups share count for each of them."""
    groups, inner, outer = weights.shape
    return 2.0 * _computed_tiles(rows.shape[0], groups, tile, fill) * tile * inner * outer
