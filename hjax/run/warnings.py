"""What a run's metrics say is probably not meant, told once."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ml_collections import ConfigDict

from hjax.errors import RunError


class TruncationWarning:
    """Says once when the length limit cuts most of a step's responses.

    Args:
      max_response_length: ``rollout.max_response_length``, in tokens.
      longest: tokens of the longest right answer, where a built-in task knows it; a limit that
        leaves room for it is meant, and nothing is said. None: not known.
    """

    def __init__(self, max_response_length: int, longest: int | None = None):
        self._limit = max_response_length
        self._said = longest is not None and longest <= max_response_length

    def message(self, metrics: Mapping[str, float]) -> str | None:
        """What to tell of a step's row: once, where more than half was cut; else None."""
        share = metrics.get("response/truncated", 0.0)
        if self._said or not share > 0.5:
            return None
        self._said = True
        return (
            f"step {metrics['step']}: warning (truncated): {share:.0%} of the responses were cut "
            f"at rollout.max_response_length={self._limit} tokens; raise it if they are to end by "
            "themselves"
        )


class SamplerWatch:
    """Says once, or stops a run, when its sampler's log-probs are not those of learning.

    ``rollout/token_prob_error`` is the mean of exp|difference| over a step's tokens: 1.00 where
    both compute in float32, a little more in bfloat16 or with a cache in int8. It is not looked at
    where older weights sample, or learning drops features of adapters: there it is meant.

    Args:
      config: of the run.
    """

    def __init__(self, config: ConfigDict):
        rollout = config.rollout
        meant = rollout.max_staleness or rollout.partial_tokens or config.actor.lora.dropout
        self._warn = math.inf if meant else rollout.warn_prob_error or math.inf
        self._stop = math.inf if meant else rollout.max_prob_error or math.inf
        self._said = False

    def message(self, metrics: Mapping[str, float]) -> str | None:
        """What to tell of a step's metrics, once; else None.

        Raises:
          RunError: the error is above ``rollout.max_prob_error``.
        """
        error = metrics.get("rollout/token_prob_error", 1.0)
        if error <= min(self._warn, self._stop) or math.isnan(error):
            return None  # an update that is not finite is skipped and counted
        found = f"rollout/token_prob_error is {error:.4g}"
        if error > self._stop:
            raise RunError(
                f"{found}, above rollout.max_prob_error={self._stop:g}: the sampler's log-probs "
                "are not learning's, which would learn from the wrong ratios; raise that key (0: "
                "never stop) to go on, or start another run with model.dtype=float32 or "
                "rollout.cache_dtype=auto"
            )
        if self._said:
            return None
        self._said = True
        return (
            f"warning (sampler): {found}, above rollout.warn_prob_error={self._warn:g}: the "
            "sampler's log-probs are "
            "not quite learning's; algorithm.correction=truncated weighs for it"
        )
