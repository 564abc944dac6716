"""Chunked prefill: long prompts are read in chunks, into blocks of keys and values.

Each data-parallel part reads a chunk of its own into blocks of its own, so parts exchange nothing.
``hjax.rollout.prefix_cache`` decides which blocks a service keeps, ``hjax.rollout.prefix_sharing``
which ones a rollout keeps.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels import int8_cache
from hjax.models.append_attention import BLOCK, AppendAttention, CacheBlocks
from hjax.models.decoding import keys_and_values
from hjax.models.parameters import Weights
from hjax.sharding.global_arrays import place


class ChunkedPrefill:
    """The chunked-prefill programs of one engine.

    Args:
      engine: an ``Engine``.
    """

    def __init__(self, engine: Any):
        self._engine, self._layout = engine, engine.layout
        self._sharding, self._parts = engine.block_sharding, engine.layout.shard_count("batch")
        self._empty = jax.jit(self._zeros, static_argnums=0, out_shardings=self._sharding)
        self._prefill = jax.jit(
            self._prefill_program, donate_argnums=1, out_shardings=self._sharding
        )

    def empty(self, count: int) -> CacheBlocks:
        """This many empty blocks for each data-parallel part."""
        return self._empty(count)

    def abstract(self, count: int) -> CacheBlocks:
        """``empty`` as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding),
            jax.eval_shape(lambda: self._zeros(count)),
        )

    def prefill(
        self,
        params: Weights,
        blocks: CacheBlocks,
        tokens: np.ndarray,
        mask: np.ndarray,
        known: tuple[np.ndarray, np.ndarray],
        where: np.ndarray,
    ) -> CacheBlocks:
        """Prefill a chunk in each part, after its prompt's cached tokens, and store it in blocks.

        Args:
          params: in the generate layout.
          blocks: donated.
          tokens: int32 [parts, chunk], whole blocks of tokens, padded on the left; ``mask``: bool
            like it.
          known: int32 [parts, n], numbers of the blocks that hold the cached tokens, with room for
            the chunk; and int32 [parts], how many tokens are cached.
          where: int32 [parts, chunk / BLOCK], the block that each block of the chunk goes to; a
            number beyond the last block drops it.

        Returns:
          the blocks.
        """
        split, (numbers, count) = self._layout.sharding("batch"), known
        return self._prefill(
            params, blocks, place(tokens, split), place(mask, split), place(numbers, split),
            place(count, split), place(where.ravel(), split),
        )  # fmt: skip

    def trace(self, params: Weights, count: int, chunk: int, columns: int) -> Any:
        """``prefill`` of abstract parameters: its jax.stages.Traced.

        Args:
          params: jax.ShapeDtypeStruct with shardings, in the generate layout.
          count: number of blocks.
          chunk, columns: tokens of a chunk; columns for the chunk and the cached tokens together.
        """
        parts, split = self._parts, self._layout.sharding("batch")

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

        return self._prefill.trace(
            params, self.abstract(count), array(parts, chunk),
            array(parts, chunk, dtype=jnp.bool_), array(parts, columns // BLOCK), array(parts),
            array(parts * chunk // BLOCK),
        )  # fmt: skip

    # Programs

    def _zeros(self, count: int) -> CacheBlocks:
        engine, config = self._engine, self._engine.network.config
        over = (config.layers,) if engine.stacked else ()
        one = self._parts * count, config.kv_heads * engine.copies, BLOCK, config.head_dim
        x = int8_cache.zeros((*over, *one), engine.kv_dtype)
        if engine.stacked:
            return CacheBlocks(x, x, self._parts)
        return CacheBlocks((x,) * config.layers, (x,) * config.layers, self._parts)

    def _prefill_program(
        self,
        params: Weights,
        blocks: CacheBlocks,
        tokens: jax.Array,
        mask: jax.Array,
        numbers: jax.Array,
        count: jax.Array,
        where: jax.Array,
    ) -> CacheBlocks:
        attention = AppendAttention(numbers, count, mask, self._engine.copies)
        _, kept = self._engine.prefill_states(params, tokens, mask, attention, count, blocks)

        def cut(_: int, scaled: bool, x: jax.Array) -> jax.Array:
            """[..., parts, heads, columns, dim] -> [..., parts * n, heads, BLOCK, dim]"""
            x = x.swapaxes(-1, -2) if scaled else x
            x = x[..., x.shape[-2] - tokens.shape[1] :, :]
            *lead, parts, heads, size, dim = x.shape
            x = x.reshape(*lead, parts, heads, size // BLOCK, BLOCK, dim).swapaxes(-4, -3)
            x = x.reshape(*lead, parts * size // BLOCK, heads, BLOCK, dim)
            return x.swapaxes(-1, -2) if scaled else x

        k, v = keys_and_values(int8_cache.map_arrays(cut, kept), self._engine.stacked)
        return blocks.scatter(CacheBlocks(k, v, self._parts), where)
