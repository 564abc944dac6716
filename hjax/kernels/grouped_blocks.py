"""Grouped matrix products (of experts), one block of rows at a time, in plain JAX.

Without a kernel (CPUs and GPUs, jax 0.10) ``jax.lax.ragged_dot`` is a dense product for each group:
groups times the work, and an array of rows by groups by inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hjax.kernels import reference, shape_checks
from hjax.kernels.reference import GroupFill

_ROWS = (512, 256, 128, 64, 32, 16, 8)  # of a block, largest first


def product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    fill: GroupFill = GroupFill(),
    before: jax.Array | None = None,
) -> jax.Array:
    """``hjax.kernels.reference.grouped_product``, whose arguments these are."""
    shape_checks.check_grouped(rows, weights, sizes)
    if before is not None:
        weights = reference.add_gradient_to(weights, before)
    each = rows.shape[0] * fill.fraction / weights.shape[0]
    block = next((rows for rows in _ROWS if each >= 2 * rows), _ROWS[-1])
    return _product(rows, weights, sizes, block, fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _product(
    rows: jax.Array, weights: jax.Array, sizes: jax.Array, block: int, fill: GroupFill
) -> jax.Array:
    return _grouped_product(rows, weights, sizes, block, fill, transposed=False)


def _forward(*arguments: Any) -> tuple[jax.Array, Any]:
    return _product(*arguments), arguments[:3]


def _backward(block: int, fill: GroupFill, kept: Any, d_out: jax.Array) -> Any:
    rows, weights, sizes = kept
    d_rows = _grouped_product(d_out, weights, sizes, block, fill, transposed=True)
    if weights.dtype.itemsize == 1:
        return d_rows, None, None
    x, g = (jnp.pad(part, ((0, block), (0, 0))) for part in (rows, d_out))

    def add(group: jax.Array, start: jax.Array, count: jax.Array, sums: jax.Array) -> jax.Array:
        left = jax.lax.dynamic_slice_in_dim(x, start, block)
        left = jnp.where(jnp.arange(block)[:, None] < count, left, 0)
        right = jax.lax.dynamic_slice_in_dim(g, start, block)
        right = jnp.where(jnp.arange(block)[:, None] < count, right, 0)
        made = jnp.einsum("ri,ro->io", left, right, preferred_element_type=jnp.float32)
        held = jax.lax.dynamic_index_in_dim(sums, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, held + made, group, 0)

    sums = _each_block(add, jnp.zeros(weights.shape, jnp.float32), sizes, rows, block, fill)
    return d_rows, sums.astype(weights.dtype), None


_product.defvjp(_forward, _backward)


def _grouped_product(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    block: int,
    fill: GroupFill,
    transposed: bool,
) -> jax.Array:
    padded = jnp.pad(rows, ((0, block), (0, 0)))

    def put(group: jax.Array, start: jax.Array, count: jax.Array, out: jax.Array) -> jax.Array:
        # Rows that it writes beyond its group are overwritten by the next groups.
        x = jax.lax.dynamic_slice_in_dim(padded, start, block)
        weight = jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)
        made = jnp.einsum("ro,io->ri" if transposed else "ri,io->ro", x, weight.astype(rows.dtype))
        return jax.lax.dynamic_update_slice_in_dim(out, made, start, 0)

    out = jnp.zeros((padded.shape[0], weights.shape[1 if transposed else 2]), rows.dtype)
    return _each_block(put, out, sizes, rows, block, fill)[: rows.shape[0]]


def _each_block(
    run: Callable[..., jax.Array],
    state: jax.Array,
    sizes: jax.Array,
    rows: jax.Array,
    block: int,
    fill: GroupFill,
) -> jax.Array:
    """``state`` after ``run(group, first row, rows left in the group, state)`` for every block, in
    row order; a group's last block may extend beyond it."""
    ends, blocks = jnp.cumsum(sizes), -(-sizes // block)
    until = jnp.cumsum(blocks)

    def run_block(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, state = carry
        group = jnp.searchsorted(until, number, side="right", method="compare_all")
        start = (ends - sizes)[group] + (number - (until - blocks)[group]) * block
        return number + 1, run(group, start, ends[group] - start, state)

    # With groups of different sizes half of each group's last block is empty on average.
    empty = 0 if fill.multiple % block == 0 else sizes.shape[0] / 2
    expected = round(rows.shape[0] * fill.fraction / block + empty) or 1
    with jax.named_scope(f"trips:{expected}"):
        return jax.lax.while_loop(lambda c: c[0] < until[-1], run_block, (jnp.int32(0), state))[1]
