"""Sequences of several lengths read as one, without the padding between them.

All that a layer does to a token by itself, its products above all, is done of the tokens that are
there; attention alone has them in rows.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hjax.models.attention_strategies import Attention, AttentionInputs, KeyValue


def packed_sizes(columns: int) -> tuple[int, int]:
    """Sizes of flat rows for what takes so many columns with its padding, growing: few, as each is
    a program."""
    return columns // 2, columns * 3 // 4


@dataclasses.dataclass(frozen=True)
class PackedPrefill:
    """The attention strategy of tokens [parts, size] of rows that ``inner`` has as [rows, length].

    Each part's rows stand one after another, without what their mask leaves out; what fills up the
    end is some token of them, of which nobody asks.

    Attributes:
      inner: of rows.
      mask: bool [rows, length], tokens that are there; the rows are those of the parts, as many of
        each, and none has more of them than ``size``.
      size: columns of a part.
      parts: data-parallel parts.
    """

    inner: Attention
    mask: jax.Array
    size: int
    parts: int = 1

    def __call__(
        self, heads: AttentionInputs, cache: Any
    ) -> tuple[jax.Array, Any, KeyValue | None]:
        q, k, v = (self.rows(x) for x in (heads.q, heads.k, heads.v))
        out, cache, kept = self.inner(heads._replace(q=q, k=k, v=v), cache)
        return self.of(out), cache, kept

    def of(self, x: jax.Array) -> jax.Array:
        """[rows, length, ...] -> [parts, size, ...]"""
        there = self.mask.reshape(self.parts, -1)
        where = jax.vmap(lambda mask: jnp.nonzero(mask, size=self.size, fill_value=0)[0])(there)
        x = x.reshape(*there.shape, *x.shape[2:])
        return jax.vmap(lambda x, at: x[at])(x, where)

    def rows(self, x: jax.Array) -> jax.Array:
        """[parts, size, ...] -> [rows, length, ...]; anything stands where no token is."""
        return self._taken(x, self._numbers).reshape(*self.mask.shape, *x.shape[2:])

    def last(self, x: jax.Array) -> jax.Array:
        """[parts, size, ...] -> [rows, 1, ...], of each row's last token."""
        numbers = self._numbers.reshape(self.parts, -1, self.mask.shape[1])[:, :, -1]
        return self._taken(x, numbers).reshape(-1, 1, *x.shape[2:])

    @property
    def _numbers(self) -> jax.Array:
        """int32 [parts, rows * length]: where each token of a part stands in its flat row."""
        there = self.mask.reshape(self.parts, -1)
        return jnp.maximum(jnp.cumsum(there, axis=1, dtype=jnp.int32) - 1, 0)

    @staticmethod
    def _taken(x: jax.Array, numbers: jax.Array) -> jax.Array:
        return jax.vmap(lambda x, at: x[at])(x, numbers)
