"""Vocab-parallel parts of sampling: computations over [rows, vocab], the vocabulary whole or split.

Each function takes the mesh ``axes`` over which the vocabulary is split. With axes it is called
inside ``shard_map`` on a device's shard and exchanges a few numbers per row; without, it has the
whole vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels.kernel_sharding import Axes
from hjax.sharding.layout import Layout


def vocab_axes(layout: Layout | None) -> tuple[str, ...]:
    """The mesh axes over which a layout splits the vocabulary."""
    return layout.axes("vocab") if layout is not None else ()


def reduce_over(x: jax.Array, collective: Any, axes: Axes) -> jax.Array:
    """``collective(x, axes)`` where there are axes, else ``x``."""
    return collective(x, axes) if axes else x


def shard_offset(part: jax.Array, axes: Axes) -> jax.Array:
    """Id of the first token of a device's shard [rows, vocab / devices]."""
    return jax.lax.axis_index(axes) * part.shape[-1]


def argmax(logits: jax.Array, here: Any, axes: Axes = ()) -> jax.Array:
    """int32 [rows]: the token of the largest logit, of equals the first (argmax).

    Args:
      logits: float32.
      here: the argmax of a whole vocabulary, as ``KernelSet.argmax``.
      axes: of a split vocabulary.
    """
    token = here(logits)
    if not axes:
        return token
    top = jnp.max(logits, axis=-1)
    ours = top == jax.lax.pmax(top, axes)
    # Some device has it; the others give a number beyond the vocabulary.
    token = jnp.where(ours, token + shard_offset(logits, axes), jnp.iinfo(jnp.int32).max)
    return jax.lax.pmin(token, axes)


def gather_token(tables: list[jax.Array], token: jax.Array, axes: Axes = ()) -> list[jax.Array]:
    """The token's entry of each table [rows, vocab], [rows]."""
    if not axes:
        return [jnp.take_along_axis(x, token[..., None], axis=-1)[..., 0] for x in tables]
    at = token - shard_offset(tables[0], axes)
    own = jnp.arange(tables[0].shape[-1]) == at[..., None]
    found = jnp.stack([jnp.sum(jnp.where(own, x, 0.0), axis=-1) for x in tables])
    return list(jax.lax.psum(found, axes))


def top_tokens(logprobs: jax.Array, count: int, axes: Axes = ()) -> tuple[jax.Array, jax.Array]:
    """int32 and float32 [rows, count]: the tokens of the largest ``logprobs`` [rows, vocab], of
    equals the first, and these, descending; padded with -inf."""
    values, tokens = jax.lax.top_k(logprobs, min(count, logprobs.shape[-1]))
    if axes:
        tokens = tokens + shard_offset(logprobs, axes)
        # In the order of the devices, so that of equals the first still comes first.
        every = [jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (values, tokens)]
        values, where = jax.lax.top_k(every[0], min(count, every[0].shape[-1]))
        tokens = jnp.take_along_axis(every[1], where, axis=-1)
    more = ((0, 0), (0, count - values.shape[-1]))
    return jnp.pad(tokens, more), jnp.pad(values, more, constant_values=-jnp.inf)


def scatter_add(
    table: jax.Array, tokens: jax.Array, values: jax.Array, axes: Axes = ()
) -> jax.Array:
    """``table`` [rows, vocab] with ``values``, [rows, n] or [], added at ``tokens`` [rows, n]; a
    single row of tokens is added to every row of the table.

    Negative tokens, and those of another device's shard, are ignored.
    """
    at = tokens - shard_offset(table, axes) if axes else tokens
    at = jnp.where(at >= 0, at, table.shape[-1])
    return table.at[jnp.arange(table.shape[0])[:, None], at].add(values, mode="drop")


