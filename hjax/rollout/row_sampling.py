"""Sampling options as arrays: one row per sequence of a batch, or one row for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.errors import ConfigError
from hjax.rollout.sampling_params import BIASES, SamplingParams


@dataclasses.dataclass(frozen=True)
class SamplingSizes:
    """What rows have room for; other sizes are other shapes, and so another program.

    Attributes:
      vocab: vocabulary size.
      biases: tokens of a row with a bias or a ban.
      stops: stop tokens of a row.
      forced: forced tokens of a row.
      penalties: whether rows may have penalties, which need ``TokenCounts``.
    """

    vocab: int
    biases: int = BIASES
    stops: int = 16
    forced: int = 16
    penalties: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """The ``SamplingParams`` of a batch's rows, or one row for all of them.

    Attributes:
      temperature, top_p, min_p: float32 [rows].
      top_k, min_tokens: int32 [rows].
      bias_tokens, bias: int32 and float32 [rows, biases]; padded with token -1.
      stop: int32 [rows, stops], padded with -1.
      forced: int32 [rows, forced], padded with -1.
      top: int32 [rows], number of most probable tokens to report.
      first_draw: int32 [rows], number of the first token's draw among those of the row's key; a
        response that goes on with another's key draws what comes next there.
      repetition_penalty, presence_penalty, frequency_penalty: float32 [rows]; None: no row may have
        one.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    bias_tokens: jax.Array
    bias: jax.Array
    stop: jax.Array
    min_tokens: jax.Array
    forced: jax.Array
    top: jax.Array
    first_draw: jax.Array
    repetition_penalty: jax.Array | None
    presence_penalty: jax.Array | None
    frequency_penalty: jax.Array | None

    @classmethod
    def uniform(cls, options: SamplingParams, vocab: int) -> RowSampling:
        """One row of numpy arrays: programs are compiled for its values.

        Args:
          options: of all rows of a batch.
          vocab: vocabulary size.
        """
        # One more stop token, so that processed logits always end in a scatter.
        sizes = SamplingSizes(
            vocab,
            biases=len(_biases(options)),
            stops=len(options.stop) + 1,
            forced=len(options.forced),
            penalties=options.penalised,
        )
        return cls.of([options], sizes)

    @classmethod
    def of(
        cls,
        options: Sequence[SamplingParams | None],
        sizes: SamplingSizes,
        first_draw: Sequence[int] | None = None,
    ) -> RowSampling:
        """The rows' arrays, of numpy.

        Args:
          options: one per row; None: an unread row, which needs no work.
          sizes: what there is room for.
          first_draw: of each row; None: 0.

        Raises:
          ConfigError: options with more tokens than there is room for, a token that the model does
            not have, no token left to draw, penalties where ``sizes`` has none.
        """
        rows = [_EMPTY if each is None else each for each in options]
        for each in rows:
            _check_fits(each, sizes)
        biases = [_biases(each) for each in rows]

        arrays: dict[str, Any] = dict.fromkeys(_PENALTIES)
        for name in (*_NUMBERS, *(_PENALTIES if sizes.penalties else ())):
            dtype = np.int32 if type(getattr(_EMPTY, name)) is int else np.float32
            arrays[name] = np.asarray([getattr(each, name) for each in rows], dtype)
        # A smaller top_p would be 0 in float32, which no token reaches.
        arrays["top_p"] = np.maximum(arrays["top_p"], np.finfo(np.float32).tiny)
        arrays["bias_tokens"] = _padded(biases, sizes.biases, -1, np.int32)
        arrays["bias"] = _padded([each.values() for each in biases], sizes.biases, 0, np.float32)
        arrays["stop"] = _padded([each.stop for each in rows], sizes.stops, -1, np.int32)
        arrays["forced"] = _padded([each.forced for each in rows], sizes.forced, -1, np.int32)
        arrays["first_draw"] = np.asarray(first_draw or [0] * len(rows), np.int32)
        return cls(**arrays)

    def ends(self, token: jax.Array) -> jax.Array:
        """bool [rows]: whether a row's ``token``, int32 [rows], is one of its stop tokens."""
        return jnp.any(token[:, None] == self.stop, axis=-1)

    @property
    def static(self) -> bool:
        """Whether values are known while a program is traced."""
        return isinstance(self.temperature, np.ndarray)

    @property
    def temperatures(self) -> jax.Array:
        """float32 [rows, 1]: 1 of greedy rows, whose log-probs are untempered."""
        where: Any = np.where if self.static else jnp.where
        return where(self.greedy, np.float32(1.0), self.temperature)[:, None]

    @property
    def greedy(self) -> jax.Array:
        """bool [rows], as ``SamplingParams.greedy``; so are the next two."""
        return self.temperature == 0

    @property
    def tempered(self) -> jax.Array:
        return ~self.greedy & (self.temperature != 1)

    @property
    def truncates(self) -> jax.Array:
        return ~self.greedy & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    def changes_logits(self, position: jax.Array) -> jax.Array:
        """bool [rows]: whether biases, bans or penalties change the logits at ``position``."""
        altered = (self.bias_tokens >= 0).any(axis=-1)
        if self.repetition_penalty is not None:
            altered |= self.repetition_penalty != 1
            altered |= (self.presence_penalty != 0) | (self.frequency_penalty != 0)
        if self.static and (altered.all() or not self.min_tokens.any()):
            return altered
        return altered | (self.banned_stops(position) >= 0).any(axis=-1)

    def banned_stops(self, position: jax.Array) -> jax.Array:
        """int32 [rows, stops]: stop tokens that ``min_tokens`` bans at ``position``, else -1."""
        return jnp.where((position < self.min_tokens)[:, None], self.stop, -1)

    def forced_at(self, position: jax.Array) -> jax.Array:
        """int32 [rows]: the token that must stand at ``position``, -1 where any may."""
        here = jnp.arange(self.forced.shape[1]) == position[:, None]
        return jnp.max(jnp.where(here, self.forced, -1), axis=-1, initial=-1)


_EMPTY = SamplingParams(temperature=0.0)
_NUMBERS = ("temperature", "top_k", "top_p", "min_p", "min_tokens", "top")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _check_fits(options: SamplingParams, sizes: SamplingSizes) -> None:
    held = [
        ("tokens with a bias or ban", len({*options.logit_bias, *options.bad}), sizes.biases),
        ("stop tokens", len(options.stop), sizes.stops),
        ("forced tokens", len(options.forced), sizes.forced),
    ]
    for what, count, room in held:
        if count > room:
            raise ConfigError(f"{count} {what}: at most {room}")
    options.check_vocabulary(sizes.vocab)
    if options.penalised and not sizes.penalties:
        raise ConfigError(
            "repetition_penalty, presence_penalty and frequency_penalty need rows that have them: "
            "SamplingSizes(penalties=True), and TokenCounts of the tokens so far"
        )


def _biases(options: SamplingParams) -> dict[int, float]:
    return {**options.logit_bias, **dict.fromkeys(options.banned, -math.inf)}


def _padded(rows: Sequence[Iterable[float]], width: int, empty: int, dtype: Any) -> np.ndarray:
    table = np.full((len(rows), width), empty, dtype)
    for row, values in zip(table, map(list, rows)):
        row[: len(values)] = values
    return table
