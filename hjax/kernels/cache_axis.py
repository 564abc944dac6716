"""Along which axis of a cache's array the tokens of a row lie.

Values lie by rows. Keys do too where a kernel reads them, or where a token is best written in one
piece; on CPUs a product with a few queries wants tokens last, and of many tokens tiles of ``TILE``,
each of which it reads as it lies.
"""

from typing import Any

import jax

# [..., length, head_dim]; [..., head_dim, length]; [..., tiles, head_dim, TILE].
ROWS, COLUMNS, TILES = -2, -1, -3
TILE = 64


def laid(x: jax.Array, axis: int) -> jax.Array:
    """Keys [..., length, head_dim] with tokens along an axis; tiles, of which a product reads one
    as it lies, are [..., tiles, head_dim, TILE]."""
    *lead, length, dim = x.shape
    if axis == TILES:
        x = x.reshape(*lead, length // TILE, TILE, dim)
    return x if axis == ROWS else x.swapaxes(-1, -2)


def by_rows(x: jax.Array, axis: int) -> jax.Array:
    """And back."""
    x = x if axis == ROWS else x.swapaxes(-1, -2)
    return x if axis != TILES else x.reshape(*x.shape[:-3], -1, x.shape[-1])


def tokens_of(axis: int, shape: tuple[int, ...]) -> int:
    """How many an array of a cache has room for, which lie in it along an axis."""
    return shape[axis] * (TILE if axis == TILES else 1)


def token_index(axis: int, at: Any) -> tuple[Any, ...]:
    """The last dimensions' indices of tokens ``at`` in an array of a cache."""
    if axis == TILES:
        return at // TILE, slice(None), at % TILE
    return (slice(None), at) if axis == COLUMNS else (at,)


def token_at(
    new: jax.Array, position: jax.Array, axis: int
) -> tuple[jax.Array, tuple[Any, ...]]:
    """A token's keys or values [..., head_dim] as a piece of a cache, and where that begins."""
    zeros = (0,) * (new.ndim - 1)
    if axis == TILES:
        return new[..., None, :, None], (*zeros, position // TILE, 0, position % TILE)
    if axis == COLUMNS:
        return new[..., None], (*zeros, 0, position)
    return new[..., None, :], (*zeros, position, 0)
