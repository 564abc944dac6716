"""Attention of some new tokens per row after those that are known: a prompt's next chunk, a turn.

Keys and values of a row end in its last column, known ones first, the new ones after them. Scores
are held for a piece of the columns at a time, from the last on, so memory does not grow with what
is known (the running softmax of Milakov & Gimelshein, arXiv 1805.02867); pieces in which no row has
a token are not looked at. Forward alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from hjax.kernels.attention import MASKED, Scoring

PIECE = 256  # columns whose scores are held at a time

Carry = TypeVar("Carry")


def from_the_last(
    columns: int,
    begin: jax.Array,
    piece: int,
    step: Callable[[jax.Array | int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """``step(first, carry)`` of every piece of columns that a row has a token in, from the last
    piece on.

    Args:
      columns: of all, at least a piece.
      begin: int [rows], each row's first column.
      piece: columns of one; what is left over is the beginning of a first piece that takes some of
        the next one's along.
      step: of columns ``first`` to ``first + piece``.
      carry: of the first step.
    """
    if columns == piece:
        return step(0, carry)

    def one(i: jax.Array, carry: Carry) -> Carry:
        return step(jnp.maximum(columns - (i + 1) * piece, 0), carry)

    filled = columns - jnp.min(begin)
    return jax.lax.fori_loop(0, (filled + piece - 1) // piece, one, carry)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    begin: jax.Array,
    scoring: Scoring = Scoring(),
    sinks: jax.Array | None = None,
    piece: int = PIECE,
) -> jax.Array:
    """Each new token sees its row's columns up to its own.

    Args:
      q: [rows, new, heads, head_dim], of the tokens in the last columns.
      k, v: [rows, kv_heads, columns, head_dim], with the new tokens'.
      begin: int32 [rows], each row's first column.
      scoring, sinks: of the layer, as ``hjax.models.attention.Attention`` says.
      piece: columns whose scores are held at a time.

    Returns:
      like q, in its dtype.
    """
    rows, new, heads, dim = q.shape
    kv_heads, columns = k.shape[1:3]
    wide = jnp.float32
    asked = (q * scoring.factor(dim)).reshape(rows, new, kv_heads, -1, dim)
    asked = asked.transpose(0, 2, 3, 1, 4)
    size = min(piece, columns)
    after = columns % size  # where the second piece begins, if the first one takes some of it along

    def scored(first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        keys, values = (jax.lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in (k, v))
        scores = jnp.einsum("rkgtd,rksd->rkgts", asked, keys, preferred_element_type=wide)
        at = first + jnp.arange(size)
        before = jnp.arange(columns - new, columns)[:, None] - at
        seen = before >= 0
        if scoring.window:
            seen &= before < scoring.window
        seen &= (first > 0) | (at < (after or columns))
        seen = seen & (at >= begin[:, None])[:, None]
        return jnp.where(seen[:, None, None], scoring.bend(scores), MASKED), values

    def step(first: jax.Array | int, carry: tuple) -> tuple:
        top, total, out = carry
        scores, values = scored(first)
        higher = jnp.maximum(top, scores.max(-1))
        weights, less = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum(
            "rkgts,rksd->rkgtd", weights.astype(values.dtype), values, preferred_element_type=wide
        )
        return higher, total * less + weights.sum(-1), out * less[..., None] + part

    top = jnp.full(asked.shape[:-1], MASKED, wide)
    total = jnp.zeros_like(top)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(kv_heads, -1)[None, :, :, None]
        top, total = jnp.broadcast_to(sink, top.shape), jnp.ones_like(top)
    carry = top, total, jnp.zeros(asked.shape, wide)
    _, total, out = from_the_last(columns, begin, size, step, carry)
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, new, heads, dim)
