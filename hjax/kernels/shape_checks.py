"""Shape and dtype checks of kernels, at trace time, so they cost nothing at run time.

Every kernel set calls them, so all of them refuse a wrong shape alike, with an AssertionError that
names it, instead of broadcasting it.
"""

import chex
import jax
import jax.numpy as jnp


def check_product(spec: str, x: jax.Array, weight: jax.Array) -> None:
    """x [batch, length, ...], weight [..., outputs]: x's dimensions after the length are summed."""
    left, right, out = spec.replace("->", ",").split(",")
    chex.assert_rank((x, weight), (len(left), len(right)))
    if right != left[2:] + out[2:] or left[:2] != out[:2]:
        raise AssertionError(f"{spec!r} does not sum over all dimensions of x after the length")
    chex.assert_equal(weight.shape[: x.ndim - 2], x.shape[2:])


def check_gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> None:
    """x [batch, length, embed], gate_up [embed, 2, mlp], down [mlp, embed]."""
    chex.assert_rank((x, gate_up, down), (3, 3, 2))
    embed, mlp = x.shape[-1], down.shape[0]
    chex.assert_shape(gate_up, (embed, 2, mlp))
    chex.assert_shape(down, (mlp, embed))


def check_rms_norm(x: jax.Array, weight: jax.Array) -> None:
    """x [..., embed], weight [embed]."""
    chex.assert_shape(weight, x.shape[-1:])


def check_rotary_tables(frequencies: jax.Array, positions: jax.Array) -> None:
    """frequencies float32 [head_dim / 2], positions int [...]."""
    chex.assert_rank(frequencies, 1)
    chex.assert_type((frequencies, positions), (jnp.float32, int))


def check_rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
    """x [batch, length, heads, head_dim], cos and sin float32 [batch, length, 1, head_dim / 2]."""
    chex.assert_rank(x, 4)
    batch, length, _, head_dim = x.shape
    chex.assert_shape((cos, sin), (batch, length, 1, head_dim // 2))
    chex.assert_type((cos, sin), jnp.float32)


def check_grouped(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> None:
    """rows [rows, inputs], weights [groups, inputs, outputs] of the same dtype or of one byte per
    element, sizes int32 [groups]."""
    chex.assert_rank((rows, weights, sizes), (2, 3, 1))
    chex.assert_shape(weights, (sizes.shape[0], rows.shape[1], None))
    chex.assert_type(sizes, jnp.int32)
    if weights.dtype.itemsize > 1:
        chex.assert_trees_all_equal_dtypes(rows, weights)
