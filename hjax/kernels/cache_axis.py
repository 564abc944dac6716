"""KV-cache memory layout: the axis along which the tokens of a row lie.

Values are stored by rows. So are keys if a kernel reads them, or to write a token in one piece. On
CPUs a product with few queries is faster with tokens last, and for long rows with tiles of
``TILE`` tokens, each contiguous in memory.
"""

from typing import Any

import jax

# [..., length, head_dim]; [..., head_dim, length]; [..., tiles, head_dim, TILE].
ROWS, COLUMNS, TILES = -2, -1, -3
TILE = 64


def to_layout(x: jax.Array, axis: int) -> jax.Array:
    """Keys [..., length, head_dim] in the layout with tokens along ``axis``."""
    *lead, length, dim = x.shape
    if axis == TILES:
        x = x.reshape(*lead, length // TILE, TILE, dim)
    return x if axis == ROWS else x.swapaxes(-1, -2)


def to_rows(x: jax.Array, axis: int) -> jax.Array:
    """Undo ``to_layout``: [..., length, head_dim]."""
    x = x if axis == ROWS else x.swapaxes(-1, -2)
    return x if axis != TILES else x.reshape(*x.shape[:-3], -1, x.shape[-1])


def token_capacity(axis: int, shape: tuple[int, ...]) -> int:
    """Tokens that a cache array of this shape, with tokens along ``axis``, can hold."""
    return shape[axis] * (TILE if axis == TILES else 1)


def token_index(axis: int, at: Any) -> tuple[Any, ...]:
    """Indices of tokens ``at`` into the last dimensions of a cache array."""
    if axis == TILES:
        return at // TILE, slice(None), at % TILE
    return (slice(None), at) if axis == COLUMNS else (at,)


def token_update(new: jax.Array, at: jax.Array, axis: int) -> tuple[jax.Array, tuple[Any, ...]]:
    """A token's keys or values [..., head_dim] as a ``dynamic_update_slice``: update and start."""
    zeros = (0,) * (new.ndim - 1)
    if axis == TILES:
        return new[..., None, :, None], (*zeros, at // TILE, 0, at % TILE)
    if axis == COLUMNS:
        return new[..., None], (*zeros, 0, at)
    return new[..., None, :], (*zeros, at, 0)
