"""Prefill that begins where earlier work ended: keys and values in blocks, and what reads them.

``CacheBlocks`` holds tokens' keys and values after the sequences that wrote them are gone;
``AppendAttention``
is the attention strategy of tokens whose beginning is there: a prompt's next chunk, a turn.

Keys and values of a row end in its last column, known ones first, the new ones after them. Scores
are held for a piece of the columns at a time, from the last on, so memory does not grow with what
is known (the running softmax of Milakov & Gimelshein, arXiv 1805.02867); pieces in which no row has
a token are not looked at. Forward alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from hjax.kernels import int8_cache
from hjax.kernels.attention import MASKED, ScoreOptions
from hjax.kernels.int8_cache import Held, QuantizedCache
from hjax.models.attention_strategies import AttentionInputs, KeyValue

BLOCK = 16  # tokens of a block, of consecutive positions of one sequence
CHUNK = 256  # columns whose scores are held at a time

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheBlocks:
    """Keys and values in blocks.

    Attributes:
      k, v: [layers, blocks, kv_heads, BLOCK, head_dim], or a tuple with one array per layer
        [blocks, kv_heads, BLOCK, head_dim]; in int8 a ``QuantizedCache`` for each.
      parts: data-parallel parts, each with as many of the blocks, numbered from 0, and of the rows.
    """

    k: Any
    v: Any
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def rows(self, layer: int | jax.Array, numbers: jax.Array) -> tuple[Held, Held]:
        """Keys and values of one layer, [rows, kv_heads, n * BLOCK, head_dim] each.

        Args:
          layer: which.
          numbers: int32 [rows, n], of blocks; anything stands where a number is none.
        """

        cut = numbers.reshape(self.parts, -1, numbers.shape[1])

        def joined(_: int, scaled: bool, held: jax.Array) -> jax.Array:
            if unrolled:
                found = jax.vmap(lambda x, at: x[at])(self._cut(held, 0), cut)
            else:
                found = jax.vmap(lambda x, at: x[layer, at], (1, 0))(self._cut(held, 1), cut)
            found = found.swapaxes(-1, -2) if scaled else found
            _, _, count, kv_heads, block, dim = found.shape
            found = found.swapaxes(2, 3)
            found = found.reshape(numbers.shape[0], kv_heads, count * block, dim)
            return found.swapaxes(-1, -2) if scaled else found

        unrolled = isinstance(self.k, tuple)
        pair = (self.k[layer], self.v[layer]) if unrolled else (self.k, self.v)
        return int8_cache.each(joined, pair[0]), int8_cache.each(joined, pair[1])

    def with_rows(self, new: CacheBlocks, numbers: jax.Array) -> CacheBlocks:
        """The same with other blocks, of all layers, at ``numbers``; those beyond are dropped."""

        at = numbers.reshape(self.parts, -1)

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            put_in = jax.vmap(lambda x, new, at: x.at[at].set(new, mode="drop"))
            some = self._cut(new.astype(held.dtype), 0)
            return put_in(self._cut(held, 0), some, at).reshape(held.shape)

        if isinstance(self.k, tuple):
            return jax.tree.map(put, self, new)
        return jax.tree.map(jax.vmap(put), self, new)

    def _cut(self, x: jax.Array, axis: int) -> jax.Array:
        """With the blocks' dimension cut in two: parts, and the blocks of each."""
        shape = x.shape
        return x.reshape(*shape[:axis], self.parts, shape[axis] // self.parts, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class AppendAttention:
    """New tokens of rows whose first ones are in blocks; the strategy's cache is the
    ``CacheBlocks``.

    Each new token sees what is known of its row and the new ones before it. Kept are the rows'
    keys and values [rows, heads, columns, head_dim], known and new, which end in the last column.

    Attributes:
      blocks: int32 [rows, n], numbers of the blocks of each row, first ones first; BLOCK * n are
        the columns, enough for what is known and what is new.
      known: int32 [rows], tokens that the blocks have, whole blocks.
      mask: bool [rows, new], of the new tokens, padded on the left.
      copies: of each key-value head, as in ``hjax.models.decoding.KVCache``.
    """

    blocks: jax.Array
    known: jax.Array
    mask: jax.Array
    copies: int = 1

    @property
    def positions(self) -> jax.Array:
        """int32 [rows, new], of each token in its sequence."""
        at = jnp.cumsum(self.mask, axis=-1, dtype=jnp.int32) - 1
        return jnp.maximum(self.known[:, None] + at, 0)

    def __call__(
        self, heads: AttentionInputs, cache: CacheBlocks
    ) -> tuple[jax.Array, CacheBlocks, KeyValue | None]:
        layer, q, k, v, scoring, sinks = heads
        tokens = self.known + jnp.sum(self.mask, axis=-1, dtype=jnp.int32)
        columns = self.blocks.shape[1] * BLOCK
        begin = columns - tokens
        keys, values = self._joined(layer, cache, (k, v), begin)

        def widened(held: Held) -> jax.Array:
            return held.widened(q.dtype) if isinstance(held, QuantizedCache) else held

        out = chunked_attention(
            q, widened(keys), widened(values), begin, scoring=scoring, sinks=sinks
        )
        return out, cache, (keys, values)

    def _joined(
        self,
        layer: int | jax.Array,
        cache: CacheBlocks,
        pair: tuple[jax.Array, jax.Array],
        begin: jax.Array,
    ) -> KeyValue:
        """Keys and values [rows, heads, columns, head_dim] of rows that begin in columns ``begin``;
        pieces of columns in which none has a token stay zero."""
        columns, new = self.blocks.shape[1] * BLOCK, self.mask.shape[1]
        size = min(CHUNK, columns)
        count = size // BLOCK + 1  # blocks that a piece may touch
        of_layer = cache.rows(layer, self.blocks[:, :1])
        made = [int8_cache.like(held, x) for held, x in zip(of_layer, pair)]

        def piece(first: jax.Array | int, held: Any) -> Any:
            at = first + jnp.arange(size) - begin[:, None]  # in the row's sequence
            block = jnp.clip(at[:, :1], 0) // BLOCK
            numbers = jnp.minimum(block + jnp.arange(count), self.blocks.shape[1] - 1)
            past = cache.rows(layer, jnp.take_along_axis(self.blocks, numbers, axis=1))
            from_past = jnp.clip(at - block * BLOCK, 0, count * BLOCK - 1)[:, None, :, None]
            # New tokens are in the last columns as they are.
            from_new = jnp.clip(first + jnp.arange(size) - (columns - new), 0)
            is_past = (at < self.known[:, None])[:, None, :, None]

            def joined(
                axis: int, scaled: bool, held: jax.Array, past: jax.Array, x: jax.Array
            ) -> jax.Array:
                past = past.swapaxes(-1, -2) if scaled else past
                x = x[:, from_new].transpose(0, 2, 1, 3)
                if self.copies > 1:
                    x = jnp.repeat(x, self.copies, axis=1)
                x = jnp.where(is_past, jnp.take_along_axis(past, from_past, axis=2), x)
                x = x.swapaxes(-1, -2) if scaled else x
                return jax.lax.dynamic_update_slice_in_dim(held, x, first, axis % held.ndim)

            pairs = zip(held, past, made)
            return tuple(int8_cache.each(joined, *three) for three in pairs)

        def room(axis: int, _: bool, x: jax.Array) -> jax.Array:
            shape = list(x.shape)
            shape[axis] = columns
            return jnp.zeros(shape, x.dtype)

        held = tuple(int8_cache.each(room, x) for x in of_layer)
        found = scan_chunks_backwards(columns, begin, size, piece, held)
        return cast(KeyValue, found)


def scan_chunks_backwards(
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


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    begin: jax.Array,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    piece: int = CHUNK,
) -> jax.Array:
    """Each new token sees its row's columns up to its own.

    Args:
      q: [rows, new, heads, head_dim], of the tokens in the last columns.
      k, v: [rows, kv_heads, columns, head_dim], with the new tokens'.
      begin: int32 [rows], each row's first column.
      scoring, sinks: of the layer, as ``hjax.models.attention_strategies.Attention`` says.
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
    _, total, out = scan_chunks_backwards(columns, begin, size, step, carry)
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, new, heads, dim)
