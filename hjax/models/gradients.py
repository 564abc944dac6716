"""Parts of a layer whose backward pass is written out, with fewer passes over memory.

Differentiated by rule, each elementwise step keeps what its own derivative needs, and gradients of
weights come out transposed, from transposed copies of activations. Here a part keeps little more
than its inputs and recomputes the rest: the same mathematics in less memory, and faster where such
passes weigh (on a CPU, a quarter of the update of a small model).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def product(spec: str, x: jax.Array, weight: jax.Array, whole: bool) -> jax.Array:
    """``einsum(spec, x, weight)`` for x [batch, length, ...], b and t, and a weight.

    ``whole``: no mesh axis splits the length or the weights. Then x is [batch, length, d], the
    weight [d, ...], and its other dimensions are joined: in the backward pass XLA on a CPU would
    exchange them first, in copies of activations and weights.
    """
    if not whole:
        return _product(spec, x, weight, False)
    out = _product("btd,dm->btm", x, weight.reshape(weight.shape[0], -1), True)
    return out.reshape(*x.shape[:2], *weight.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(spec: str, x: jax.Array, weight: jax.Array, whole: bool) -> jax.Array:
    return jnp.einsum(spec, x, weight)


def _product_forward(
    spec: str, x: jax.Array, weight: jax.Array, whole: bool
) -> tuple[jax.Array, Any]:
    return jnp.einsum(spec, x, weight), (x, weight)


def _product_backward(
    spec: str, whole: bool, kept: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    operands, out = spec.split("->")
    left, right = operands.split(",")
    d_weight = _weight_gradient(f"{left},{out}->{right}", x, g, whole)
    return jnp.einsum(f"{out},{right}->{left}", g, weight), d_weight


def _weight_gradient(spec: str, x: jax.Array, g: jax.Array, whole: bool) -> jax.Array:
    """Sum over batch and length, b and t, of products of x and g.

    As one dimension where that is possible: with two to sum over, XLA makes a transposed copy of
    x. A length that is split over devices cannot be joined with the batch without gathering it.
    """
    if not whole:
        return jnp.einsum(spec, x, g)
    x, g = (a.reshape(-1, *a.shape[2:]) for a in (x, g))
    return jnp.einsum(spec.replace("bt", "t"), x, g)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(x: jax.Array, weight: jax.Array, whole: bool) -> jax.Array:
    """silu(x gate) * (x up): x [batch, length, embed], weight [embed, 2, mlp] of gate and up.

    ``whole``: no mesh axis splits the length or the weights. Then the backward pass has a product
    for each half, whose gradients are never copied into one array; otherwise one product for both,
    because each would gather its weights and be summed over devices.
    """
    return _gated_forward(x, weight, whole)[0]


def _gated_forward(x: jax.Array, weight: jax.Array, whole: bool) -> tuple[jax.Array, Any]:
    both = jnp.einsum("btd,dcm->btcm", x, weight)
    gate, up = both[:, :, 0], both[:, :, 1]
    return jax.nn.silu(gate) * up, (x, weight, both)


def _gated_backward(whole: bool, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, both = kept
    gate, up = both[:, :, 0], both[:, :, 1]
    share = jax.nn.sigmoid(gate)
    d_gate, d_up = g * up * share * (1 + gate * (1 - share)), g * gate * share
    if not whole:
        d_both = jnp.stack([d_gate, d_up], axis=2)
        dx = jnp.einsum("btcm,dcm->btd", d_both, weight)
        return dx, jnp.einsum("btd,btcm->dcm", x, d_both)
    dx = jnp.einsum("btm,dm->btd", d_gate, weight[:, 0])
    dx += jnp.einsum("btm,dm->btd", d_up, weight[:, 1])
    d_weight = [_weight_gradient("btd,btm->dm", x, half, whole) for half in (d_gate, d_up)]
    return dx, jnp.stack(d_weight, axis=1)


gated.defvjp(_gated_forward, _gated_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """RMSNorm over the last dimension in float32, returned in the dtype of ``x``."""
    return _rms_norm_forward(x, weight, epsilon)[0]


def _rms_norm_forward(x: jax.Array, weight: jax.Array, epsilon: float) -> tuple[jax.Array, Any]:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    out = wide * scale * weight.astype(jnp.float32)
    return out.astype(x.dtype), (x, weight, scale)


def _rms_norm_backward(epsilon: float, kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight, scale = kept
    unit, g = x.astype(jnp.float32) * scale, g.astype(jnp.float32)
    inner = g * weight.astype(jnp.float32)
    along = jnp.mean(inner * unit, axis=-1, keepdims=True)
    d_weight = jnp.sum(g * unit, axis=tuple(range(g.ndim - 1)))
    return ((inner - unit * along) * scale).astype(x.dtype), d_weight.astype(weight.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
