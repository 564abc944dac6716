"""Chunks of prompts, read into blocks: what services and training's rollouts read long prompts by.

Each data-parallel part reads a chunk of its own and has blocks of its own, so nothing is exchanged
between parts. ``hjax.rollout.prefixes`` says which blocks stay for which prompts of a service,
``hjax.rollout.beginnings`` for those of a rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.kernels import int8_cache
from hjax.models.continuing import BLOCK, Blocks, Continue
from hjax.models.decoding import keys_and_values
from hjax.models.parameters import Network, Weights
from hjax.sharding.arrays import place
from hjax.sharding.layout import Layout


class Chunks:
    """The programs of one engine.

    Args:
      network, layout: as of the engine.
      kept: dtype of keys and values; None: int8.
      copies: of each key-value head.
      held: sharding of an array of the blocks.
      stacked: whether that is one of all layers.
      prefilled: ``Engine.prefilled``.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        kept: Any,
        copies: int,
        held: Any,
        stacked: bool,
        prefilled: Callable[..., tuple[jax.Array, Any]],
    ):
        self._network, self._layout, self._kept = network, layout, kept
        self._copies, self._stacked, self._prefilled = copies, stacked, prefilled
        self._held = held
        self._parts = layout.ways("batch")
        self._empty = jax.jit(self._zeros, static_argnums=0, out_shardings=held)
        self._read = jax.jit(self._read_in, donate_argnums=1, out_shardings=held)

    def empty(self, count: int) -> Blocks:
        """So many blocks for each data-parallel part."""
        return self._empty(count)

    def abstract(self, count: int) -> Blocks:
        """``empty`` as jax.ShapeDtypeStruct with shardings."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._held),
            jax.eval_shape(lambda: self._zeros(count)),
        )

    def read(
        self,
        params: Weights,
        blocks: Blocks,
        tokens: np.ndarray,
        mask: np.ndarray,
        known: tuple[np.ndarray, np.ndarray],
        where: np.ndarray,
    ) -> Blocks:
        """Read a chunk in each part, after what is known of its prompt, and keep it.

        Args:
          params: in the generate layout.
          blocks: donated.
          tokens: int32 [parts, chunk], whole blocks of tokens, padded on the left; ``mask``: bool
            like it.
          known: int32 [parts, n], numbers of the blocks that hold what is known, with room for the
            chunk; and int32 [parts], tokens of it.
          where: int32 [parts, chunk / BLOCK], into which block each block of the chunk goes; one
            beyond them all: it is dropped.

        Returns:
          the blocks.
        """
        split = self._layout.sharding("batch")
        given = [place(x, split) for x in (tokens, mask, *known, where.ravel())]
        return self._read(params, blocks, *given)

    def trace(self, params: Weights, count: int, chunk: int, columns: int) -> Any:
        """``read`` of abstract parameters: its jax.stages.Traced.

        Args:
          params: jax.ShapeDtypeStruct with shardings, in the generate layout.
          count: of blocks.
          chunk, columns: tokens of a chunk, and room for what is known with it.
        """
        parts, split = self._parts, self._layout.sharding("batch")

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=split)

        given = (array(parts, chunk), array(parts, chunk, dtype=jnp.bool_),
                 array(parts, columns // BLOCK), array(parts),
                 array(parts * chunk // BLOCK))  # fmt: skip
        return self._read.trace(params, self.abstract(count), *given)

    # Programs

    def _zeros(self, count: int) -> Blocks:
        config = self._network.config
        over = (config.layers,) if self._stacked else ()
        one = self._parts * count, config.kv_heads * self._copies, BLOCK, config.head_dim
        x = int8_cache.zeros((*over, *one), self._kept)
        if self._stacked:
            return Blocks(x, x, self._parts)
        return Blocks((x,) * config.layers, (x,) * config.layers, self._parts)

    def _read_in(
        self,
        params: Weights,
        blocks: Blocks,
        tokens: jax.Array,
        mask: jax.Array,
        numbers: jax.Array,
        count: jax.Array,
        where: jax.Array,
    ) -> Blocks:
        attention = Continue(numbers, count, mask, self._copies)
        _, kept = self._prefilled(params, tokens, mask, attention, count, blocks)

        def cut(_: int, scaled: bool, x: jax.Array) -> jax.Array:
            """[..., parts, heads, columns, dim] -> [..., parts * n, heads, BLOCK, dim]"""
            x = x.swapaxes(-1, -2) if scaled else x
            x = x[..., x.shape[-2] - tokens.shape[1] :, :]
            *lead, parts, heads, size, dim = x.shape
            x = x.reshape(*lead, parts, heads, size // BLOCK, BLOCK, dim).swapaxes(-4, -3)
            x = x.reshape(*lead, parts * size // BLOCK, heads, BLOCK, dim)
            return x.swapaxes(-1, -2) if scaled else x

        k, v = keys_and_values(int8_cache.each(cut, kept), self._stacked)
        return blocks.with_rows(Blocks(k, v, self._parts), where)
