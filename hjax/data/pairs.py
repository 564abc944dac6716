"""Preference pairs: a chosen and a rejected answer to a prompt, as published files write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.errors import DataError

SIDES = ("chosen", "rejected")
# Where the answer of a dialogue written as text begins (hh-rlhf).
_TURN = "\n\nAssistant:"


def with_prompt(row: dict[str, Any], where: str, prompt_columns: tuple[str, ...]) -> dict[str, Any]:
    """A row whose prompt stands in its pair alone, with the prompt apart; other rows as they are.

    ``chosen`` and ``rejected`` may each be a whole dialogue, as text (hh-rlhf) or as chat messages:
    the prompt is what both begin with, of a text up to the last ``Assistant:`` in it.

    Args:
      row: of a file; ``where``: its place, for the error.
      prompt_columns: names of a prompt.

    Raises:
      DataError: both sides are equal, or begin with nothing in common.
    """
    given = any(row.get(key) is not None for key in prompt_columns)
    if given or any(side not in row for side in SIDES):
        return row
    chosen, rejected = (row[side] for side in SIDES)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are equal; such a pair says nothing")
    same = 0
    if isinstance(chosen, str) and isinstance(rejected, str):
        for a, b in zip(chosen, rejected):
            if a != b:
                break
            same += 1
        turn = chosen.rfind(_TURN, 0, same)
        if turn >= 0:
            same = turn + len(_TURN)
        else:
            same = max(chosen.rfind(" ", 0, same), chosen.rfind("\n", 0, same)) + 1
    elif isinstance(chosen, list) and isinstance(rejected, list):
        for a, b in zip(chosen, rejected):
            if a != b:
                break
            same += 1
    if not same:
        raise DataError(
            f"{where}: there is no prompt, and chosen and rejected begin with nothing in common; "
            "give it a column `prompt`"
        )
    apart = {side: row[side][same:] for side in SIDES}
    return row | {"prompt": chosen[:same]} | apart


def answer_text(value: Any, side: str, shown: str) -> str:
    """The text of an answer: a string, or chat messages whose last one is the assistant's.

    Args:
      value: of the column ``side``.
      shown: which row it is, for the error.

    Raises:
      DataError: it is neither.
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
