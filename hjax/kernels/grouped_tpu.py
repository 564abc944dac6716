"""Grouped products on TPUs: JAX's megablox kernels (``jax.experimental.pallas.ops.tpu.megablox``;
Gale et al. 2022, arXiv 2211.15841), with tiles of our choice.

They visit the tiles of rows that stand in a group, and no others. ``jax.lax.ragged_dot`` does so in
its forward pass alone: a TPU's compiler makes of its weights' gradient a dense product for each
group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from hjax.kernels.attention import cost_label

_ROWS = (512, 256, 128)  # of a tile, largest first
_INNER, _OUTER = (2048, 1024, 512), (1024, 512, 256)  # of a tile of weights, at most
# Bytes of tiles, of a product and of a gradient: a kernel has 16 MiB, with what it needs besides.
_PRODUCT_ROOM, _GRADIENT_ROOM = 12 << 20, 15 << 20
BALANCE = 240.0  # operations that a TPU does while it reads a byte: v5e 240, v5p 166, v6e 560
_LANES = 128
ABOUT = 17 / 16  # of the least, for larger tiles: a kernel has fewer steps


def product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    share: float = 1.0,
    before: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped``, whose arguments these are.

    Args:
      interpret: runs on any platform, slowly.
    """
    tile = _tile_rows(rows, weights, share)
    short = -rows.shape[0] % tile
    padded = jnp.pad(rows, ((0, short), (0, 0))) if short else rows
    out = _product(padded, weights, sizes, before, tile, share, interpret)
    return out[: rows.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    before: jax.Array | None,
    tile: int,
    share: float,
    interpret: bool,
) -> jax.Array:
    return _times(rows, weights, sizes, tile, share, interpret)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _product(*arguments), arguments[:4]


def _backward(tile: int, share: float, interpret: bool, kept: Any, given: jax.Array) -> Any:
    rows, weights, sizes, before = kept
    made = _times(given, weights, sizes, tile, share, interpret, transposed=True)
    if weights.dtype.itemsize == 1:
        return made, None, None, None
    made_of = rows, given, weights, sizes, before
    return made, gradient(*made_of, share, tile, interpret), None, None


_product.defvjp(_forward, _backward)


def gradient(
    rows: jax.Array,
    given: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    before: jax.Array | None,
    share: float,
    tile: int,
    interpret: bool,
) -> jax.Array:
    """Of a product's weights, like them.

    Args:
      rows, weights, sizes, share, before: of the product.
      given: like its result, the gradient of that.
      tile: rows of a tile.
      interpret: runs on any platform, slowly.
    """
    tiling = _gradient_tiling(rows, weights, share, tile)
    moved = gradient_bytes(rows, weights, tiling, share)
    if before is not None:  # is read
        moved += before.size * before.dtype.itemsize
    with told(rows, weights, tile, share, moved):
        return tgmm(
            rows.swapaxes(0, 1), given, sizes, weights.dtype, tiling, existing_out=before,
            interpret=interpret,
        )  # fmt: skip


def _times(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    tile: int,
    share: float,
    interpret: bool,
    transposed: bool = False,
) -> jax.Array:
    weights = weights.astype(rows.dtype)  # of one byte the kernel takes none
    tiling = _product_tiling(rows, weights, share, tile, transposed)
    moved = product_bytes(rows, weights, tiling, share, transposed)
    with told(rows, weights, tile, share, moved):
        return gmm(
            rows, weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=interpret
        )


def _tile_rows(rows: jax.Array, weights: jax.Array, share: float) -> int:
    """Rows of a tile: the most with which a product, forward and back, takes about the least. One
    in which two groups meet is computed for both; of small ones weights are read often. Arguments
    as of ``product_bytes``."""
    given = jax.ShapeDtypeStruct((rows.shape[0], weights.shape[2]), rows.dtype)
    costs = {
        tile: sum(
            _cost(x, weights, share, _product_tiling(x, weights, share, tile, back), back)
            for x, back in ((rows, False), (given, True))
        )
        for tile in _ROWS
    }
    return next(tile for tile, cost in costs.items() if cost <= min(costs.values()) * ABOUT)


def _product_tiling(
    rows: Any, weights: jax.Array, share: float, tile: int, transposed: bool = False
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
        return _cost(rows, weights, share, (tile, inner, outer), transposed)

    return tile, *_largest(
        cost, fits, [(i, o) for i in (inner, *_INNER) for o in _OUTER], inner, outer
    )


def _cost(
    rows: Any, weights: jax.Array, share: float, tiling: tuple[int, int, int], transposed: bool
) -> float:
    """Of a product, in operations."""
    moved = product_bytes(rows, weights, tiling, share, transposed)
    if rows.shape[0] % tiling[0]:  # rows are copied to be filled up, results to be cut
        moved += 2 * rows.dtype.itemsize * rows.shape[0] * sum(weights.shape[1:])
    return max(flops(rows, weights, tiling[0], share), BALANCE * moved)


def _gradient_tiling(
    rows: jax.Array, weights: jax.Array, share: float, tile: int
) -> tuple[int, int, int]:
    """As ``_product_tiling``, of ``gradient_bytes``."""
    element, made = rows.dtype.itemsize, weights.dtype.itemsize

    def fits(inner: int, outer: int) -> bool:
        # What it is added to is read.
        each = 2 * element * tile * (inner + outer) + (4 * made + 4) * inner * outer
        return each <= _GRADIENT_ROOM

    def cost(inner: int, outer: int) -> float:
        return gradient_bytes(rows, weights, (tile, inner, outer), share)

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
    return next(tile for tile, found in costs.items() if found <= min(costs.values()) * ABOUT)


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
    share: float = 1.0,
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
      share: of the rows that stand in a group.
    """
    groups, (inner, outer) = weights.shape[0], weights.shape[1:][:: -1 if transposed else 1]
    used = rows.shape[0] * share
    computed = visits(used, groups, tiling[0])
    columns, whole = -(-outer // tiling[2]), inner <= tiling[1]
    read = columns * inner * (used if whole else computed * tiling[0])
    read += inner * outer * (groups if whole else computed)
    return rows.dtype.itemsize * (read + used * outer)


def gradient_bytes(
    rows: jax.Array, weights: jax.Array, tiling: tuple[int, int, int], share: float = 1.0
) -> float:
    """To and from main memory of ``tgmm``, which makes the gradient of ``weights``; arguments as of
    ``product_bytes``. Rows are read for each tile of the gradient's other dimension."""
    groups, inner, outer = weights.shape
    used = rows.shape[0] * share
    read = used * (-(-outer // tiling[2]) * inner + -(-inner // tiling[1]) * outer)
    return rows.dtype.itemsize * read + weights.size * weights.dtype.itemsize


def visits(used: float, groups: int, tile: int) -> int:
    """Tiles of rows that are computed: one in which groups meet for each of them."""
    return math.ceil(used / tile) + groups - 1


def told(rows: jax.Array, weights: jax.Array, tile: int, share: float, moved: float) -> Any:
    """A scope with what a kernel does where groups are equally large, and so many bytes move."""
    costs = (("pallas_call", flops(rows, weights, tile, share), moved),)
    return jax.named_scope(cost_label(costs, part=True))


def flops(rows: jax.Array, weights: jax.Array, tile: int, share: float) -> float:
    """Of a product, tiles in which groups meet for each of them."""
    groups, inner, outer = weights.shape
    return 2.0 * visits(rows.shape[0] * share, groups, tile) * tile * inner * outer
