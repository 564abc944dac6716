"""How near is a response to a text of the data's? An object to be used as a reward function.

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
    """Twice the longest common subsequence over both lengths, 0 to 1.

    Of words that is the F-measure of ROUGE-L (Lin 2004), words being runs of letters, digits and
    underscores in lower case, not stemmed.

    Args:
      unit: "words", or "characters", as they are.
      column: of the data, with the text, or a list of texts of which the nearest counts.

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
        self._of, self._unit, self._column = Indel.normalized_similarity, unit, column

    def __call__(
        self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        """A reward per response, 0 to 1; None where the data has no text.

        Raises:
          DataError: the data has no such column.
        """
        if self._column not in columns:
            raise DataError(
                f"similarity: no column {self._column!r}; there are {', '.join(columns) or 'none'}"
            )
        return [
            self._nearest(response, wanted)
            for response, wanted in zip(responses, columns[self._column], strict=True)
        ]

    def _nearest(self, response: str, wanted: str | Sequence[str] | None) -> float | None:
        texts = [wanted] if isinstance(wanted, str) else list(wanted or ())
        own = self._parts(response)
        return max((self._of(own, self._parts(text)) for text in texts), default=None)

    def _parts(self, text: str) -> Sequence[str]:
        return text if self._unit == "characters" else _WORD.findall(text.lower())


def rouge_l(
    prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
) -> list[float | None]:
    """`Similarity()`, made when it is called: the module can be read without rapidfuzz."""
    return Similarity()(prompts, responses, **columns)
