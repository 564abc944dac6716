"""What a run's metrics say is probably not meant, told once."""

from __future__ import annotations

from collections.abc import Mapping


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
            f"step {metrics['step']}: {share:.0%} of the responses were cut at "
            f"rollout.max_response_length={self._limit} tokens; raise it if they are to end "
            "by themselves"
        )
