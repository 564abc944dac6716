"""LoRA dropout: dropout of adapters' inputs in updates, independent for every matrix, as in PEFT.

The mask of a token follows from PRNG keys alone: seed, number of the update, row (for a prompt's
tokens: the prompt), position, layer and matrix. So it is the same under every layout, in packs and
micro-batches, with shared or repeated prompts, and when a layer is rematerialised.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

KEY = "dropout"  # the batch key of ``row_keys``
_IMPL = "threefry2x32"


def row_keys(seed: int, update: jax.Array, rows: int, samples: int) -> jax.Array:
    """PRNG keys of rows, uint32 [rows, 4]: two words for the prompt and two for the response.

    Args:
      seed: of the run.
      update: int scalar, updates so far.
      rows: of the whole update.
      samples: consecutive rows that answer one prompt.
    """
    start = jax.random.fold_in(jax.random.key(seed, impl=_IMPL), update)
    number = jnp.arange(rows)
    both = (jax.random.fold_in(start, 0), number // samples), (jax.random.fold_in(start, 1), number)
    keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(of) for key, of in both]
    return jnp.concatenate([jax.random.key_data(x) for x in keys], axis=1)


def token_keys(rows: jax.Array, responses: int, prompt: int, length: int) -> jax.Array:
    """The row's or prompt's key of every token, uint32 [groups, prompt + responses * length, 2].

    Args:
      rows: of ``row_keys``.
      responses: consecutive rows that follow one copy of a prompt.
      prompt, length: tokens of a prompt and of a response, padding included.
    """
    groups = rows.shape[0] // responses
    first = rows.reshape(groups, responses, 4)[:, :1, :2]
    own = jnp.repeat(rows.reshape(groups, responses, 4)[:, :, 2:], length, axis=1)
    return jnp.concatenate([jnp.repeat(first, prompt, axis=1), own], axis=1)


def _fold(key: jax.Array, number: Any) -> jax.Array:
    """``fold_in`` for the words [2] of a key."""
    folded = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_IMPL), number)
    return jax.random.key_data(folded)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout masks of a forward's tokens.

    Attributes:
      keys: uint32 [batch, length, 2], a key per token.
      first: number of the first layer that is run.
    """

    keys: jax.Array
    first: int | jax.Array = 0

    @classmethod
    def of(cls, keys: jax.Array, positions: jax.Array) -> Dropout:
        """For tokens with ``token_keys`` and int positions [batch, length]."""
        return cls(jax.vmap(jax.vmap(_fold))(keys, positions))

    def for_layer(self, layer: int | jax.Array) -> Dropout:
        """The masks in a layer, counted from ``first``."""
        number = self.first + layer
        return Dropout(jax.vmap(jax.vmap(lambda key: _fold(key, number)))(self.keys))

    def apply(self, x: jax.Array, rate: float, numbers: tuple[int, ...], paired: bool) -> jax.Array:
        """A layer's activations after dropout, scaled by 1 / (1 - rate).

        Args:
          x: [batch, length, features...].
          rate: probability that a feature is dropped.
          numbers: numbers of the matrices that read them.
          paired: the result has an axis for the matrices.

        Returns:
          [batch, length, (matrices,) features...].
        """
        kept = jnp.stack([self._keep_mask(x.shape[2:], rate, n) for n in numbers], axis=2)
        x = jnp.where(kept, x[:, :, None] / (1 - rate), 0).astype(x.dtype)
        return x if paired else x[:, :, 0]

    def _keep_mask(self, features: tuple[int, ...], rate: float, number: int) -> jax.Array:
        """bool [batch, length, features...] for a matrix, True where features are kept."""

        def draw(key: jax.Array) -> jax.Array:
            own = jax.random.wrap_key_data(_fold(key, number), impl=_IMPL)
            return jax.random.bernoulli(own, 1 - rate, features)

        return jax.vmap(jax.vmap(draw))(self.keys)
