"""Products with matrices of one byte per element and a scale per output.

The numbers of one byte are exact in every compute dtype, so they are multiplied as they are and the
sums are scaled: no matrix of larger numbers is kept, forward or backward.
"""

from __future__ import annotations

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp

from hjax.kernels import checks


def product(spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """``einsum(spec, x, weight * scale)`` in the dtype of x; there are gradients of x alone.

    Args:
      spec, x: as of ``reference.product``.
      weight: [..., made dimensions], int8 or float8_e4m3fn.
      scale: float32 [made dimensions].

    Returns:
      [batch, length, made dimensions].
    """
    checks.check_product(spec, x, weight)
    chex.assert_shape(scale, weight.shape[x.ndim - 2 :])
    return _product(spec, x, weight, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    return _product_forward(spec, x, weight, scale)[0]


def _product_forward(
    spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array
) -> tuple[jax.Array, Any]:
    # What is kept has the size of the weight as it is given, whose cast a scan would keep.
    return _scaled(jnp.einsum(spec, x, weight.astype(x.dtype)), scale), (weight, scale)


def _product_backward(spec: str, kept: Any, g: jax.Array) -> tuple[Any, None, None]:
    weight, scale = kept
    left, right, out = spec.replace("->", ",").split(",")
    d_x = jnp.einsum(f"{out},{right}->{left}", _scaled(g, scale), weight.astype(g.dtype))
    return d_x, None, None


@jax.custom_vjp
def scaled_rows(x: jax.Array, scale: jax.Array, own: jax.Array) -> jax.Array:
    """What a grouped product with matrices of one byte gave, times its scales; in the dtype of x.

    Args:
      x: [rows, outputs]; there are gradients of it alone.
      scale: float32 [groups, outputs].
      own: int [rows], the group of each.
    """
    return _scaled(x, scale[own])


def _rows_forward(x: jax.Array, scale: jax.Array, own: jax.Array) -> tuple[jax.Array, Any]:
    return scaled_rows(x, scale, own), (scale, own)  # not every row's scales, which are large


def _rows_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    scale, own = kept
    return _scaled(g, scale[own]), None, None


scaled_rows.defvjp(_rows_forward, _rows_backward)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


_product.defvjp(_product_forward, _product_backward)
