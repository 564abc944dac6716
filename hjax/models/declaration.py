"""Parameters as they are declared: initial value, logical axes, kind.

Whatever treats parameters differently (layouts, weight decay, dtypes) reads it here, never from a
parameter's name or shape.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp
from flax import nnx


class Kind(enum.StrEnum):
    """What a parameter does.

    A leading ``layers`` axis changes nothing: the stacked biases of all layers are vectors.
    """

    MATRIX = "matrix"  # multiplies activations in a product
    EMBEDDING = "embedding"  # a row per token: input and output tables
    VECTOR = "vector"  # norm weights, biases, scalar heads

    @property
    def decayed(self) -> bool:
        """Whether weight decay pulls it towards 0."""
        return self is not Kind.VECTOR

    @property
    def cast(self) -> bool:
        """Whether a forward reads it in its compute dtype, rather than in float32."""
        return self is not Kind.VECTOR


def parameter(
    key: jax.Array, shape: tuple[int, ...], logical_axes: tuple[str, ...], kind: Kind, scale: float
) -> nnx.Param:
    """A float32 parameter drawn from a truncated normal with standard deviation ``scale``."""
    value = scale * jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value, logical_axes=logical_axes, kind=kind)


def ones(shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> nnx.Param:
    """A float32 vector of ones (norm weights)."""
    return nnx.Param(jnp.ones(shape), logical_axes=logical_axes, kind=Kind.VECTOR)


def zeros(shape: tuple[int, ...], logical_axes: tuple[str, ...]) -> nnx.Param:
    """A float32 vector of zeros (biases, new heads)."""
    return nnx.Param(jnp.zeros(shape), logical_axes=logical_axes, kind=Kind.VECTOR)
