"""Conversations as demonstrations: each turn of the assistant's answers what stands before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.data.pairs import SIDES
from hjax.errors import DataError

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