def full_bitmask(rows: int, vocab: int) -> np.ndarray:
    """Bitmasks of rows that allow every token, see ``apply_bitmask``."""
    return np.full((rows, -(-vocab // 32)), 2**32 - 1, np.uint32)


def any_banned(bitmask: jax.Array | None) -> jax.Array:
    """bool []: whether some row does not allow every token."""
    return jnp.asarray(bitmask is not None and jnp.any(bitmask != jnp.uint32(2**32 - 1)))


def apply_bitmask(table: jax.Array, bitmask: jax.Array, axes: Axes = ()) -> jax.Array:
    """``table`` [rows, vocab] with -inf for tokens that a row's bitmask does not allow.

    Args:
      table: float32.
      bitmask: uint32 [rows, vocab / 32, rounded up], of the whole vocabulary: bit i % 32 of
        word i // 32 for token i.
      axes: of a split vocabulary.
    """
    size, begin = table.shape[-1], shard_offset(table, axes) if axes else 0
    if axes:
        # Only the device's shard, which need not begin at a word.
        some = size // 32 + 2
        padded = jnp.pad(bitmask, ((0, 0), (0, some)))
        bitmask = jax.lax.dynamic_slice_in_dim(padded, begin // 32, some, 1)
    bits = (bitmask[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    bits = bits.reshape(bits.shape[0], -1)
    return jnp.where(jax.lax.dynamic_slice_in_dim(bits, begin % 32, size, 1) == 1, table, -jnp.inf)


def sortable_bits(x: jax.Array) -> jax.Array:
    """uint32 in the same order as the float32."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def top_k_threshold(order: jax.Array, top_k: jax.Array | int, axes: Axes = ()) -> jax.Array:
    """uint32 [..., 1]: threshold of the ``top_k`` largest, ties with the last of them included.

    Args:
      order: of ``sortable_bits``.
      top_k: at least 1, for all rows or [..., 1]; if it exceeds the vocabulary the threshold is 0.
      axes: of a split vocabulary.
    """
    ones = jnp.ones(order.shape, jnp.float32)
    return _threshold(order, ones, jnp.asarray(top_k, jnp.float32), axes)


def top_p_threshold(
    order: jax.Array, logits: jax.Array, top_p: jax.Array | float, axes: Axes = ()
) -> jax.Array:
    """uint32 [..., 1]: threshold of the likeliest tokens whose probability reaches ``top_p``.

    Args:
      order: of ``sortable_bits``.
      logits: float32; -inf for tokens that are excluded already, which have no share.
      top_p: above 0, below 1, for all rows or [..., 1].
      axes: of a split vocabulary.
    """
    weights = jnp.exp(logits - reduce_over(jnp.max(logits, -1, keepdims=True), jax.lax.pmax, axes))
    enough = top_p * reduce_over(jnp.sum(weights, -1, keepdims=True), jax.lax.psum, axes)
    return _threshold(order, weights, enough, axes)


def _threshold(order: jax.Array, weights: jax.Array, enough: jax.Array, axes: Axes) -> jax.Array:
    """uint32 [..., 1]: the largest threshold at or above which the weights sum to ``enough``; 0 if
    all together have less.

    Found bit by bit from the highest, without sorting. Over several devices four bits at once, as
    each exchange of sums takes as long as many passes over the weights.
    """
    step = 4 if axes else 1
    candidates = jnp.arange(1, 1 << step, dtype=jnp.uint32)

    def refine(turn: jax.Array, edge: jax.Array) -> jax.Array:
        shift = (32 - step * (turn + 1)).astype(jnp.uint32)
        tried = edge | (candidates << shift)
        sums = jnp.stack(
            [
                jnp.sum(jnp.where(order >= tried[..., i : i + 1], weights, 0.0), axis=-1)
                for i in range(candidates.size)
            ],
            axis=-1,
        )
        held = reduce_over(sums, jax.lax.psum, axes) >= enough
        return edge | (jnp.sum(held, axis=-1, keepdims=True).astype(jnp.uint32) << shift)

    return jax.lax.fori_loop(0, 32 // step, refine, jnp.zeros((*order.shape[:-1], 1), jnp.uint32))
