"""Rows of Alpaca's and of ShareGPT's columns, brought into hjax's columns (`data.format`)."""

import json
from collections.abc import Mapping
from typing import Any

from hjax.data.chat_messages import MessageError
from hjax.errors import DataError, short_repr

COLUMNS, ALPACA, SHAREGPT = FORMATS = ("columns", "alpaca", "sharegpt")
# The column that only rows of a format have.
_SIGN = {ALPACA: "instruction", SHAREGPT: "conversations"}
# Speakers of ShareGPT's turns; the value of a `function_call` is the call as JSON.
_CALL = "function_call"
_SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", _CALL), "assistant"),
    **dict.fromkeys(("observation", "tool"), "tool"),
}


def format_of(row: Mapping[str, Any]) -> str:
    """What `data.format` must be to read the row, judged by its columns; empty: not known."""
    return next((form for form, column in _SIGN.items() if row.get(column) is not None), "")


def read_format(row: dict[str, Any], form: str) -> dict[str, Any]:
    """The row with hjax's columns besides its own.

    Alpaca's `instruction`, and on a line of its own `input`, is the `prompt`, and `output` the
    `response`; of ShareGPT's turns (`from` and `value`) the `messages` are made, or the `prompt` if
    there are `chosen` and `rejected`. Either may have a column `system`.

    Raises:
      DataError: columns that are missing, wrong, or those that would be made.
    """
    if form == COLUMNS:
        return row
    if row.get(_SIGN[form]) is None:
        has = ", ".join(map(str, row)) or "nothing"
        raise DataError(
            f"data.format={form}: a row needs {_SIGN[form]!r}, and this one has {has}"
        )
    made = _read_alpaca(row) if form == ALPACA else _read_sharegpt(row)
    twice = next((name for name in made if name not in _SIDES and row.get(name) is not None), None)
    if twice:
        raise DataError(
            f"data.format={form} makes a column {twice!r}, and this row has one; rename it "
            f"(data.columns={twice}=NAME), or set data.format={COLUMNS}"
        )
    return row | made


_SIDES = ("chosen", "rejected")


def _read_alpaca(row: Mapping[str, Any]) -> dict[str, Any]:
    asked = [_text(row, "instruction"), *filter(str.strip, [_text(row, "input")])]
    turns = []
    for i, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list | tuple) or [*map(type, pair)] != [str, str]:
            raise DataError(f"history[{i}]={short_repr(pair)}: must be a question and its answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    prompt: Any = "\n".join(asked)
    if turns or _text(row, "system"):
        prompt = [*_system(row), *turns, {"role": "user", "content": prompt}]
    return {"prompt": prompt} | ({"response": row["output"]} if "output" in row else {})


def _read_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise DataError(f"conversations={short_repr(turns)}: must be a list of turns")
    messages = [_message(turn, f"conversations[{i}]") for i, turn in enumerate(turns)]
    system = _system(row)
    if system and messages and messages[0]["role"] == "system":
        raise DataError(f"system={short_repr(row['system'])}: the conversation begins with another")
    messages = system + messages
    sides = {side: row[side] for side in _SIDES if isinstance(row.get(side), Mapping)}
    if not sides:
        return {"messages": messages}
    return {"prompt": messages} | {side: [_message(sides[side], side)] for side in sides}


def _system(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = _text(row, "system")
    return [{"role": "system", "content": text}] if text else []


def _text(row: Mapping[str, Any], column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str | None):
        raise DataError(f"{column}={short_repr(value)}: must be text")
    return value or ""


def _message(turn: Any, field: str) -> dict[str, Any]:
    """A chat message of a turn; the turn's other fields stay for ``read_messages``."""
    given = dict(turn) if isinstance(turn, Mapping) else {}
    speaker, value = given.pop("from", None), given.pop("value", None)
    if speaker not in _SPEAKERS:
        wanted = f"must be one of {', '.join(_SPEAKERS)}"
        raise MessageError(f"{field}.from={short_repr(speaker)}: {wanted}", f"{field}.from")
    if not isinstance(value, str):
        raise MessageError(f"{field}.value={short_repr(value)}: must be text", f"{field}.value")
    if {"role", "content"} & given.keys():
        raise MessageError(f"{field}: role or content stand beside from and value", field)
    message = {"role": _SPEAKERS[speaker]} | given
    if speaker != _CALL:
        return message | {"content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        wanted = "must be JSON text of the call"
        raise MessageError(f"{field}.value={short_repr(value)}: {wanted}", field) from None
    return message | {"tool_calls": calls if isinstance(calls, list) else [calls]}
