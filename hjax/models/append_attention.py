"""Append attention: prefill of tokens whose prefix is in the KV cache already, in paged blocks.

``CacheBlocks`` is the block store of the prefix cache: keys and values outlive the sequences that
wrote them. ``AppendAttention`` is the attention strategy for chunked prefill and later turns.

Each row's keys and values are right-aligned: cached tokens first, then the new ones, which end in
the last column. Scores are computed for one chunk of columns at a time, from the last chunk back,
with a running softmax (Milakov & Gimelshein, arXiv 1805.02867), so memory does not grow with the
prefix. Chunks in which no row has a token are skipped. Forward only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from hjax.kernels import int8_cache
from hjax.kernels.attention import MASKED, ScoreOptions
from hjax.kernels.int8_cache import CacheArray, QuantizedCache
from hjax.models.attention_strategies import AttentionInputs, AttentionOutput, KeyValue

BLOCK = 16  # tokens per block, consecutive positions of one sequence
CHUNK = 256  # columns whose scores are computed at a time

Carry = TypeVar("Carry")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CacheBlocks:
    """Paged KV cache: keys and values of all layers in blocks of ``BLOCK`` tokens.

    Attributes:
      k, v: [layers, blocks, kv_heads, BLOCK, head_dim], or a tuple with one array per layer
        [blocks, kv_heads, BLOCK, head_dim]; in int8 each is a ``QuantizedCache``.
      parts: data-parallel parts. Each has an equal share of the rows and of the blocks, and numbers
        its blocks from 0.
    """

    k: Any
    v: Any
    parts: int = dataclasses.field(default=1, metadata={"static": True})

    def gather(self, layer: int | jax.Array, numbers: jax.Array) -> tuple[CacheArray, CacheArray]:
        """Keys and values of one layer, [rows, kv_heads, n * BLOCK, head_dim] each.

        Args:
          layer: its index.
          numbers: int32 [rows, n], block numbers; values at invalid numbers are arbitrary.
        """

        by_part = numbers.reshape(self.parts, -1, numbers.shape[1])

        def joined(_: int, scaled: bool, held: jax.Array) -> jax.Array:
            if unrolled:
                found = jax.vmap(lambda x, at: x[at])(self._split_parts(held, 0), by_part)
            else:
                split = self._split_parts(held, 1)
                found = jax.vmap(lambda x, at: x[layer, at], (1, 0))(split, by_part)
            found = found.swapaxes(-1, -2) if scaled else found
            _, _, count, kv_heads, block, dim = found.shape
            found = found.swapaxes(2, 3)
            found = found.reshape(numbers.shape[0], kv_heads, count * block, dim)
            return found.swapaxes(-1, -2) if scaled else found

        unrolled = isinstance(self.k, tuple)
        pair = (self.k[layer], self.v[layer]) if unrolled else (self.k, self.v)
        return int8_cache.map_arrays(joined, pair[0]), int8_cache.map_arrays(joined, pair[1])

    def scatter(self, new: CacheBlocks, numbers: jax.Array) -> CacheBlocks:
        """The blocks ``numbers`` of all layers replaced; numbers past the last are dropped."""

        at = numbers.reshape(self.parts, -1)

        def put(held: jax.Array, new: jax.Array) -> jax.Array:
            put_in = jax.vmap(lambda x, new, at: x.at[at].set(new, mode="drop"))
            some = self._split_parts(new.astype(held.dtype), 0)
            return put_in(self._split_parts(held, 0), some, at).reshape(held.shape)

        if isinstance(self.k, tuple):
            return jax.tree.map(put, self, new)
        return jax.tree.map(jax.vmap(put), self, new)

    def _split_parts(self, x: jax.Array, axis: int) -> jax.Array:
        """The blocks' dimension split in two: parts, and the blocks of each part."""
        shape = x.shape
        return x.reshape(*shape[:axis], self.parts, shape[axis] // self.parts, *shape[axis + 1 :])


@dataclasses.dataclass(frozen=True)
class AppendAttention:
    """Attention of new tokens to a cached prefix and to each other; its cache is ``CacheBlocks``.

    Each new token sees its row's cached tokens and the new ones before it. The strategy returns the
    rows' keys and values, cached and new, [rows, heads, columns, head_dim], right-aligned.

    Attributes:
      block_table: int32 [rows, n], block numbers of each row in order; BLOCK * n is the number of
        columns, enough for cached and new tokens.
      cached_lengths: int32 [rows], tokens in the blocks, a multiple of BLOCK.
      mask: bool [rows, new], the new tokens, padded on the left.
      copies: of each KV head, as in ``hjax.models.decoding.KVCache``.
    """

    block_table: jax.Array
    cached_lengths: jax.Array
    mask: jax.Array
    copies: int = 1

    @property
    def positions(self) -> jax.Array:
        """int32 [rows, new], each new token's position in its sequence."""
        at = jnp.cumsum(self.mask, axis=-1, dtype=jnp.int32) - 1
        return jnp.maximum(self.cached_lengths[:, None] + at, 0)

    def __call__(self, heads: AttentionInputs, cache: CacheBlocks) -> AttentionOutput:
        layer, q, k, v, scoring, sinks = heads
        tokens = self.cached_lengths + jnp.sum(self.mask, axis=-1, dtype=jnp.int32)
        columns = self.block_table.shape[1] * BLOCK
        begin = columns - tokens
        keys, values = self._assemble(layer, cache, (k, v), begin)

        def widen(held: CacheArray) -> jax.Array:
            return held.dequantized(q.dtype) if isinstance(held, QuantizedCache) else held

        out = chunked_attention(q, widen(keys), widen(values), begin, scoring=scoring, sinks=sinks)
        return out, cache, (keys, values)

    def _assemble(
        self,
        layer: int | jax.Array,
        cache: CacheBlocks,
        pair: tuple[jax.Array, jax.Array],
        begin: jax.Array,
    ) -> KeyValue:
        """Cached and new keys and values, [rows, heads, columns, head_dim]; rows begin in columns
        ``begin``. Chunks of columns in which no row has a token stay zero."""
        columns, new = self.block_table.shape[1] * BLOCK, self.mask.shape[1]
        size = min(CHUNK, columns)
        count = size // BLOCK + 1  # blocks that a chunk may touch
        one_block = cache.gather(layer, self.block_table[:, :1])
        made = [int8_cache.quantize_like(held, x) for held, x in zip(one_block, pair)]

        def chunk(first: jax.Array | int, held: Any) -> Any:
            at = first + jnp.arange(size) - begin[:, None]  # position in the row's sequence
            block = jnp.clip(at[:, :1], 0) // BLOCK
            numbers = jnp.minimum(block + jnp.arange(count), self.block_table.shape[1] - 1)
            past = cache.gather(layer, jnp.take_along_axis(self.block_table, numbers, axis=1))
            cached_index = jnp.clip(at - block * BLOCK, 0, count * BLOCK - 1)[:, None, :, None]
            # New tokens, padding included, fill the last columns.
            new_index = jnp.clip(first + jnp.arange(size) - (columns - new), 0)
            is_cached = (at < self.cached_lengths[:, None])[:, None, :, None]

            def joined(
                axis: int, scaled: bool, held: jax.Array, past: jax.Array, x: jax.Array
            ) -> jax.Array:
                past = past.swapaxes(-1, -2) if scaled else past
                x = x[:, new_index].transpose(0, 2, 1, 3)
                if self.copies > 1:
                    x = jnp.repeat(x, self.copies, axis=1)
                x = jnp.where(is_cached, jnp.take_along_axis(past, cached_index, axis=2), x)
                x = x.swapaxes(-1, -2) if scaled else x
                return jax.lax.dynamic_update_slice_in_dim(held, x, first, axis % held.ndim)

            pairs = zip(held, past, made)
            return tuple(int8_cache.map_arrays(joined, *three) for three in pairs)

        def empty(axis: int, _: bool, x: jax.Array) -> jax.Array:
            shape = list(x.shape)
            shape[axis] = columns
            return jnp.zeros(shape, x.dtype)

        held = tuple(int8_cache.map_arrays(empty, x) for x in one_block)
        return cast(KeyValue, scan_chunks_backwards(columns, begin, size, chunk, held))


def scan_chunks_backwards(
    columns: int,
    begin: jax.Array,
    chunk: int,
    step: Callable[[jax.Array | int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Run ``step(first, carry)`` for each chunk of columns that holds a token, last chunk first.

    Args:
      columns: in total, at least ``chunk``.
      begin: int [rows], each row's first column.
      chunk: columns per step. If it does not divide ``columns``, the chunk at column 0 overlaps the
        one after it.
      step: handles columns ``first`` to ``first + chunk``.
      carry: what the first step gets.
    """
    if columns == chunk:
        return step(0, carry)

    def one(i: jax.Array, carry: Carry) -> Carry:
        return step(jnp.maximum(columns - (i + 1) * chunk, 0), carry)

    filled = columns - jnp.min(begin)
    return jax.lax.fori_loop(0, (filled + chunk - 1) // chunk, one, carry)


def chunked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    begin: jax.Array,
    scoring: ScoreOptions = ScoreOptions(),
    sinks: jax.Array | None = None,
    chunk: int = CHUNK,
) -> jax.Array:
    """Causal attention of the last tokens of rows, with a running softmax over chunks of columns.

    Args:
      q: [rows, new, heads, head_dim], queries of the tokens in the last columns.
      k, v: [rows, kv_heads, columns, head_dim], the new tokens' included.
      begin: int32 [rows], each row's first column.
      scoring, sinks: of the layer, as of ``hjax.models.attention_strategies.AttentionInputs``.
      chunk: columns whose scores are computed at a time.

    Returns:
      an array like q, in its dtype.
    """
    rows, new, heads, dim = q.shape
    kv_heads, columns = k.shape[1:3]
    wide = jnp.float32
    queries = (q * scoring.query_scale(dim)).reshape(rows, new, kv_heads, -1, dim)
    queries = queries.transpose(0, 2, 3, 1, 4)
    size = min(chunk, columns)
    second_start = columns % size  # of the second chunk, if the one at column 0 overlaps it

    def scored(first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        keys, values = (jax.lax.dynamic_slice_in_dim(x, first, size, axis=2) for x in (k, v))
        scores = jnp.einsum("rkgtd,rksd->rkgts", queries, keys, preferred_element_type=wide)
        at = first + jnp.arange(size)
        before = jnp.arange(columns - new, columns)[:, None] - at
        seen = before >= 0
        if scoring.window:
            seen &= before < scoring.window
        seen &= (first > 0) | (at < (second_start or columns))
        seen = seen & (at >= begin[:, None])[:, None]
        return jnp.where(seen[:, None, None], scoring.apply_softcap(scores), MASKED), values

    def step(first: jax.Array | int, carry: tuple) -> tuple:
        top, total, out = carry
        scores, values = scored(first)
        higher = jnp.maximum(top, scores.max(-1))
        weights, less = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        part = jnp.einsum(
            "rkgts,rksd->rkgtd", weights.astype(values.dtype), values, preferred_element_type=wide
        )
        return higher, total * less + weights.sum(-1), out * less[..., None] + part

    top = jnp.full(queries.shape[:-1], MASKED, wide)
    total = jnp.zeros_like(top)
    if sinks is not None:
        sink = sinks.astype(wide).reshape(kv_heads, -1)[None, :, :, None]
        top, total = jnp.broadcast_to(sink, top.shape), jnp.ones_like(top)
    carry = top, total, jnp.zeros(queries.shape, wide)
    _, total, out = scan_chunks_backwards(columns, begin, size, step, carry)
    out = (out / total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(rows, new, heads, dim)
