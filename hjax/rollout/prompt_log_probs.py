"""Prompt log-probs: of a prompt's own tokens, for completions with ``echo``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hjax.models.forward import log_probs_and_top, sequence_states
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.sampling_params import MOST_TOP
from hjax.sharding.global_arrays import place, to_numpy

# Top tokens of a position and their log-probs, descending.
Top = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class PromptLogProbs:
    """Log-probs of a prompt's tokens but the first, which follows nothing.

    Attributes:
      logprobs: natural logs, of the model's own distribution: no sampling options.
      top: for each the most probable tokens of its position.
    """

    logprobs: tuple[float, ...]
    top: tuple[Top, ...]


class PromptScorer:
    """Scores prompts, one at a time, by a program for each of a few lengths.

    Args:
      engine: whose model, layout and compute it uses.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._last: tuple[Sequence[int], PromptLogProbs] | None = None
        self._score = jax.jit(self._scored, out_shardings=engine.layout.replicated)

    def clear(self) -> None:
        """Forget the last scores, for other weights."""
        self._last = None

    def __call__(self, params: Weights, prompt: Sequence[int], columns: int) -> PromptLogProbs:
        """The log-probs of a prompt; those of the last prompt are cached.

        Args:
          params: in the generate layout.
          prompt: token ids, at most ``columns``; each ``columns`` has its own program.
        """
        if self._last is None or self._last[0] != prompt:
            logprobs, values, tokens = self.run(params, prompt, columns)
            rest = len(prompt) - 1
            top = top_tokens(tokens[:rest], values[:rest])
            self._last = prompt, PromptLogProbs(tuple(logprobs[:rest].tolist()), top)
        return self._last[1]

    def run(self, params: Weights, prompt: Sequence[int], columns: int) -> Any:
        """As ``log_probs_and_top``, of one row of ``columns`` - 1 positions, on the host."""
        # Every data-parallel part scores the same row; one is read.
        tokens = np.zeros((self._engine.parts, columns), np.int32)
        tokens[:, : len(prompt)] = prompt
        split = self._engine.layout.sharding("batch")
        mask = np.broadcast_to(np.arange(columns) < len(prompt), tokens.shape)
        scored = self._score(params, place(tokens, split), place(np.asarray(mask), split))
        return [to_numpy(x)[0] for x in scored]

    def _scored(self, params: Weights, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
        engine = self._engine
        model = engine.network.bind(params)
        hidden = sequence_states(model, tokens, mask, engine.compute)
        # As many positions as columns: a size that divides.
        after = jnp.roll(tokens, -1, axis=1)
        count = min(MOST_TOP, engine.network.config.vocab_size)
        return log_probs_and_top(model, hidden, after, count, engine.layout)


def top_tokens(tokens: np.ndarray, values: np.ndarray) -> tuple[Top, ...]:
    """Top tokens of each position, of tables [positions, n], without empty entries (-inf)."""
    return tuple(
        tuple((t, x) for t, x in zip(row, of, strict=True) if x > -np.inf)
        for row, of in zip(tokens.tolist(), values.tolist(), strict=True)
    )
