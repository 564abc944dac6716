"""Length reward: is a response as long as it should be? An object to use as a reward function.

    from hjax.rewards.lengths import Length

    reward = Length(50, 100, unit="words")

(`algorithm.overlong_buffer` adds a penalty near the length limit to another reward.)
"""

from collections.abc import Sequence
from typing import Any

from hjax.errors import ConfigError

UNITS = ("tokens", "words", "characters")


class Length:
    """1.0 within bounds, falling linearly to 0 outside them.

    Args:
      low, high: bounds of the length.
      over: distance from the bounds at which the reward reaches 0.
      unit: "tokens" (including the end-of-sequence token), "words" (by white space) or
        "characters".

    Raises:
      ConfigError: an unknown unit, or bounds in the wrong order.
    """

    def __init__(self, low: float, high: float, over: float | None = None, unit: str = "tokens"):
        if unit not in UNITS:
            raise ConfigError(f"Length(unit={unit!r}): must be one of {', '.join(UNITS)}")
        over = max(high - low, 1) if over is None else over
        if not 0 <= low <= high or not over > 0:
            raise ConfigError(
                f"Length({low}, {high}, over={over}): low must be 0 to high, and over above 0"
            )
        self._low, self._high, self._over, self._unit = low, high, over, unit

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        *,
        response_tokens: Sequence[Sequence[int]],
        **columns: Sequence[Any],
    ) -> list[float]:
        """A reward per response, 0 to 1."""
        if self._unit == "tokens":
            lengths = [len(tokens) for tokens in response_tokens]
        elif self._unit == "words":
            lengths = [len(response.split()) for response in responses]
        else:
            lengths = [len(response) for response in responses]
        return [self._score(length) for length in lengths]

    def _score(self, length: int) -> float:
        return max(0.0, 1.0 - max(self._low - length, length - self._high, 0) / self._over)
