"""Layer kernels with a custom backward pass (custom VJP) that keeps and reads less memory.

Automatic differentiation keeps the inputs of every elementwise step. These functions keep little
more than their own inputs and recompute the rest, by the same mathematics. They have no
forward-mode derivative; the reference has.

``rotate`` is the reference's mathematics in a form that XLA's TPU compiler makes fast.
"""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels import reference, shape_checks
from hjax.kernels.reference import GATES


def product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """As ``reference.product``.

    The backward pass casts the weight again. Otherwise a scan over layers would keep the cast
    weights of all layers at once.
    """
    shape_checks.check_product(spec, x, weight)
    return _product(spec, x, weight, None)


def scaled_product(spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """``einsum(spec, x, weight * scale)`` in the dtype of x, for weights of one byte (quantized).

    Such weights are exact in every compute dtype, so the product uses them unscaled and the sums
    are scaled: no dequantized matrix is kept, forward or backward. Only x has gradients.

    Args:
      spec, x: as of ``reference.product``.
      weight: [..., made dimensions], int8 or float8_e4m3fn.
      scale: float32 [made dimensions].

    Returns:
      [batch, length, made dimensions].
    """
    shape_checks.check_product(spec, x, weight)
    chex.assert_shape(scale, weight.shape[x.ndim - 2 :])
    return _product(spec, x, weight, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array | None) -> jax.Array:
    return _product_forward(spec, x, weight, scale)[0]


def _product_forward(
    spec: str, x: jax.Array, weight: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, Any]:
    out = jnp.einsum(spec, x, weight.astype(x.dtype))
    if scale is None:
        return out, (x, weight, None)
    return _scaled(out, scale), (None, weight, scale)


def _product_backward(spec: str, kept: Any, g: jax.Array) -> tuple[Any, ...]:
    x, weight, scale = kept
    left, right, out = spec.replace("->", ",").split(",")
    d_sums = g if scale is None else _scaled(g, scale)
    d_x = jnp.einsum(f"{out},{right}->{left}", d_sums, weight.astype(g.dtype))
    if scale is not None:
        return d_x, None, None
    return d_x, jnp.einsum(f"{left},{out}->{right}", x, g).astype(weight.dtype), None


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def scale_grouped_rows(x: jax.Array, scale: jax.Array, own: jax.Array) -> jax.Array:
    """Scale the result of a grouped product with quantized matrices; in the dtype of x.

    Args:
      x: [rows, outputs]; only x has gradients.
      scale: float32 [groups, outputs].
      own: int [rows], the group of each.
    """
    return _scaled(x, scale[own])


scale_grouped_rows.defvjp(
    # Keeps the scales of groups, not of rows, which would be large.
    lambda x, scale, own: (scale_grouped_rows(x, scale, own), (scale, own)),
    lambda kept, g: (_scaled(g, kept[0][kept[1]]), None, None),
)


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """As ``reference.gated_mlp``; the backward pass casts the weights again.

    Gate and up are one product, forward and backward, so weights are gathered and gradients are
    reduced over devices once.
    """
    shape_checks.check_gated_mlp(x, gate_up, down)
    return _gated_mlp(x, gate_up, down)


@jax.custom_vjp
def _gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return _gated_mlp_forward(x, gate_up, down)[0]


def _gated_mlp_forward(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    both = checkpoint_name(jnp.einsum("btd,dcm->btcm", x, gate_up.astype(x.dtype)), GATES)
    inner = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return _product("btm,md->btd", inner, down, None), (x, gate_up, down, both)


def _gated_mlp_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    x, full_gate_up, full_down, both = kept
    gate_up, down = full_gate_up.astype(x.dtype), full_down.astype(x.dtype)
    gate, up = both[:, :, 0], both[:, :, 1]
    sigmoid = jax.nn.sigmoid(gate)
    d_down = jnp.einsum("btm,btd->md", gate * sigmoid * up, g)
    d_inner = jnp.einsum("btd,md->btm", g, down)
    d_both = jnp.stack(gate_gradients(gate, up, sigmoid, d_inner), axis=2)
    d_x = jnp.einsum("btcm,dcm->btd", d_both, gate_up)
    d_gate_up = jnp.einsum("btd,btcm->dcm", x, d_both)
    return d_x, d_gate_up.astype(full_gate_up.dtype), d_down.astype(full_down.dtype)


def gate_gradients(
    gate: jax.Array, up: jax.Array, sigmoid: jax.Array, d_inner: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of gate and up of ``gate * sigmoid * up``, with ``sigmoid`` of the gate."""
    return d_inner * up * sigmoid * (1 + gate * (1 - sigmoid)), d_inner * gate * sigmoid


_gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """As ``reference.rms_norm``."""
    shape_checks.check_rms_norm(x, weight)
    return _rms_norm(x, weight, epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
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


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As ``reference.rotate``. The halves are swapped by a product with a signed permutation, which
    is exact and fuses with its neighbours. Slicing instead would write two arrays, padded to the
    width of a register, and join them again."""
    shape_checks.check_rotate(x, cos, sin)
    if x.shape[1] == 1:  # decoding: too little to be worth a product
        return reference.rotate(x, cos, sin)
    return _rotate(x, cos, sin)


@jax.custom_vjp
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    swap = np.zeros((2 * half, 2 * half), np.float32)
    swap[half:, :half], swap[:half, half:] = -np.eye(half), np.eye(half)
    swapped = jnp.einsum(
        "bthd,de->bthe",
        x,
        jnp.asarray(swap, x.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    wide, cos, sin = x.astype(jnp.float32), _twice(cos), _twice(sin)
    return (wide * cos + swapped * sin).astype(x.dtype)


def _twice(table: jax.Array) -> jax.Array:
    return jnp.concatenate([table, table], axis=-1)


def _rotate_backward(tables: Any, g: jax.Array) -> tuple[jax.Array, None, None]:
    cos, sin = tables
    return _rotate(g, cos, -sin), None, None  # back by the same angle


_rotate.defvjp(lambda x, cos, sin: (_rotate(x, cos, sin), (cos, sin)), _rotate_backward)
