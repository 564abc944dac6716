"""Grouped products on TPUs: JAX's megablox kernels (``jax.experimental.pallas.ops.tpu.megablox``;
Gale et al. 2022, arXiv 2211.15841), with tiles of our choice.

They visit the tiles of rows that stand in a group, and no others. ``jax.lax.ragged_dot`` does so in
its forward pass alone: a TPU's compiler makes of its weights' gradient a dense product for each
group.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from hjax.kernels.attention import cost_label

_ROWS = (512, 256, 128)  # of a tile, largest first
_INNER, _OUTER = 2048, 1024  # of a tile of weights, at most
_ON_CHIP = 1 << 24  # bytes of tiles
_LANES = 128


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
    tile = _tile_rows(rows.shape[0], weights.shape[0], share)
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
    inner, outer = weights.shape[1:]
    tiling = tile, _cut(inner, _OUTER), _cut(outer, _OUTER)
    moved = gradient_bytes(rows, weights, tiling, share)
    if before is not None:  # is read
        moved += before.size * before.dtype.itemsize
    with _told(rows, weights, tile, share, moved):
        gradient = tgmm(
            rows.swapaxes(0, 1), given, sizes, weights.dtype, tiling, existing_out=before,
            interpret=interpret,
        )  # fmt: skip
    return made, gradient, None, None


_product.defvjp(_forward, _backward)


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
    inner, outer = weights.shape[1:][:: -1 if transposed else 1]
    tiling = _product_tiles(tile, inner, outer, rows.dtype.itemsize)
    moved = product_bytes(rows, weights, tiling, share, transposed)
    with _told(rows, weights, tile, share, moved):
        return gmm(
            rows, weights, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=interpret
        )


def _product_tiles(tile: int, inner: int, outer: int, element: int) -> tuple[int, int, int]:
    """Tiles of rows, inner, outer: of all of the summed dimension where that has room on the chip,
    so that a weight is read once for its group, not for each tile of rows."""
    tiles = tile, _cut(inner, max(_INNER, inner + _LANES)), _cut(outer, _OUTER)
    given = tiles[0] * tiles[1] + tiles[1] * tiles[2] + tiles[0] * tiles[2]
    # Each twice, as one is read while another is multiplied, and the sums in float32.
    if inner <= _INNER or 2 * element * given + 4 * tiles[0] * tiles[2] <= _ON_CHIP:
        return tiles
    return tile, _cut(inner, _INNER), tiles[2]


def _tile_rows(rows: int, groups: int, share: float) -> int:
    """Rows of a tile: one in which two groups meet is computed for both."""
    each = rows * share / groups
    return next((tile for tile in _ROWS if each >= 8 * tile), _ROWS[-1])


def _cut(size: int, most: int) -> int:
    """A multiple of the lanes, at most ``most``, of which ``size`` wastes least."""
    whole = -(-size // _LANES) * _LANES
    if whole <= most:
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
    visits = _visits(used, groups, tiling[0])
    columns, whole = -(-outer // tiling[2]), inner <= tiling[1]
    read = columns * inner * (used if whole else visits * tiling[0])
    read += inner * outer * (groups if whole else visits)
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


def _visits(used: float, groups: int, tile: int) -> int:
    """Tiles of rows that are computed: one in which groups meet for each of them."""
    return math.ceil(used / tile) + groups - 1


def _told(rows: jax.Array, weights: jax.Array, tile: int, share: float, moved: float) -> Any:
    """A scope with what a kernel does where groups are equally large."""
    groups, inner, outer = weights.shape
    flops = 2.0 * _visits(rows.shape[0] * share, groups, tile) * tile * inner * outer
    return jax.named_scope(cost_label((("pallas_call", flops, moved),), part=True))
