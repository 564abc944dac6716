"""Rows of published preference pairs, brought into hjax's columns.

A preference pair is a prompt with a chosen and a rejected response.
"""

import itertools
from collections.abc import Mapping
from typing import Any

from hjax.data.invalid_rows import EQUAL_PAIR
from hjax.errors import DataError

SIDES = ("chosen", "rejected")
# Begins an assistant turn in a dialogue that is written as text (hh-rlhf).
_ASSISTANT_TURN = "\n\nAssistant:"


def split_off_prompt(row: dict[str, Any], prompt_columns: tuple[str, ...]) -> dict[str, Any]:
    """Split the prompt off a pair that has none of its own; other rows are returned unchanged.

    ``chosen`` and ``rejected`` may each be a whole dialogue, as text (hh-rlhf) or as chat messages.
    Their common prefix becomes the prompt; in text the prefix ends at its last ``Assistant:``.

    Args:
      row: of a file.
      prompt_columns: names of columns that hold a prompt.

    Raises:
      DataError: both sides are equal, or have no common prefix.
    """
    given = any(row.get(key) is not None for key in prompt_columns)
    if given or any(side not in row for side in SIDES):
        return row
    chosen, rejected = (row[side] for side in SIDES)
    if chosen == rejected:
        raise DataError("chosen and rejected are equal: the pair says nothing", kind=EQUAL_PAIR)
    same = 0
    if type(chosen) is type(rejected) in (str, list):
        equal = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected))
        same = len(list(equal))
    if same and isinstance(chosen, str):
        turn = chosen.rfind(_ASSISTANT_TURN, 0, same)
        word = max(chosen.rfind(" ", 0, same), chosen.rfind("\n", 0, same)) + 1
        same = word if turn < 0 else turn + len(_ASSISTANT_TURN)
    if not same:
        raise DataError(
            "there is no prompt, and chosen and rejected begin with nothing in common; give it a "
            "column `prompt`"
        )
    apart = {side: row[side][same:] for side in SIDES}
    return row | {"prompt": chosen[:same]} | apart


def parse_response(value: Any, side: str, shown: str) -> str:
    """The text of a response: a string, or the last of chat messages, which is the assistant's.

    Args:
      value: of the column ``side``.
      shown: names the row in errors.

    Raises:
      DataError: the value is neither.
    """
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        last = value[-1]
        if last.get("role") != "assistant":
            raise DataError(
                f"the {side} answer of {shown} ends with a message of {last.get('role')!r}; the "
                "last one must be the assistant's"
            )
        value = last.get("content")
    if not isinstance(value, str):
        raise DataError(
            f"the {side} answer of {shown} is {value!r}; it must be text, or chat messages of "
            "which the last is the assistant's"
        )
    return value


# Columns that may hold a demonstration, in order of preference.
RESPONSE_COLUMNS = ("response", "demonstration", "completion")
