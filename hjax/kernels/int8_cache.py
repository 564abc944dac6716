"""Keys and values in int8: a byte for each element, a float32 scale for each token and head.

Symmetric, by the largest magnitude over a head's dimension. Products are taken with the whole
numbers, which every compute dtype has exactly, and a scale multiplies what it can: the scores of a
key, the weight of a value. So no array of the cache's size is ever made in floating point. The
scale is float32: of heads of 128 it adds 3 %, where bfloat16's would add half of it and an error of
its own beside the half step of rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.cache_axis import ROWS, TILES

LARGEST = 127.0  # the numbers are symmetric
SCALE_BYTES = 4
# What keys and values may be kept in: the dtype of compute, or int8.
AUTO, INT8 = "auto", "int8"
CACHE_DTYPES = (AUTO, INT8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """What stands in a cache's place of an array of keys, or of values.

    In a kernel its fields are what the kernel has of arrays: references, blocks, shapes.

    Attributes:
      numbers: int8, shaped as that array is.
      scale: float32 [..., 1, length], whether ``numbers`` have a length or tiles.
    """

    numbers: Any
    scale: Any

    def widened(self, dtype: Any) -> jax.Array:
        """The array that it stands for, [..., length, head_dim]."""
        wide: jax.Array = self.numbers * self.scale.swapaxes(-1, -2)
        return wide.astype(dtype)


# Keys or values of a layer: an array, or what stands for one.
Held = jax.Array | QuantizedCache


def shape(held: Held) -> tuple[int, ...]:
    """Of the array, or of that which ``held`` stands for."""
    return tuple((held.numbers if isinstance(held, QuantizedCache) else held).shape)


def quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers, int8 like x [..., head_dim], and scales, float32 [..., 1]: ``numbers * scale`` is
    off by half a scale at most, the largest magnitude over 254."""
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # Products, which no compiler writes otherwise as it does quotients of quotients: bfloat16 has
    # many numbers between two steps, which every program must round to the same.
    numbers = jnp.round(wide * (LARGEST / jnp.where(top > 0, top, 1.0)))
    return numbers.astype(jnp.int8), top * jnp.float32(1 / LARGEST)


def zeros(size: tuple[int, ...], dtype: Any) -> Held:
    """An array [..., length, head_dim] of a dtype; None: in int8."""
    if dtype is not None:
        return jnp.zeros(size, dtype)
    *lead, length, _ = size
    return QuantizedCache(jnp.zeros(size, jnp.int8), jnp.zeros((*lead, 1, length), jnp.float32))


def element_bytes(dtype: Any, head_dim: int) -> float:
    """Of an element that is kept; a scale's are shared out over its head. ``dtype`` as above."""
    return jnp.dtype(dtype).itemsize if dtype is not None else 1 + SCALE_BYTES / head_dim


def each(of: Callable[..., Any], held: Any, *others: Any, axis: int = ROWS) -> Any:
    """``of(axis, scaled, array, ...)`` for every array of a tree of keys or values.

    Args:
      of: told along which axis tokens lie, and whether the array is one of scales.
      held: the tree, of arrays and ``QuantizedCache``.
      others: like it; their arrays are given after its own.
      axis: along which tokens lie in it, see ``hjax.kernels.cache_axis``; in scales they lie last.
    """

    def one(x: Any, *more: Any) -> Any:
        if not isinstance(x, QuantizedCache):
            return of(axis, False, x, *more)
        return QuantizedCache(
            of(axis, False, x.numbers, *(y.numbers for y in more)),
            of(-1, True, x.scale, *(y.scale for y in more)),
        )

    return jax.tree.map(one, held, *others, is_leaf=lambda x: isinstance(x, QuantizedCache))


def like(held: Any, x: jax.Array) -> Held:
    """New keys or values [..., head_dim] as ``held`` has them; a scale's last dimension is 1."""
    return QuantizedCache(*quantized(x)) if isinstance(held, QuantizedCache) else x


def scores(spec: str, q: jax.Array, k: Held) -> jax.Array:
    """float32 ``einsum(spec, q, k)``, tokens last; k [..., length, head_dim] or as ``spec`` says,
    an array or ``QuantizedCache``."""
    return _scored(lambda q, k: jnp.einsum(spec, q, k, preferred_element_type=jnp.float32), q, k)


def own_scores(q: jax.Array, k: Held, axis: int) -> jax.Array:
    """float32 [..., per_kv, new, length], scores of rows' queries [..., per_kv, new, head_dim] with
    their own keys, which lie along an axis as ``each`` says."""
    if axis != TILES:
        return scores(f"...gtd,...{'ud' if axis == ROWS else 'du'}->...gtu", q, k)

    def product(q: jax.Array, k: jax.Array) -> jax.Array:
        *lead, per_kv, new, dim = q.shape
        tiles, _, width = k.shape[-3:]
        # Tiles are a dimension of the batch: so a small product reads a piece of memory.
        together = jnp.broadcast_to(
            q.reshape(*lead, 1, per_kv * new, dim), (*lead, tiles, per_kv * new, dim)
        )
        out = jnp.einsum("...qd,...du->...qu", together, k, preferred_element_type=jnp.float32)
        return out.swapaxes(-2, -3).reshape(*lead, per_kv, new, tiles * width)

    return _scored(product, q, k)


def _scored(
    product: Callable[[jax.Array, jax.Array], jax.Array], q: jax.Array, k: Held
) -> jax.Array:
    if not isinstance(k, QuantizedCache):
        return product(q, k)
    q, numbers = _where_it_is_used(q, k.numbers)
    out = product(q, numbers.astype(q.dtype))
    return out * _across(k.scale, out.ndim)


def values(spec: str, weights: jax.Array, v: Held, dtype: Any) -> jax.Array:
    """float32 ``einsum(spec, weights, v)`` in products of ``dtype``; weights float32 [..., length],
    v an array of the dtype, or ``QuantizedCache``."""
    if isinstance(v, QuantizedCache):
        weights = weights * _across(v.scale, weights.ndim)
        weights, v = _where_it_is_used(weights, v.numbers)
    weights, v = weights.astype(dtype), v.astype(dtype)
    return jnp.einsum(spec, weights, v, preferred_element_type=jnp.float32)


def _across(scale: jax.Array, ndim: int) -> jax.Array:
    """[..., 1, length] with as many dimensions of 1 more as it takes."""
    *lead, length = scale.shape
    return scale.reshape(*lead, *(1,) * (ndim - scale.ndim), length)


def _where_it_is_used(x: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both, so that numbers which a loop does not change are not widened before it, for all of
    its turns."""
    x, numbers = jax.lax.optimization_barrier((x, numbers))
    return x, numbers
