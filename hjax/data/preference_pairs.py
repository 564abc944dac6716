"""Preference pairs, a chosen and a rejected answer to a prompt, as published files write them; and
conversations as demonstrations: each turn of the assistant's answers what stands before it."""

import itertools
from collections.abc import Mapping, Sequence
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
    if type(chosen) is type(rejected) in (str, list):
        equal = itertools.takewhile(lambda two: two[0] == two[1], zip(chosen, rejected))
        same = len(list(equal))
    if same and isinstance(chosen, str):
        turn = chosen.rfind(_TURN, 0, same)
        word = max(chosen.rfind(" ", 0, same), chosen.rfind("\n", 0, same)) + 1
        same = word if turn < 0 else turn + len(_TURN)
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


COLUMN = "messages"
# Where a demonstration stands; the first that a row has.
RESPONSE_COLUMNS = ("response", "demonstration", "completion")

Rows = Sequence[tuple[str, dict[str, Any]]]


def assistant_turns(
    rows: Rows, prompt_columns: Sequence[str], demonstrated: bool
) -> list[tuple[str, dict[str, Any]]]:
    """A row for each turn of the assistant in the column `messages`; other rows as they are.

    Of such a row `prompt` are the messages before the turn and `response` is its text, so that of a
    conversation the assistant's tokens are learned, each once, and nobody else's. Its other columns
    are the conversation's.

    Args:
      rows: (where, row) of a file.
      prompt_columns: names of a prompt.
      demonstrated: demonstrations are learned from: a conversation counts beside a prompt too.

    Raises:
      DataError: no list of messages with a role and a text, no turn of the assistant's, or one
        before which nothing stands.
    """
    made: list[tuple[str, dict[str, Any]]] = []
    for where, row in rows:
        answered = any(row.get(name) is not None for name in (*RESPONSE_COLUMNS, *SIDES))
        asked = any(row.get(name) is not None for name in prompt_columns)
        if row.get(COLUMN) is None or answered or (asked and not demonstrated):
            made.append((where, row))
            continue
        messages = _checked(row[COLUMN], where)
        rest = {key: value for key, value in row.items() if key not in prompt_columns}
        made.extend(
            (where, rest | {"prompt": messages[:at], "response": message["content"]})
            for at, message in enumerate(messages)
            if message["role"] == "assistant"
        )
    return made


def _checked(messages: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
    ):
        raise DataError(f"{where}: messages must be a list of chat messages, each with a role")
    roles = [m["role"] for m in messages]
    if "assistant" not in roles:
        raise DataError(
            f"{where}: messages have no turn of the assistant's to learn from; where a run "
            "is to answer them: data.columns=messages=prompt"
        )
    if roles[0] == "assistant":
        raise DataError(f"{where}: messages begin with the assistant's, which answers nothing")
    for message in messages:
        if message["role"] == "assistant" and not isinstance(message.get("content"), str):
            raise DataError(
                f"{where}: a turn of the assistant's is {message.get('content')!r}; it must be text"
            )
    return [dict(m) for m in messages]
