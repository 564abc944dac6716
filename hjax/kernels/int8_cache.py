"""int8 KV cache: a byte for each element, a float32 scale for each token and head.

Symmetric quantization by the largest magnitude over a head. Products use the int8 values, which are
exact in every compute dtype; a scale then multiplies a key's scores or a value's weight. So no
dequantized array of the cache's size is ever made. The scale is float32: for heads of 128 it adds
3 % of memory. bfloat16 would add half of that, and an error beside the rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels.cache_axis import ROWS, TILES

INT8_MAX = 127.0  # symmetric range
SCALE_BYTES = 4
# Dtypes of the KV cache: that of compute, or int8.
AUTO, INT8 = "auto", "int8"
CACHE_DTYPES = (AUTO, INT8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedCache:
    """Quantized keys or values, in place of an array of a cache.

    In a kernel its fields are that kernel's references, blocks or shapes.

    Attributes:
      numbers: int8, in the array's shape.
      scale: float32 [..., 1, length], also if ``numbers`` are in tiles.
    """

    numbers: Any
    scale: Any

    def dequantized(self, dtype: Any) -> jax.Array:
        """The array [..., length, head_dim] in floating point."""
        wide: jax.Array = self.numbers * self.scale.swapaxes(-1, -2)
        return wide.astype(dtype)


# Keys or values of a layer in the KV cache.
CacheArray = jax.Array | QuantizedCache


def shape(held: CacheArray) -> tuple[int, ...]:
    """Shape of an array, quantized or not."""
    return tuple((held.numbers if isinstance(held, QuantizedCache) else held).shape)


def quantize(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 values like x [..., head_dim], and scales, float32 [..., 1]. The error of ``values *
    scale`` is at most half a scale: the largest magnitude over 254."""
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    # Multiplications instead of divisions, which compilers may rewrite: every program must round
    # alike, as many bfloat16 values lie halfway between two steps.
    numbers = jnp.round(wide * (INT8_MAX / jnp.where(top > 0, top, 1.0)))
    return numbers.astype(jnp.int8), top * jnp.float32(1 / INT8_MAX)


def zeros(size: tuple[int, ...], dtype: Any) -> CacheArray:
    """Zeros [..., length, head_dim] of a dtype; None: int8."""
    if dtype is not None:
        return jnp.zeros(size, dtype)
    *lead, length, _ = size
    return QuantizedCache(jnp.zeros(size, jnp.int8), jnp.zeros((*lead, 1, length), jnp.float32))


def element_bytes(dtype: Any, head_dim: int) -> float:
    """Bytes per element of the cache, the scale spread over its head. ``dtype`` as in ``zeros``."""
    return jnp.dtype(dtype).itemsize if dtype is not None else 1 + SCALE_BYTES / head_dim


def map_arrays(function: Callable[..., Any], held: Any, *others: Any, axis: int = ROWS) -> Any:
    """``function(axis, scaled, array, ...)`` for every array of a tree of keys or values.

    Args:
      function: gets along which axis tokens lie, and whether the array is one of scales.
      held: the tree, of arrays and ``QuantizedCache``.
      others: like it; their arrays are given after its own.
      axis: along which tokens lie in it, see ``hjax.kernels.cache_axis``; in scales they lie last.
    """

    def one(x: Any, *more: Any) -> Any:
        if not isinstance(x, QuantizedCache):
            return function(axis, False, x, *more)
        return QuantizedCache(
            function(axis, False, x.numbers, *(y.numbers for y in more)),
            function(-1, True, x.scale, *(y.scale for y in more)),
        )

    return jax.tree.map(one, held, *others, is_leaf=lambda x: isinstance(x, QuantizedCache))


def quantize_like(held: Any, x: jax.Array) -> CacheArray:
    """New keys or values [..., head_dim], quantized if ``held`` is; scales are [..., 1]."""
    return QuantizedCache(*quantize(x)) if isinstance(held, QuantizedCache) else x


def scores(spec: str, q: jax.Array, k: CacheArray) -> jax.Array:
    """Attention scores: float32 ``einsum(spec, q, k)``, tokens last; k [..., length, head_dim] or
    as ``spec`` says, an array or ``QuantizedCache``."""
    return _scored(lambda q, k: jnp.einsum(spec, q, k, preferred_element_type=jnp.float32), q, k)


def own_scores(q: jax.Array, k: CacheArray, axis: int) -> jax.Array:
    """float32 [..., per_kv, new, length], scores of rows' queries [..., per_kv, new, head_dim] with
    their own keys, which lie along an axis as ``map_arrays`` says."""
    if axis != TILES:
        return scores(f"...gtd,...{'ud' if axis == ROWS else 'du'}->...gtu", q, k)

    def product(q: jax.Array, k: jax.Array) -> jax.Array:
        *lead, per_kv, new, dim = q.shape
        tiles, _, width = k.shape[-3:]
        # Tiles are a batch dimension, so that each small product reads contiguous memory.
        together = jnp.broadcast_to(
            q.reshape(*lead, 1, per_kv * new, dim), (*lead, tiles, per_kv * new, dim)
        )
        out = jnp.einsum("...qd,...du->...qu", together, k, preferred_element_type=jnp.float32)
        return out.swapaxes(-2, -3).reshape(*lead, per_kv, new, tiles * width)

    return _scored(product, q, k)


def _scored(
    product: Callable[[jax.Array, jax.Array], jax.Array], q: jax.Array, k: CacheArray
) -> jax.Array:
    if not isinstance(k, QuantizedCache):
        return product(q, k)
    q, numbers = _prevent_hoisting(q, k.numbers)
    out = product(q, numbers.astype(q.dtype))
    return out * _broadcast_scale(k.scale, out.ndim)


def values(spec: str, weights: jax.Array, v: CacheArray, dtype: Any) -> jax.Array:
    """Weighted values: float32 ``einsum(spec, weights, v)`` with products in ``dtype``; weights
    float32 [..., length], v an array of the dtype, or ``QuantizedCache``."""
    if isinstance(v, QuantizedCache):
        weights = weights * _broadcast_scale(v.scale, weights.ndim)
        weights, v = _prevent_hoisting(weights, v.numbers)
    weights, v = weights.astype(dtype), v.astype(dtype)
    return jnp.einsum(spec, weights, v, preferred_element_type=jnp.float32)


def _broadcast_scale(scale: jax.Array, ndim: int) -> jax.Array:
    """[..., 1, length] with dimensions of 1 inserted up to ``ndim``."""
    *lead, length = scale.shape
    return scale.reshape(*lead, *(1,) * (ndim - scale.ndim), length)


def _prevent_hoisting(x: jax.Array, numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both unchanged, behind a barrier: XLA must not dequantize loop-invariant values before a
    loop."""
    x, numbers = jax.lax.optimization_barrier((x, numbers))
    return x, numbers
