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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def product(spec: str, x: jax.Array, weight: jax.Array, whole: bool) -> jax.Array:
    """``einsum(spec, x, weight)`` for x [batch, length, ...], b and t, in the dtype of x.

    ``whole``: no mesh axis splits the length or the weights. Then x's other dimensions, all of
    which the product sums over, are joined, and so are those that it makes: in the backward pass
    XLA on a CPU would exchange them first, in copies of activations and weights.

    The weight is kept as it was given and made ready once more in the backward pass: a scan over
    layers would keep whatever a layer makes of it, for all layers at once.
    """
    return _product_forward(spec, x, weight, whole)[0]


def _ready(
    spec: str, x: jax.Array, weight: jax.Array, whole: bool
) -> tuple[str, jax.Array, jax.Array]:
    """The spec and operands that are multiplied."""
    weight = weight.astype(x.dtype)
    if not whole:
        return spec, x, weight
    x = x.reshape(*x.shape[:2], -1)
    return "btd,dm->btm", x, weight.reshape(x.shape[2], -1)


def _product_forward(
    spec: str, x: jax.Array, weight: jax.Array, whole: bool
) -> tuple[jax.Array, Any]:
    out = jnp.einsum(*_ready(spec, x, weight, whole))
    made = weight.shape[x.ndim - 2 :]
    return out.reshape(*x.shape[:2], *made) if whole else out, (x, weight)


def _product_backward(
    spec: str, whole: bool, kept: Any, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    given_x, given_weight = kept
    spec, x, weight = _ready(spec, given_x, given_weight, whole)
    g = g.reshape(*g.shape[:2], -1) if whole else g
    operands, out = spec.split("->")
    left, right = operands.split(",")
    d_x = jnp.einsum(f"{out},{right}->{left}", g, weight)
    d_weight = _weight_gradient(f"{left},{out}->{right}", x, g, whole)
    d_weight = d_weight.reshape(given_weight.shape).astype(given_weight.dtype)
    return d_x.reshape(given_x.shape), d_weight


def _weight_gradient(spec: str, x: jax.Array, g: jax.Array, whole: bool) -> jax.Array:
    """Sum over batch and length, b and t, of products of x and g.

    As one dimension where that is possible: with two to sum over, XLA makes a transposed copy of
    x. A length that is split over devices cannot be joined with the batch without gathering it.
    """
    if not whole:
        return jnp.einsum(spec, x, g)
    x, g = (a.reshape(-1, *a.shape[2:]) for a in (x, g))
    return jnp.einsum(spec.replace("bt", "t"), x, g)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, whole: bool) -> jax.Array:
    """(silu(x gate) * (x up)) down, in the dtype of x [batch, length, embed].

    ``gate_up`` [embed, 2, mlp] is gate and up, ``down`` [mlp, embed]; both are kept as they were
    given. ``whole``: no mesh axis splits the length or the weights. Then the backward pass has a
    product for each half, whose gradients are never copied into one array; otherwise one product
    for both, because each would gather its weights and be summed over devices.
    """
    return _gated_mlp_forward(x, gate_up, down, whole)[0]


def _gated_mlp_forward(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, whole: bool
) -> tuple[jax.Array, Any]:
    both = jnp.einsum("btd,dcm->btcm", x, gate_up.astype(x.dtype))
    inner = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return product("btm,md->btd", inner, down, whole), (x, gate_up, down, both)


def _gated_mlp_backward(whole: bool, kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    x, given_gate_up, given_down, both = kept
    gate_up, down = given_gate_up.astype(x.dtype), given_down.astype(x.dtype)
    gate, up = both[:, :, 0], both[:, :, 1]
    share = jax.nn.sigmoid(gate)
    d_down = _weight_gradient("btm,btd->md", gate * share * up, g, whole)
    d_inner = jnp.einsum("btd,md->btm", g, down)
    d_gate, d_up = d_inner * up * share * (1 + gate * (1 - share)), d_inner * gate * share
    if whole:
        dx = jnp.einsum("btm,dm->btd", d_gate, gate_up[:, 0])
        dx += jnp.einsum("btm,dm->btd", d_up, gate_up[:, 1])
        halves = [_weight_gradient("btd,btm->dm", x, half, whole) for half in (d_gate, d_up)]
        d_gate_up = jnp.stack(halves, axis=1)
    else:
        d_both = jnp.stack([d_gate, d_up], axis=2)
        dx = jnp.einsum("btcm,dcm->btd", d_both, gate_up)
        d_gate_up = jnp.einsum("btd,btcm->dcm", x, d_both)
    return dx, d_gate_up.astype(given_gate_up.dtype), d_down.astype(given_down.dtype)


gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


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
