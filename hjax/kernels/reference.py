"""Reference kernels: the parts of a layer, written like their mathematics.

Arrays in, arrays out; differentiable in forward and reverse mode, any number of times. Other
kernel sets compute the same faster and are tested against these.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hjax.kernels import shape_checks

GATES = "gate_up"  # of an MLP's first products, for rematerialisation policies


def product(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """``einsum(spec, x, weight)`` in the dtype of x.

    Args:
      spec: such as ``btd,dhe->bthe``: x's first two dimensions stay, all others are contracted.
      x: [batch, length, ...].
      weight: [..., output dimensions], of any float dtype.

    Returns:
      [batch, length, output dimensions].
    """
    shape_checks.check_product(spec, x, weight)
    return jnp.einsum(spec, x, weight.astype(x.dtype))


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """``(silu(x gate) * (x up)) down``, [batch, length, embed] in the dtype of x (Shazeer 2020,
    arXiv 2002.05202).

    Args:
      x: [batch, length, embed].
      gate_up: [embed, 2, mlp], gate and up.
      down: [mlp, embed].
    """
    shape_checks.check_gated_mlp(x, gate_up, down)
    both = checkpoint_name(jnp.einsum("btd,dcm->btcm", x, gate_up.astype(x.dtype)), GATES)
    inner = jax.nn.silu(both[:, :, 0]) * both[:, :, 1]
    return jnp.einsum("btm,md->btd", inner, down.astype(x.dtype))


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """``weight * x / sqrt(mean(x**2) + epsilon)`` over the last dimension (Zhang and Sennrich
    2019, arXiv 1910.07467), computed in float32.

    Args:
      x: [..., embed].
      weight: [embed].
      epsilon: above 0.

    Returns:
      [..., embed] in the dtype of x.
    """
    shape_checks.check_rms_norm(x, weight)
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def rotary_tables(frequencies: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position times frequency, each float32 [..., 1, head_dim / 2].

    Args:
      frequencies: float32 [head_dim / 2], radians per position.
      positions: int [...].
    """
    shape_checks.check_rotary_tables(frequencies, positions)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding (RoPE; Su et al. 2021, arXiv 2104.09864) of two halves, as in transformers:
    ``[a cos - b sin, b cos + a sin]`` of ``x = [a, b]``, computed in float32.

    Args:
      x: [batch, length, heads, head_dim].
      cos, sin: float32 [batch, length, 1, head_dim / 2].

    Returns:
      like x, in its dtype.
    """
    shape_checks.check_rotate(x, cos, sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def argmax(logits: jax.Array) -> jax.Array:
    """int32 [...]: index of the largest of [..., vocab]; the first one on ties."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.custom_vjp
def add_gradient_to(weights: jax.Array, before: jax.Array) -> jax.Array:
    """The weights; their gradient is added to ``before``, the sum of earlier micro-batches."""
    return weights


add_gradient_to.defvjp(
    lambda weights, before: (weights, before), lambda before, given: (before + given, None)
)


class GroupFill(NamedTuple):
    """Expected sizes of groups, for tiling and cost estimates; results do not depend on it.

    Attributes:
      fraction: of the rows that are expected to be in a group, 0 to 1.
      multiple: every group has a multiple of this many rows.
    """

    fraction: float = 1.0
    multiple: int = 1


def row_multiple(count: int, weights: jax.Array, share: float) -> int:
    """The multiple of rows to which groups of ``grouped_product`` should be padded; 1: none.

    Args:
      count: of rows.
      weights: [groups, inputs, outputs], of their products.
      share: fraction of the rows that are expected to be in a group before padding.
    """
    return 1


def padded_fill(count: int, groups: int, share: float, multiple: int) -> GroupFill:
    """The fill of ``count`` rows, a fraction ``share`` of them in groups, after padding each group
    to a multiple: by half of one on average."""
    more = groups * multiple / 2 if multiple > 1 else 0
    return GroupFill(min(share + more / count, 1.0), multiple)


def grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: jax.Array | None = None,
) -> jax.Array:
    """Each group of rows times its own matrix; [rows, outputs] in the dtype of the rows.

    Args:
      rows: [rows, inputs], group by group; results of rows after the last group are undefined.
      weights: [groups, inputs, outputs], in the dtype of the rows; or int8 or float8_e4m3fn, which
        have no gradients.
      sizes: int32 [groups], rows of each.
      fill: expected sizes.
      before: like weights; their gradient is added to it (``add_gradient_to``). None: to nothing.
    """
    shape_checks.check_grouped(rows, weights, sizes)
    if before is not None:
        weights = add_gradient_to(weights, before)
    if weights.dtype.itemsize == 1:
        weights = jax.lax.stop_gradient(weights).astype(rows.dtype)
    return jax.lax.ragged_dot(rows, weights, sizes)
