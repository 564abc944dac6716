"""A calculator as a tool: work out a sum step by step, then give the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.row_columns import number_column, one_of_column
from hjax.errors import DataError, short_repr

LARGEST_DIGITS = 18
_EXPRESSION = re.compile(r"(-?[0-9]+)([-+*])(-?[0-9]+)=")
_ANSWER = re.compile(r"#(-?[0-9]+)")


class Calculator(Environment):
    """Computes two numbers and a sign at a time, until a turn gives the answer.

    The row's columns are ``prompt``, the question, and ``result``, a whole number. Actions:

    | action | observation | |
    |---|---|---|
    | `47*38=` | `1786;` | two whole numbers with + - or * between; a sign may precede each |
    | `#1657` | empty | the answer; the episode ends |
    | anything else | `?;` | not valid; so is a number of too many digits |
    | `47*38=` without the tool | `?;` | not valid |

    An answer that is right is paid 1.0; a wrong one ``partial`` times the share of its characters
    that are right in their places. Alphabet: ``0123456789+-*=#?;`` and the prompt's. Anchor: the
    prompt and what has been computed, in any order.

    Columns that a row may lack: ``tool`` (True), whether expressions are computed, else only an
    answer is possible; ``partial`` (0), pay of a wrong answer; ``max_digits`` (18, the most), of
    each number computed with and of its result.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._tool = one_of_column(task, "tool", (True, False))
        self._partial = number_column(task, "partial")
        self._max_digits = min(number_column(task, "max_digits", LARGEST_DIGITS), LARGEST_DIGITS)
        prompt, result = task.get("prompt"), task.get("result")
        if not isinstance(prompt, str):
            raise DataError(f"prompt is {short_repr(prompt)}; it must be text")
        try:
            self._result = str(int(str(result)))
        except ValueError:
            raise DataError(f"result is {short_repr(result)}; it must be a whole number") from None
        self.prompt = prompt
        self.computed: set[str] = set()  # such as 47*38=1786
        return Observation(prompt, anchor=[prompt])

    def step(self, action: str) -> Step:
        action = action.strip()
        if action.startswith("#"):
            answer = _ANSWER.fullmatch(action)
            given = str(int(answer[1])) if answer and self._short(answer[1]) else action[1:]
            reward = 1.0 if given == self._result else self._partial * self._closeness(given)
            return Step(self._observe(""), reward=reward, done=True, valid=answer is not None)
        value = self._compute(action) if self._tool else None
        if value is None:
            return Step(self._observe("?;"), valid=False)
        self.computed.add(f"{action}{value}")
        return Step(self._observe(f"{value};"))

    def _observe(self, text: str) -> Observation:
        return Observation(text, anchor=[self.prompt, *sorted(self.computed)])

    def _compute(self, action: str) -> int | None:
        found = _EXPRESSION.fullmatch(action)
        if found is None or not self._short(found[1]) or not self._short(found[3]):
            return None
        left, right = int(found[1]), int(found[3])
        value = {"+": left + right, "-": left - right, "*": left * right}[found[2]]
        return value if self._short(str(value)) else None

    def _short(self, number: str) -> bool:
        return len(number.lstrip("-")) <= self._max_digits

    def _closeness(self, given: str) -> float:
        same = sum(a == b for a, b in zip(given, self._result))
        return same / max(len(given), len(self._result))
