"""Twenty questions over a table: find the hidden item by asking yes-or-no attributes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.row_columns import number_column
from hjax.errors import DataError, short_repr

MOST_ATTRIBUTES = 9  # a digit numbers each, from 1


class TwentyQuestions(Environment):
    """Asks attributes of a hidden item of a table, and guesses it.

    The row's column ``table`` has a line per item: its name, one character that is no digit, and
    `y` or `n` for each of at most nine attributes. The first observation is the row's prompt if it
    is text, else the table. The seed draws the hidden item; a column ``item`` names it instead.

    | action | observation | |
    |---|---|---|
    | `2` | `y` or `n` | the hidden item's second attribute |
    | `C` | empty | a guess; the episode ends |
    | anything else | `?` | not valid |

    The right guess is paid 1.0, a wrong one 0.0. Alphabet: names, digits and ``yn?`` with the line
    break. Anchor: the table and the answers known, whatever the order of the questions.

    A row may lack the column ``question_cost`` (0), taken from the reward of each question, also of
    an action that is not valid.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        table, prompt, item = task.get("table"), task.get("prompt"), task.get("item")
        self._question_cost = number_column(task, "question_cost")
        self.items = check_table(table)
        self.known: dict[str, str] = {}  # answers by attribute
        if item is not None and item not in self.items:
            raise DataError(f"item is {short_repr(item)}; the table has {', '.join(self.items)}")
        self._table = str(table)
        self._hidden = _drawn_item(list(self.items), f"{seed}\n{table}") if item is None else item
        return self._observe(prompt if isinstance(prompt, str) else self._table)

    def step(self, action: str) -> Step:
        action, answers = action.strip(), self.items[self._hidden]
        if action in self.items:
            return Step(self._observe(""), reward=float(action == self._hidden), done=True)
        asked = [str(number) for number in range(1, len(answers) + 1)]
        if action not in asked:
            return Step(self._observe("?"), reward=-self._question_cost, valid=False)
        self.known[action] = answers[asked.index(action)]
        return Step(self._observe(self.known[action]), reward=-self._question_cost)

    def candidates(self) -> list[str]:
        """The items that agree with every answer so far."""
        return [
            name
            for name, answers in self.items.items()
            if all(answers[int(number) - 1] == answer for number, answer in self.known.items())
        ]

    def _observe(self, text: str) -> Observation:
        return Observation(text, anchor=[self._table, dict(self.known)])


def check_table(table: Any) -> dict[str, str]:
    """The answers of each item, by its name.

    Raises:
      DataError: it is no table.
    """
    lines = table.split("\n") if isinstance(table, str) else []
    items = {line[:1]: line[1:] for line in lines}
    length = len(lines[0]) - 1 if lines else 0
    if (
        len(items) != len(lines)
        or len(items) < 2
        or not 0 < length <= MOST_ATTRIBUTES
        or any(name.isspace() or name.isdigit() for name in items)
        or any(len(answers) != length or set(answers) - set("yn") for answers in items.values())
    ):
        raise DataError(
            f"table is {short_repr(table, 80)}; it must be two lines or more, each another "
            f"character that is no digit and then y or n for each of 1 to {MOST_ATTRIBUTES} "
            "attributes"
        )
    return items


def _drawn_item(names: list[str], text: str) -> str:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return names[int.from_bytes(digest, "little") % len(names)]
