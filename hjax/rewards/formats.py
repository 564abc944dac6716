"""Format rewards: tags, regular expressions, JSON. Objects to be used as reward functions.

    from hjax.rewards.formats import Tags

    reward = Tags("think", "answer")   # in a file of yours: --config.reward.function=mine.py:reward

`--config.reward.function=formats.py:think_answer` and `formats.py:json_object` need no file.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from hjax.errors import ConfigError


class _PerResponse:
    def __call__(
        self, prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        """A reward per response, 0 to 1."""
        return [float(self._score(response)) for response in responses]

    def _score(self, text: str) -> float:
        raise NotImplementedError


class Tags(_PerResponse):
    """1.0 where a response consists of these tags in order, each opened and closed once.

    Only white space may be between and around them; inside may be anything but the tags. The format
    of DeepSeek-R1 (arXiv:2501.12948) is `Tags("think", "answer")`.

    Args:
      names: of the tags, without brackets.
      begun: beginning of the response that is part of the prompt, such as "<think>".
      partial: partial credit: a response without the format gets this times the share of brackets
        that occur exactly once and in the right order.

    Raises:
      ConfigError: no names, or an invalid one.
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


class Pattern(_PerResponse):
    """1.0 where the whole response matches a regular expression (Python's, dots match all), else 0.

    Args:
      regex: such as `r".*Answer: -?[0-9]+"`.

    Raises:
      ConfigError: it is not a regular expression.
    """

    def __init__(self, regex: str):
        try:
            self._regex = re.compile(regex, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"Pattern({regex!r}): {error}") from error

    def _score(self, text: str) -> bool:
        return self._regex.fullmatch(text.strip()) is not None


class Json(_PerResponse):
    """1.0 where a response is a JSON object with certain keys, in a code fence or not, else 0.

    Args:
      keys: required keys; others are allowed.
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
