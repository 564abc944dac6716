"""Prefix cache: keys and values of earlier prompts and answers, reused by prompts that begin alike.

A system prompt, the turns of a conversation, several answers to one question, the chunks of a long
prompt: the keys and values of their whole blocks of tokens are kept beside the engine's slots. A
new prompt is prefilled only from the end of its longest cached prefix. Least recently used blocks
are evicted.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax import machine
from hjax.kernels import cache_axis, int8_cache
from hjax.models.append_attention import BLOCK, CacheBlocks
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.radix_tree import Path, RadixTree
from hjax.rollout.slot_state import CachedPrompts, SlotState
from hjax.sharding.global_arrays import place

# Blocks that one program writes: a small and a large size, called as often as needed.
BLOCKS_PER_WRITE = (8, 64)
# Fewest columns for whole prompts, cached and uncached tokens; each further bucket has four times
# as many. Unfilled columns are not read.
MIN_CACHED_COLUMNS = 512

# Default share of the free memory.
MEMORY_SHARE = 0.25


def bucketed_columns(tokens: int, limit: int, fewest: int = BLOCK, factor: int = 2) -> int:
    """Columns for prompts of this many tokens.

    Args:
      limit: most tokens; rounded up to whole blocks it is the largest result.
      fewest: columns, whole blocks; others are these times a power of ``factor``.
    """
    columns = fewest
    while columns < tokens:
        columns *= factor
    return min(columns, -(-limit // BLOCK) * BLOCK)


@dataclasses.dataclass(frozen=True)
class CachedPrefix:
    """The cached prefix of a prompt.

    Attributes:
      path: numbers of its blocks.
    """

    path: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of cached tokens."""
        return len(self.path) * BLOCK


