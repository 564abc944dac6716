"""What XLA's compiler for TPUs needs to be told another way to be fast; the mathematics is the
reference's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels import checks, reference


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As ``reference.rotate``. The halves change places by a product with a signed permutation,
    which is exact and stands in one pass with what surrounds it; cut, they would be two arrays,
    filled up to the width of a register, that are written and joined again."""
    checks.check_rotate(x, cos, sin)
    if x.shape[1] == 1:  # decoding: too little to be worth a product
        return reference.rotate(x, cos, sin)
    return _rotate(x, cos, sin)


@jax.custom_vjp
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    change = np.zeros((2 * half, 2 * half), np.float32)
    change[half:, :half], change[:half, half:] = -np.eye(half), np.eye(half)
    changed = jnp.einsum(
        "bthd,de->bthe",
        x,
        jnp.asarray(change, x.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    wide, cos, sin = x.astype(jnp.float32), _twice(cos), _twice(sin)
    return (wide * cos + changed * sin).astype(x.dtype)


def _twice(table: jax.Array) -> jax.Array:
    return jnp.concatenate([table, table], axis=-1)


def _rotate_backward(tables: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    cos, sin = tables
    return _rotate(g, cos, -sin), None, None  # back by the same angle


_rotate.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), _rotate_backward)
