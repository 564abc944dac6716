"""Kernels in forms that XLA's CPU compiler makes fast.

The mathematics is the reference's, the backward passes are those of ``backward``. Each docstring
says what the compiler does otherwise; none of these forms helps on an accelerator.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels import backward, reference, shape_checks


def product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """As ``reference.product``, if each device holds the whole length and whole weights.

    Contracted dimensions are flattened into one, and so are output dimensions: otherwise XLA copies
    activations and weights to transpose them in the backward pass. Sharded dimensions cannot be
    flattened without gathering them.
    """
    shape_checks.check_product(spec, x, weight)
    return _product(x, weight)


@jax.custom_vjp
def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return _product_forward(x, weight)[0]


def _flat(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x [batch, length, summed] and the weight [summed, made] in the dtype of x."""
    x, weight = x.reshape(*x.shape[:2], -1), weight.astype(x.dtype)
    return x, weight.reshape(x.shape[2], -1)


def _product_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
    out = jnp.einsum("btd,dm->btm", *_flat(x, weight))
    return out.reshape(*x.shape[:2], *weight.shape[x.ndim - 2 :]), (x, weight)


def _product_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    full_x, full_weight = kept
    x, weight = _flat(full_x, full_weight)
    g = g.reshape(*g.shape[:2], -1)
    d_x = jnp.einsum("btm,dm->btd", g, weight).reshape(full_x.shape)
    return d_x, _weight_gradient(x, g).reshape(full_weight.shape).astype(full_weight.dtype)


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """[summed, made] of x [batch, length, summed] and g [batch, length, made].

    Batch and length are flattened: with two contracted dimensions XLA makes a transposed copy of x.
    """
    x, g = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    return jnp.einsum("td,tm->dm", x, g)


_product.defvjp(_product_forward, _product_backward)


def product_flat(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """As ``backward.product``, with the contracted dimensions flattened first.

    With two of them XLA copies the weights of unrolled layers for every decoded token.
    """
    shape_checks.check_product(spec, x, weight)
    if x.ndim == 3:
        return backward.product(spec, x, weight)
    summed, made = x.ndim - 2, weight.shape[x.ndim - 2 :]
    left, right, out = spec.replace("->", ",").split(",")
    joined = f"{left[:3]},{left[2]}{right[summed:]}->{out}"
    size = math.prod(x.shape[2:])
    x, weight = x.reshape(*x.shape[:2], size), weight.reshape(size, *made)
    return backward.product(joined, x, weight)


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """As ``reference.gated_mlp``, if each device holds the whole length and whole weights.

    The backward pass has separate products for gate and up, so their gradients are not copied into
    one array.
    """
    shape_checks.check_gated_mlp(x, gate_up, down)
    return _gated_mlp(x, gate_up, down)


@jax.custom_vjp
def _gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    return _gated_mlp_forward(x, gate_up, down)[0]


def _gated_mlp_forward(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> tuple[jax.Array, Any]:
    both = jnp.einsum("btd,dcm->btcm", x, gate_up.astype(x.dtype))
    both = checkpoint_name(both, reference.GATES)
    return _product(jax.nn.silu(both[:, :, 0]) * both[:, :, 1], down), (x, gate_up, down, both)


def _gated_mlp_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    x, full_gate_up, full_down, both = kept
    gate_up, down = full_gate_up.astype(x.dtype), full_down.astype(x.dtype)
    gate, up = both[:, :, 0], both[:, :, 1]
    sigmoid = jax.nn.sigmoid(gate)
    d_down = _weight_gradient(gate * sigmoid * up, g)
    d_gate, d_up = backward.gate_gradients(gate, up, sigmoid, jnp.einsum("btd,md->btm", g, down))
    d_x = jnp.einsum("btm,dm->btd", d_gate, gate_up[:, 0])
    d_x += jnp.einsum("btm,dm->btd", d_up, gate_up[:, 1])
    d_gate_up = jnp.stack([_weight_gradient(x, half) for half in (d_gate, d_up)], axis=1)
    return d_x, d_gate_up.astype(full_gate_up.dtype), d_down.astype(full_down.dtype)


_gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


def rotary_tables(frequencies: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As ``reference.rotary_tables``, computed in a loop of two trips, which XLA does not fuse.

    Otherwise unrolled layers recompute cos and sin for every head of every layer.
    """
    cos, sin = reference.rotary_tables(frequencies, positions)
    both = jax.lax.map(lambda second: jnp.where(second, sin, cos), jnp.array([False, True]))
    return both[0], both[1]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As ``reference.rotate``, with halves padded and added, forward and backward: XLA concatenates
    element by element, five times as slowly."""
    shape_checks.check_rotate(x, cos, sin)
    half, wide = x.shape[-1] // 2, x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]

    def put(part: jax.Array, before: int) -> jax.Array:
        last = (before, half - before, 0)
        return jax.lax.pad(part, jnp.float32(0), [(0, 0, 0)] * (part.ndim - 1) + [last])

    rotated = put(first * cos - second * sin, 0) + put(second * cos + first * sin, half)
    return rotated.astype(x.dtype)


def argmax(logits: jax.Array) -> jax.Array:
    """As ``reference.argmax``, in two plain reductions: XLA's reduction of (value, index) pairs is
    ten times as slow. For a row with a NaN it is the last index, not the NaN's."""
    vocab = logits.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == top, index, vocab - 1), axis=-1)
