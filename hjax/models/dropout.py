"""Dropout of adapters' inputs, as PEFT has it: in updates, for every matrix apart.

Which features of a token are dropped follows from keys alone: of the seed and the update's number,
of the row (for a prompt's tokens, of the prompt), of the token's position, the layer and the
matrix. So it is the same on every layout, in packs and micro-batches, where a prompt stands once
for several rows or once for each, and when a layer is computed again for its backward pass.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

KEY = "dropout"  # a batch's entry: what row_keys made
_IMPL = "threefry2x32"


def row_keys(seed: int, update: jax.Array, rows: int, samples: int) -> jax.Array:
    """uint32 [rows, 4]: for each row two words of its prompt's key and two of its response's.

    Args:
      seed: of the run.
      update: int scalar, updates made so far.
      rows: of the whole update.
      samples: consecutive rows that answer one prompt.
    """
    start = jax.random.fold_in(jax.random.key(seed, impl=_IMPL), update)
    number = jnp.arange(rows)
    both = (jax.random.fold_in(start, 0), number // samples), (jax.random.fold_in(start, 1), number)
    keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(of) for key, of in both]
    return jnp.concatenate([jax.random.key_data(x) for x in keys], axis=1)


def token_keys(rows: jax.Array, share: int, prompt: int, length: int) -> jax.Array:
    """uint32 [groups, prompt + share * length, 2]: the row's or prompt's key for every token.

    Args:
      rows: of ``row_keys``.
      share: consecutive rows that stand behind one prompt.
      prompt, length: tokens of a prompt and of a response, padding included.
    """
    groups = rows.shape[0] // share
    first = rows.reshape(groups, share, 4)[:, :1, :2]
    own = jnp.repeat(rows.reshape(groups, share, 4)[:, :, 2:], length, axis=1)
    return jnp.concatenate([jnp.repeat(first, prompt, axis=1), own], axis=1)


def _fold(key: jax.Array, number: Any) -> jax.Array:
    """The words of a key [2], with a number folded in."""
    folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_IMPL), number)
    return jax.random.key_data(folded)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """What is dropped of a forward's tokens.

    Attributes:
      keys: uint32 [batch, length, 2], of the tokens; ``of_layer``: in a layer.
      first: number of the first layer of those that are run.
    """

    keys: jax.Array
    first: int | jax.Array = 0

    @classmethod
    def of(cls, keys: jax.Array, positions: jax.Array) -> Dropout:
        """Of tokens with ``token_keys`` and int positions [batch, length]."""
        return cls(jax.vmap(jax.vmap(_fold))(keys, positions))

    def of_layer(self, layer: int | jax.Array) -> Dropout:
        """What is dropped in a layer, counted from ``first``."""
        number = self.first + layer
        return Dropout(jax.vmap(jax.vmap(lambda key: _fold(key, number)))(self.keys))

    def dropped(
        self, x: jax.Array, rate: float, matrices: tuple[int, ...], paired: bool
    ) -> jax.Array:
        """A layer's activations, some of them 0, the others divided by the share that is kept.

        Args:
          x: [batch, length, features...].
          rate: share that is dropped.
          matrices: numbers of those that read them.
          paired: the result has an axis for these.

        Returns:
          [batch, length, (matrices,) features...].
        """
        kept = jnp.stack([self._kept(x.shape[2:], rate, number) for number in matrices], axis=2)
        x = jnp.where(kept, x[:, :, None] / (1 - rate), 0).astype(x.dtype)
        return x if paired else x[:, :, 0]

    def _kept(self, features: tuple[int, ...], rate: float, number: int) -> jax.Array:
        """bool [batch, length, features...] for a matrix."""

        def draw(key: jax.Array) -> jax.Array:
            own = jax.random.wrap_key_data(_fold(key, number), impl=_IMPL)
            return jax.random.bernoulli(own, 1 - rate, features)

        return jax.vmap(jax.vmap(draw))(self.keys)
