"""Masked statistics and whitening over tokens or rows.

A mask is boolean or 0/1 and has the shape of the array it selects from. Masked-out entries never
enter a sum, not even as `0 * nan`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def masked_sum(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Sum of `x` where `mask` is true, in float32; other entries may be anything, even NaN."""
    return jnp.sum(masked(x, mask), axis=axis)


def masked_mean(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Mean of `x` where `mask` is true, in float32; 0 where nothing is selected.

    Args:
        x: any shape.
        mask: bool or 0/1, the shape of `x`.
        axis: the axis averaged over; None averages over all.
    """
    count = jnp.sum(jnp.asarray(mask, bool), axis=axis)
    return masked_sum(x, mask, axis) / jnp.maximum(count, 1)


def masked_variance(x: jax.Array, mask: jax.Array, unbiased: bool = True) -> jax.Array:
    """Variance of `x` where `mask` is true, a float32 scalar; 0 below two selected entries.

    Args:
        x: any shape.
        mask: bool or 0/1, the shape of `x`.
        unbiased: divide by n - 1 (Bessel), otherwise by n.
    """
    count = jnp.sum(jnp.asarray(mask, bool))
    squares = masked_sum(jnp.square(masked(x, mask) - masked_mean(x, mask)), mask)
    return squares / jnp.maximum(count - 1 if unbiased else count, 1)


def constant(lowest: Any, highest: Any) -> Any:
    """Whether values are equal up to float32's rounding: max - min <= 1e-6 max(1, |max|).

    A deviation of such values is rounding error, and nothing may be divided by it.

    Args:
        lowest, highest: of the values, float, NumPy's or JAX's; infinite where there are none.

    Returns:
        bool, of their shape.
    """
    return highest - lowest <= 1e-6 * abs(highest).clip(1.0)


def constant_where(x: jax.Array, mask: jax.Array, axis: int | None = None) -> jax.Array:
    """Whether the entries of `x` where `mask` is true are `constant`, over an axis or all."""
    lowest = jnp.min(x, axis=axis, where=mask, initial=jnp.inf)
    return constant(lowest, jnp.max(x, axis=axis, where=mask, initial=-jnp.inf))


def bounded(x: jax.Array, bound: float | None) -> jax.Array:
    """`x` within `-bound` to `bound`; None: as it is."""
    return x if bound is None else jnp.clip(x, -bound, bound)


def whiten(
    x: jax.Array,
    mask: jax.Array,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    unbiased: bool = True,
) -> jax.Array:
    """Scale the selected entries of `x` to unit variance, over the whole array.

    `(x - mean) / sqrt(variance + epsilon)` with the unbiased variance (n - 1), as in TRL's and
    verl's `masked_whiten`; OpenRLHF's `masked_normalize` uses the biased one (n), which differs
    by the factor sqrt(n / (n - 1)).

    Args:
        x: float [batch, length] or any other shape.
        mask: bool or 0/1, the shape of `x`.
        shift_mean: also subtract the mean; otherwise the mean is kept as it was.
        epsilon: added to the variance, in the squared unit of `x`.
        unbiased: whether the variance is.

    Returns:
        float32, the shape of `x`, 0 outside the mask; `constant` entries are their mean.
    """
    mask = jnp.asarray(mask, bool)
    mean = masked_mean(x, mask)
    variance = masked_variance(x, mask, unbiased)
    whitened = (masked(x, mask) - mean) * jax.lax.rsqrt(variance + epsilon)
    whitened = jnp.where(constant_where(x, mask), 0.0, whitened)
    return masked(whitened if shift_mean else whitened + mean, mask)


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """`x` as float32 where `mask` is true, exactly 0 elsewhere, in value and gradient."""
    return jnp.where(jnp.asarray(mask, bool), jnp.asarray(x, jnp.float32), 0.0)


def last_token_mask(mask: Any) -> Any:
    """Mask of the last True of each row, for NumPy or JAX: bool [N, L] of bool [N, L]; an empty
    row has none."""
    return mask & (mask[:, ::-1].cumsum(axis=1)[:, ::-1] == 1)


def jit_static_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    """jit with all keyword-only arguments static: one compilation for each choice of them."""
    return jax.jit(function, static_argnames=inspect.getfullargspec(function).kwonlyargs)
