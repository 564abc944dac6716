"""Does a response have the form that was asked for? Objects to be used as reward functions.

    from hjax.rewards.formats import Tags

    reward = Tags("think", "answer")   # in a file of yours: --config.reward.function=mine.py:reward

`--config.reward.function=formats.py:think_answer` and `formats.py:json_object` need no file.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from hjax.errors import ConfigError


class _OfEach:
    def __call__(
        self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        """A reward per response, 0 to 1."""
        return [float(self._score(response)) for response in responses]

    def _score(self, text: str) -> float:
        raise NotImplementedError


class Tags(_OfEach):
    """1.0 where a response is the given tags in their order, each opened and closed once.

    Between and around them there may be white space alone; inside anything but the tags. The form
    of DeepSeek-R1's answers (arXiv:2501.12948) is `Tags("think", "answer")`.

    Args:
      names: of the tags, without brackets.
      begun: what the prompt ends with already, such as "<think>".
      partial: what a response with some of the brackets gets: this times their share of those that
        stand there exactly once, in the right order.

    Raises:
      ConfigError: no names, or one that is no name.
    """

    def __init__(self, *names: str, begun: str = "", partial: float = 0.0):
        if not names or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
            raise ConfigError(f"Tags{names!r}: give names of tags, such as Tags('think', 'answer')")
        self._brackets = [bracket for n in names for bracket in (f"<{n}>", f"</{n}>")]
        outside = "|".join(map(re.escape, self._brackets))
        inside = rf"(?:(?!{outside}).)*"
        pairs = (
            rf"{re.escape(self._brackets[i])}{inside}{re.escape(self._brackets[i + 1])}"
            for i in range(0, len(self._brackets), 2)
        )
        self._form = re.compile(r"\s*".join(["", *pairs, ""]), re.DOTALL)
        self._begun, self._partial = begun, partial

    def _score(self, text: str) -> float:
        text = self._begun + text
        if self._form.fullmatch(text):
            return 1.0
        if not self._partial:
            return 0.0
        right, reached = 0, 0
        for bracket in self._brackets:
            place = text.find(bracket, reached)
            if text.count(bracket) == 1 and place >= 0:
                right, reached = right + 1, place
        return self._partial * right / len(self._brackets)


class Pattern(_OfEach):
    """1.0 where the whole response matches a regular expression (Python's, dots match all), else 0.

    Args:
      regex: such as `r".*Answer: -?[0-9]+"`.

    Raises:
      ConfigError: it is none.
    """

    def __init__(self, regex: str):
        try:
            self._regex = re.compile(regex, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"Pattern({regex!r}): {error}") from error

    def _score(self, text: str) -> bool:
        return self._regex.fullmatch(text.strip()) is not None


class Json(_OfEach):
    """1.0 where a response is a JSON object that has certain keys, in a fence or without, else 0.

    Args:
      keys: that it must have; it may have others.
    """

    def __init__(self, *keys: str):
        self._keys = frozenset(keys)

    def _score(self, text: str) -> bool:
        fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", text, re.DOTALL)
        try:
            value = json.loads(fenced[1] if fenced else text)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict) and self._keys <= value.keys()


think_answer = Tags("think", "answer")
json_object = Json()
