"""Packed prefill: prompts of different lengths are concatenated without padding.

Layers compute everything but attention on packed tokens; attention gets them unpacked into rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.attention_strategies import Attention, AttentionInputs, AttentionOutput


def packed_sizes(columns: int) -> tuple[int, int]:
    """Packed sizes for so many padded columns, ascending; few, as each compiles a program."""
    return columns // 2, columns * 3 // 4


@dataclasses.dataclass(frozen=True)
class PackedPrefill:
    """Attention strategy of packed tokens [parts, size], which ``inner`` gets as [rows, length].

    Each part holds the real tokens of its rows one after another. The rest of a part repeats
    arbitrary tokens, whose results are not read.

    Attributes:
      inner: the strategy for rows.
      mask: bool [rows, length], real tokens. Parts have equally many rows, and at most ``size``
        real tokens each.
      size: columns of a part.
      parts: data-parallel parts.
    """

    inner: Attention
    mask: jax.Array
    size: int
    parts: int = 1

    def __call__(self, heads: AttentionInputs, cache: Any) -> AttentionOutput:
        q, k, v = (self.unpack(x) for x in (heads.q, heads.k, heads.v))
        out, cache, kept = self.inner(heads._replace(q=q, k=k, v=v), cache)
        return self.pack(out), cache, kept

    def pack(self, x: jax.Array) -> jax.Array:
        """[rows, length, ...] -> [parts, size, ...]"""
        there = self.mask.reshape(self.parts, -1)
        where = jax.vmap(lambda mask: jnp.nonzero(mask, size=self.size, fill_value=0)[0])(there)
        x = x.reshape(*there.shape, *x.shape[2:])
        return jax.vmap(lambda x, at: x[at])(x, where)

    def unpack(self, x: jax.Array) -> jax.Array:
        """[parts, size, ...] -> [rows, length, ...]; arbitrary at padding."""
        return self._gather(x, self._packed_index).reshape(*self.mask.shape, *x.shape[2:])

    def last_tokens(self, x: jax.Array) -> jax.Array:
        """[parts, size, ...] -> [rows, 1, ...], of each row's last token."""
        numbers = self._packed_index.reshape(self.parts, -1, self.mask.shape[1])[:, :, -1]
        return self._gather(x, numbers).reshape(-1, 1, *x.shape[2:])

    @property
    def _packed_index(self) -> jax.Array:
        """int32 [parts, rows * length]: the packed column of each token of a part."""
        there = self.mask.reshape(self.parts, -1)
        return jnp.maximum(jnp.cumsum(there, axis=1, dtype=jnp.int32) - 1, 0)

    @staticmethod
    def _gather(x: jax.Array, numbers: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, at: x[at])(x, numbers)
