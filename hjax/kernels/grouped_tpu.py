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
_LANES = 128


def product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    share: float = 1.0,
    interpret: bool = False,
) -> jax.Array:
    """``hjax.kernels.reference.grouped``, whose arguments these are.

    Args:
      interpret: runs on any platform, slowly.
    """
    tile = _tile_rows(rows.shape[0], weights.shape[0], share)
    short = -rows.shape[0] % tile
    padded = jnp.pad(rows, ((0, short), (0, 0))) if short else rows
    out = _product(padded, weights, sizes, tile, share, interpret)
    return out[: rows.shape[0]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _product(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, tile: int, share: float, interpret: bool
) -> jax.Array:
    return _times(rows, weights, sizes, tile, share, interpret)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _product(*arguments), arguments[:3]


def _backward(tile: int, share: float, interpret: bool, kept: Any, given: jax.Array) -> Any:
    rows, weights, sizes = kept
    made = _times(given, weights, sizes, tile, share, interpret, transposed=True)
    if weights.dtype.itemsize == 1:
        return made, None, None
    inner, outer = weights.shape[1:]
    with _told(rows, weights, tile, share):
        gradient = tgmm(
            rows.swapaxes(0, 1),
            given,
            sizes,
            weights.dtype,
            (tile, _cut(inner, _OUTER), _cut(outer, _OUTER)),
            interpret=interpret,
        )
    return made, gradient, None


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
    inner, outer = weights.shape[1:][:: -1 if transposed else 1]
    with _told(rows, weights, tile, share):
        return gmm(
            rows,
            weights.astype(rows.dtype),  # of one byte the kernel takes none
            sizes,
            rows.dtype,
            (tile, _cut(inner, _INNER), _cut(outer, _OUTER)),
            transpose_rhs=transposed,
            interpret=interpret,
        )


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


def _told(rows: jax.Array, weights: jax.Array, tile: int, share: float) -> Any:
    """A scope with what a kernel does where groups are equally large: its tiles' products, each
    weight once, the rows of groups."""
    groups, inner, outer = weights.shape
    used = rows.shape[0] * share
    visited = (math.ceil(used / tile) + groups - 1) * tile
    moved = used * (inner + outer) * rows.dtype.itemsize + weights.size * weights.dtype.itemsize
    return jax.named_scope(cost_label((("pallas_call", 2.0 * visited * inner * outer, moved),)))
