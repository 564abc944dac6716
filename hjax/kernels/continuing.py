"""Attention of some new tokens per row after those that are known: a prompt's next chunk, a turn.

Keys and values of a row end in its last column, known ones first, the new ones after them. Scores
are held for a piece of the columns at a time, so memory does not grow with what is known (the
running softmax of Milakov & Gimelshein, arXiv 1805.02867). Forward alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hjax.kernels.attention import MASKED, Scoring

PIECE = 1024  # columns whose scores are held at a time


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
    pieces = -(-columns // piece)
    if pieces > 1 and columns % piece:
        sides = [(0, 0), (0, 0), (0, pieces * piece - columns), (0, 0)]
        k, v = jnp.pad(k, sides), jnp.pad(v, sides)
    size = columns if pieces == 1 else piece

    def scored(first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        keys, values = (jax.lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in (k, v))
        scores = jnp.einsum("rkgtd,rksd->rkgts", asked, keys, preferred_element_type=wide)
        at = first + jnp.arange(size)
        before = jnp.arange(columns - new, columns)[:, None] - at
        seen = before >= 0
        if scoring.window:
            seen &= before < scoring.window
        seen = seen & (at >= begin[:, None])[:, None]
        return jnp.where(seen[:, None, None], scoring.bend(scores), MASKED), values

    def step(carry: tuple, first: jax.Array | int) -> tuple[tuple, None]:
        top, total, out = carry
        scores, values = scored(first)
        higher = jnp.maximum(top, scores.max(-1))
        weights, less = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum(
            "rkgts,rksd->rkgtd", weights.astype(values.dtype), values, preferred_element_type=wide
        )
        return (higher, total * less + weights.sum(-1), out * less[..., None] + part), None

    top = jnp.full(asked.shape[:-1], MASKED, wide)
    total = jnp.zeros_like(top)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(kv_heads, -1)[None, :, :, None]
        top, total = jnp.broadcast_to(sink, top.shape), jnp.ones_like(top)
    carry = top, total, jnp.zeros(asked.shape, wide)
    if pieces == 1:
        carry, _ = step(carry, 0)
    else:
        carry, _ = jax.lax.scan(step, carry, jnp.arange(pieces) * piece)
    _, total, out = carry
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, new, heads, dim)
