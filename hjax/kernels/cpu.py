"""What XLA's compiler for CPUs needs to be told another way to be fast.

The mathematics is the reference's, the backward passes those of ``backward``. Each detour here
says what that compiler would do without it; none of them helps on an accelerator.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels import backward, reference, shape_checks


def product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """As ``reference.product``, where each device holds the whole length and whole weights.

    x's dimensions that are summed over are joined, and so are those that are made: in the backward
    pass XLA would exchange them first, in copies of activations and weights. Split dimensions
    cannot be joined without gathering them.
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
    given_x, given_weight = kept
    x, weight = _flat(given_x, given_weight)
    g = g.reshape(*g.shape[:2], -1)
    d_x = jnp.einsum("btm,dm->btd", g, weight).reshape(given_x.shape)
    d_weight = _weight_gradient(x, g).reshape(given_weight.shape)
    return d_x, d_weight.astype(given_weight.dtype)


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    """[summed, made] of x [batch, length, summed] and g [batch, length, made].

    Batch and length are joined: with two dimensions to sum over, XLA makes a transposed copy of x.
    """
    x, g = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    return jnp.einsum("td,tm->dm", x, g)


_product.defvjp(_product_forward, _product_backward)


def product_joined(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """As ``backward.product``, the dimensions that are summed over joined before it.

    With two of them XLA copies the weights of unrolled layers, for every token that is decoded.
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
    """As ``reference.gated_mlp``, where each device holds the whole length and whole weights.

    The backward pass has a product for each of gate and up, whose gradients are never copied into
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
    inner = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return _product(inner, down), (x, gate_up, down, both)


def _gated_mlp_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    x, given_gate_up, given_down, both = kept
    gate_up, down = given_gate_up.astype(x.dtype), given_down.astype(x.dtype)
    gate, up = both[:, :, 0], both[:, :, 1]
    share = jax.nn.sigmoid(gate)
    d_down = _weight_gradient(gate * share * up, g)
    d_inner = jnp.einsum("btd,md->btm", g, down)
    d_gate, d_up = backward.gate_gradients(gate, up, share, d_inner)
    d_x = jnp.einsum("btm,dm->btd", d_gate, gate_up[:, 0])
    d_x += jnp.einsum("btm,dm->btd", d_up, gate_up[:, 1])
    d_gate_up = jnp.stack([_weight_gradient(x, half) for half in (d_gate, d_up)], axis=1)
    return d_x, d_gate_up.astype(given_gate_up.dtype), d_down.astype(given_down.dtype)


_gated_mlp.defvjp(_gated_mlp_forward, _gated_mlp_backward)


def rotary_tables(
    frequencies: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As ``reference.rotary_tables``, out of a loop of two turns, into which XLA fuses nothing.

    Otherwise unrolled layers' cos and sin are computed again for every head of every layer.
    """
    cos, sin = reference.rotary_tables(frequencies, positions)
    both = jax.lax.map(lambda turn: jnp.where(turn, sin, cos), jnp.array([False, True]))
    return both[0], both[1]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """As ``reference.rotate``, its halves padded and added, forward and backward: XLA concatenates
    an element at a time, five times as slowly."""
    shape_checks.check_rotate(x, cos, sin)
    half, wide = x.shape[-1] // 2, x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]

    def put(part: jax.Array, before: int) -> jax.Array:
        last = (before, half - before, 0)
        return jax.lax.pad(part, jnp.float32(0), [(0, 0, 0)] * (part.ndim - 1) + [last])

    turned = put(first * cos - second * sin, 0) + put(second * cos + first * sin, half)
    return turned.astype(x.dtype)


def largest(logits: jax.Array) -> jax.Array:
    """As ``reference.largest``, in two plain reductions: XLA's single one, of pairs, costs ten
    times as much. Of a row with a NaN it is the last index, not the NaN's."""
    vocab = logits.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    top = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(logits == top, index, vocab - 1), axis=-1)