class PrefixCache:
    """Keys and values of prefixes, for one engine and one set of weights.

    Each data-parallel part has its own cache.

    Args:
      engine: the engine whose rows they come from and go to.
      tokens: capacity of each part.
    """

    def __init__(self, engine: Engine, tokens: int):
        self._engine = engine
        count = max(tokens // BLOCK, 1)
        self._trees = [RadixTree(count, BLOCK) for _ in range(engine.parts)]
        held = engine.block_sharding
        self._store = jax.jit(self._stored, static_argnums=0, donate_argnums=1, out_shardings=held)
        self.blocks = engine.chunked_prefill.empty(count)

    @property
    def capacity(self) -> int:
        """Tokens that a part has room for."""
        return self._trees[0].blocks * BLOCK

    @property
    def used(self) -> int:
        """Tokens that the first part holds."""
        return self._trees[0].used * BLOCK

    def clear(self) -> None:
        """Drop everything: other weights give other keys and values."""
        for tree in self._trees:
            tree.clear()

    def match(self, prompt: Sequence[int], part: int = 0) -> CachedPrefix:
        """The longest cached prefix that leaves a token to prefill; acquired until ``release``."""
        path = tuple(self._trees[part].match(prompt[: len(prompt) - 1]))
        self._trees[part].acquire(path)
        return CachedPrefix(path)

    def release(self, prefix: CachedPrefix, part: int = 0) -> None:
        """Let the blocks of a prefix be evicted again."""
        self._trees[part].release(prefix.path)

    def remove(self, path: Sequence[int], part: int) -> None:
        """Remove the last blocks of a sequence, which nobody else has found."""
        self._trees[part].remove(path)

    def store(self, state: SlotState, sequences: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Store the keys and values that rows of a state have computed.

        Args:
          state: read, not changed; its rows have their prompts among their own tokens.
          sequences: a part, a row of it, and the tokens that it has in its cache, from the
            prompt's first on.
        """
        paths: list[tuple[RadixTree, Path]] = []
        pieces: list[list[tuple[int, int, int]]] = [[] for _ in self._trees]
        for part, row, tokens in sequences:
            path, new = self._trees[part].insert(tokens)
            paths.append((self._trees[part], path))
            old = len(path) - len(new)
            pieces[part] += [(row, (old + i) * BLOCK, number) for i, number in enumerate(new)]
        self._write(state, _tables(pieces, self._trees[0].blocks))
        for tree, path in paths:
            tree.release(path)

    def _write(self, state: SlotState, tables: Iterable[np.ndarray]) -> None:
        engine, cache = self._engine, state.cache
        start = None if engine.row_columns else state.slots.start
        for table in tables:
            given = place(table, engine.layout.sharding("batch"))

            def written(blocks: Any, own: Any, axis: int, given: Any = given) -> Any:
                """An array at a time: one program for all layers."""

                def one(axis: int, scaled: bool, x: Any, b: Any) -> Any:
                    return self._store((axis, scaled), b, x, start, given)

                return int8_cache.map_arrays(one, own, blocks, axis=axis)

            k = written(self.blocks.k, cache.k, cache.key_axis)
            v = written(self.blocks.v, cache.v, cache_axis.ROWS)
            self.blocks = CacheBlocks(k, v, self.blocks.parts)

    def precompile_store(self, state: SlotState) -> None:
        """Compile what ``store`` calls for such a state; nothing is stored."""
        nowhere = self._trees[0].blocks
        for count in BLOCKS_PER_WRITE:
            pieces = [[(0, 0, nowhere)] * count for _ in self._trees]
            self._write(state, _tables(pieces, nowhere))

    def precompile_prefill(self, params: Weights, chunk: int, limit: int) -> None:
        """Compile what ``prefill_chunk`` calls, with the same arguments; nothing is stored."""
        for columns in cached_column_sizes(limit):
            if columns >= chunk:
                self._prefill_chunk(params, {}, chunk, columns)

    def prefill_chunk(
        self, params: Weights, prompts: Sequence[Sequence[int] | None], chunk: int, limit: int
    ) -> bool:
        """Prefill the next chunk of a prompt in each part, and store it.

        Args:
          params: in the generate layout.
          prompts: by part, each with at least a block and a token that are not cached; None: none
            in this part.
          chunk: most tokens, a multiple of BLOCK.
          limit: most tokens of a prompt.

        Returns:
          whether there was room for it; else nothing is read.
        """
        pieces: dict[int, tuple[Sequence[int], Path, Path]] = {}
        longest = chunk
        for part, (tree, prompt) in enumerate(zip(self._trees, prompts, strict=True)):
            if prompt is None:
                continue
            known = tree.match(prompt[: len(prompt) - 1])
            end = min(len(known) * BLOCK + chunk, (len(prompt) - 1) // BLOCK * BLOCK)
            path, new = tree.insert(prompt[:end])
            tree.release(path)
            if len(path) * BLOCK < end:
                # These blocks will not be filled, so nobody may find them.
                tree.remove(new)
                return False
            longest, pieces[part] = max(longest, end), (prompt[:end], known, new)
        self._prefill_chunk(params, pieces, chunk, cached_columns(longest, limit))
        return True

    def _prefill_chunk(
        self,
        params: Weights,
        pieces: dict[int, tuple[Sequence[int], Path, Path]],
        chunk: int,
        columns: int,
    ) -> None:
        """``pieces``, by part: tokens up to the chunk's end, cached blocks, and blocks to fill.
        ``columns``: for all tokens of each."""
        parts = range(len(self._trees))
        whole = [pieces[part][0] if part in pieces else () for part in parts]
        known = [CachedPrefix(tuple(pieces[part][1]) if part in pieces else ()) for part in parts]
        # A number beyond all blocks drops the block.
        where = np.full((len(parts), chunk // BLOCK), np.iinfo(np.int32).max, np.int32)
        for part, (_, _, new) in pieces.items():
            where[part, -len(new) :] = new
        tokens, mask, _ = uncached_tokens(whole, known, chunk, 0)
        numbers = block_table(known, columns)
        prefill = self._engine.chunked_prefill.prefill
        self.blocks = prefill(params, self.blocks, tokens, mask, numbers, where)

    # Programs

    def _stored(
        self,
        kind: tuple[int, bool],
        blocks: jax.Array,
        own: jax.Array,
        start: jax.Array | None,
        pieces: jax.Array,
    ) -> jax.Array:
        """An array of blocks with tokens of an array of a state's cache written in.

        ``kind``: the axis that has tokens, and whether the array has scales. ``start``: int32
        [rows], each row's first column; None: 0. ``pieces``: int32 [parts, 3, n]: source row, first
        token in it, target block, numbered within the part.
        """
        axis, scaled = kind
        parts = len(self._trees)

        def of_parts(x: jax.Array) -> jax.Array:
            return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

        def put(held: jax.Array, own: jax.Array, start: jax.Array, pieces: jax.Array) -> jax.Array:
            """Blocks of a part with tokens of its rows, [n, kv_heads, BLOCK, head_dim]."""
            row, first, where = pieces
            row = row[:, None]
            at = first[:, None] + jnp.arange(BLOCK) + start[row]
            sample = (0,) if self._engine.uses_kernel else ()  # it has a dimension for samples
            tokens = cache_axis.token_index(axis, at)
            found = own.at[(row, slice(None), *sample, *tokens)].get(mode="clip")
            found = found.swapaxes(1, 2)
            found = found.swapaxes(-1, -2) if scaled else found
            return held.at[where].set(found.astype(held.dtype), mode="drop")

        def written(held: jax.Array, own: jax.Array) -> jax.Array:
            begins = jnp.zeros(own.shape[0], jnp.int32) if start is None else start
            made = jax.vmap(put)(of_parts(held), of_parts(own), of_parts(begins), pieces)
            return made.reshape(held.shape)

        return jax.vmap(written)(blocks, own) if self._engine.stacked else written(blocks, own)


def cached_prompts(
    prompts: Sequence[Sequence[int]], found: Sequence[CachedPrefix], columns: int
) -> CachedPrompts:
    """The cached part of prompts, as ``Engine.admit`` takes it.

    Args:
      prompts: all tokens of each.
      found: the cached prefix of each.
      columns: for the longest of them.
    """
    tokens = np.zeros((len(prompts), columns), np.int32)
    mask = np.zeros(tokens.shape, bool)
    for i, prompt in enumerate(prompts):
        if len(prompt):
            tokens[i, -len(prompt) :], mask[i, -len(prompt) :] = prompt, True
    blocks, count = block_table(found, columns)
    return CachedPrompts(tokens, mask, blocks, count)


def uncached_tokens(
    prompts: Sequence[Sequence[int]], found: Sequence[CachedPrefix], columns: int, known: int
) -> tuple[np.ndarray, np.ndarray, CachedPrompts | None]:
    """Prompts as ``Admission`` has them: their uncached tokens, and what is cached.

    Args:
      prompts: all tokens of each; none for a padding entry.
      found: the cached prefix of each.
      columns: for the uncached tokens of the longest.
      known: columns for the longest with its cached tokens; 0: there is no cache.

    Returns:
      int32 and bool [prompts, columns], the tokens to prefill and their mask; and what is cached.
    """
    tokens = np.zeros((len(prompts), columns), np.int32)
    rest = [prompt[one.tokens :] for prompt, one in zip(prompts, found, strict=True)]
    # A padding entry has a token too.
    mask = np.arange(columns) >= columns - np.array([[max(len(own), 1)] for own in rest])
    for row, own in zip(tokens, rest, strict=True):
        row[columns - len(own) :] = own
    return tokens, mask, cached_prompts(prompts, found, known) if known else None


def text_table(rows: Sequence[Sequence[int]], room: int) -> np.ndarray | None:
    """int32 [rows, room], texts in which prompt lookup searches; None without room."""
    if not room:
        return None
    made = np.zeros((len(rows), room), np.int32)
    for text, tokens in zip(made, rows, strict=True):
        text[: len(tokens)] = tokens
    return made


def block_table(found: Sequence[CachedPrefix], columns: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [prefixes, columns / BLOCK], blocks of each, and int32 [prefixes], its tokens."""
    numbers = np.zeros((len(found), columns // BLOCK), np.int32)
    for i, one in enumerate(found):
        numbers[i, : len(one.path)] = one.path
    return numbers, np.array([one.tokens for one in found], np.int32)


def cached_column_sizes(limit: int) -> list[int]:
    """All values of ``cached_columns``, ascending."""
    made = [cached_columns(1, limit)]
    while (more := cached_columns(made[-1] + 1, limit)) > made[-1]:
        made.append(more)
    return made


def cached_columns(tokens: int, limit: int) -> int:
    """Columns for whole prompts of this many tokens, up to ``limit``: few sizes, few programs."""
    return bucketed_columns(tokens, limit, MIN_CACHED_COLUMNS, 4)


def affordable_tokens(engine: Engine, tokens: int) -> int:
    """``tokens``, or as many as a share of the first device's free memory holds."""
    config = engine.network.config
    heads = -(-config.kv_heads * engine.copies // engine.layout.shard_count("kv_heads"))
    element = int8_cache.element_bytes(engine.kv_dtype, config.head_dim)
    token = round(2 * config.layers * heads * config.head_dim * element)
    free = machine.free_bytes(engine.layout.mesh.devices.flat[0])
    return min(tokens, int(MEMORY_SHARE * free) // token) // BLOCK * BLOCK


def why_no_blocks(engine: Engine) -> str:
    """Why an engine can never keep prefixes in blocks; empty: it can."""
    if engine.layout.shard_count("layers") > 1:
        return "prompts pass pipeline stages whole"
    if engine.network.config.rope_depends_on_length:
        return "this model's rotary positions depend on a sequence's length"
    return ""


def _tables(pieces: list[list[tuple[int, int, int]]], nowhere: int) -> Iterator[np.ndarray]:
    """int32 [parts, 3, n] of each part's pieces, n one of ``BLOCKS_PER_WRITE``; padding entries are
    dropped."""
    few, many = BLOCKS_PER_WRITE
    for at in range(0, max(map(len, pieces)), many):
        some = [of_part[at : at + many] for of_part in pieces]
        most = max(map(len, some))
        table = np.zeros((len(pieces), 3, few if most <= few else many), np.int32)
        table[:, 2] = nowhere
        for own, found in zip(table, some, strict=True):
            own[:, : len(found)] = np.array(found, np.int32).reshape(-1, 3).T
        yield table
