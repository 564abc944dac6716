"""ROUGE-L: similarity of a response to a reference text. An object to use as a reward function.

    from hjax.rewards.similarity import Similarity

    reward = Similarity(unit="words", column="summary")

`--config.reward.function=similarity.py:rouge_l` (the column `answer`) needs no file. The longest
common subsequence is rapidfuzz's (the extra `rewards`).
"""

import re
from collections.abc import Sequence
from typing import Any

from hjax.errors import ConfigError, DataError

UNITS = ("words", "characters")
_WORD = re.compile(r"\w+")


class Similarity:
    """Twice the longest common subsequence over the sum of both lengths, 0 to 1.

    For words it is the F-measure of ROUGE-L (Lin 2004); words are runs of letters, digits and
    underscores in lower case, not stemmed.

    Args:
      unit: "words", or "characters" (case-sensitive).
      column: dataset column with the reference text, or with a list of which the most similar
        counts.

    Raises:
      ConfigError: an unknown unit, or rapidfuzz is not installed.
    """

    def __init__(self, unit: str = "words", column: str = "answer"):
        if unit not in UNITS:
            raise ConfigError(f"Similarity(unit={unit!r}): must be one of {', '.join(UNITS)}")
        try:
            from rapidfuzz.distance import Indel
        except ImportError:
            raise ConfigError(
                "Similarity needs rapidfuzz, which is not installed: pip install 'hjax[rewards]'"
            ) from None
        self._similarity, self._unit, self._column = Indel.normalized_similarity, unit, column

    def __call__(
        self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """A reward per response, 0 to 1; None where the dataset has no reference text.

        Raises:
          DataError: the dataset has no such column.
        """
        if self._column not in columns:
            raise DataError(
                f"similarity: no column {self._column!r}; there are {', '.join(columns) or 'none'}"
            )
        return [
            self._largest(response, reference)
            for response, reference in zip(responses, columns[self._column], strict=True)
        ]

    def _largest(self, response: str, reference: str | Sequence[str] | None) -> float | None:
        texts = [reference] if isinstance(reference, str) else list(reference or ())
        parts = self._parts(response)
        return max((self._similarity(parts, self._parts(text)) for text in texts), default=None)

    def _parts(self, text: str) -> Sequence[str]:
        return text if self._unit == "characters" else _WORD.findall(text.lower())


def rouge_l(
    prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
) -> list[float | None]:
    """`Similarity()`, created on call, so that the module can be imported without rapidfuzz."""
    return Similarity()(prompts, responses, **columns)
