"""Rows of published preference pairs, brought into hjax's columns.

A preference pair is a prompt with a chosen and a rejected response.
"""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hjax.data.chat_messages import read_messages, read_weights
from hjax.data.invalid_rows import EQUAL_PAIR
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError, short_repr

Messages = list[dict[str, Any]]

SIDES = ("chosen", "rejected")
# Columns that may hold a demonstration, in order of preference.
RESPONSE_COLUMNS = ("response", "demonstration", "completion")
# Begin turns in a dialogue that is written as text (hh-rlhf).
_ASSISTANT_TURN, _USER_TURN = "\n\nAssistant:", "\n\nHuman:"
# The kind of a pair whose answers have several turns each.
_PARTS_EARLY = "pair that parts before its last turn"
_ONE_TURN = "an answer is the one turn after what both share, so end both there"


def split_off_prompt(
    row: dict[str, Any],
    prompt_columns: tuple[str, ...],
    tokenizer: Tokenizer | None,
    as_chat: Callable[[str], Messages],
) -> dict[str, Any]:
    """Give a row with answers its prompt, and its answers what follows the prompt.

    Rows whose answers are text behind a prompt of their own are returned unchanged, and so are rows
    without answers. Otherwise ``chosen`` and ``rejected`` are

    - texts that begin with the prompt (hh-rlhf): it is what both share up to the last
      ``Assistant:``, or up to a word, and ends where a token of both ends;
    - chat messages, whole or only those that follow the prompt: it becomes all messages that both
      share, and an answer the one turn after them. A prompt that is text is the first or last
      message of the user's in them, or the user's message before them.

    A single response may be chat messages too.

    Args:
      row: of a file.
      prompt_columns: names of columns that hold a prompt.
      tokenizer: of the run.
      as_chat: makes the chat that a prompt as text begins.

    Raises:
      DataError: both answers are equal, have nothing in common where there is no prompt, or part
        before their last turn.
    """
    names = SIDES if all(row.get(side) is not None for side in SIDES) else RESPONSE_COLUMNS
    answers = {name: row[name] for name in names if row.get(name) is not None}
    if names == RESPONSE_COLUMNS:
        answers = dict(list(answers.items())[:1])
    chats = [has_roles(answer) for answer in answers.values()]
    prompt = next((row[key] for key in prompt_columns if row.get(key) is not None), None)
    if any(chats):
        if not all(chats):
            raise DataError("chosen and rejected are text and chat messages; give both as one kind")
        return row | _split_chats(prompt, answers, as_chat)
    if prompt is not None or names == RESPONSE_COLUMNS:
        return row
    return row | _split_texts(answers, tokenizer)


def has_roles(value: Any) -> bool:
    """Whether a column's value is chat messages, each with the role of its speaker."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and "role" in each for each in value)
    )


def _split_texts(answers: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Prompt and answers of two texts with a common beginning."""
    chosen, rejected = answers.values()
    if chosen == rejected:
        raise DataError("chosen and rejected are equal: the pair says nothing", kind=EQUAL_PAIR)
    prompt = ""
    if isinstance(chosen, str) and isinstance(rejected, str):
        prompt = os.path.commonprefix([chosen, rejected])
        turn = prompt.rfind(_ASSISTANT_TURN)
        word = max(prompt.rfind(" "), prompt.rfind("\n")) + 1
        prompt = prompt[: word if turn < 0 else turn + len(_ASSISTANT_TURN)]
        if tokenizer is not None:
            wholes = [tokenizer.encode(text) for text in (chosen, rejected)]
            while prompt and not all(_begins(whole, tokenizer.encode(prompt)) for whole in wholes):
                prompt = prompt[:-1]
    if not prompt:
        raise DataError(
            "there is no prompt, and chosen and rejected begin with nothing in common; give it a "
            "column `prompt`"
        )
    for name, text in answers.items():
        if prompt.endswith(_ASSISTANT_TURN) and _USER_TURN in text[len(prompt) :]:
            raise DataError(
                f"chosen and rejected part before the last turn of {name}; {_ONE_TURN}",
                kind=_PARTS_EARLY,
            )
    return {"prompt": prompt} | {name: text[len(prompt) :] for name, text in answers.items()}


def _split_chats(
    prompt: Any, answers: dict[str, Any], as_chat: Callable[[str], Messages]
) -> dict[str, Any]:
    """Prompt and answers of chat messages, with or without the prompt's in them."""
    chats = {name: _read_chat(answer, name) for name, answer in answers.items()}
    before = messages_before(prompt, [*chats.values()], as_chat)
    for name, chat in chats.items():
        if not _begins(chat, before):
            if chat[0]["role"] != "assistant":
                raise DataError(
                    f"{name} begins with {short_repr(chat[0])}, and is neither an answer to the "
                    "prompt nor begins with its messages; data.columns=prompt=NAME sets that aside"
                )
            chats[name] = [*before, *chat]
    if len(chats) == 1:
        [(name, chat)] = chats.items()
        shared = len(before) or _last_turn(chat)
    else:
        chosen, rejected = chats.values()
        if chosen == rejected:
            raise DataError("chosen and rejected are equal: the pair says nothing", kind=EQUAL_PAIR)
        both = zip(chosen, rejected)
        shared = len([*itertools.takewhile(lambda two: two[0] == two[1], both)])
    rests = {name: chat[shared:] for name, chat in chats.items()}
    if not shared:
        raise DataError("there is no prompt, and chosen and rejected share no message; give it one")
    for name, rest in rests.items():
        if not rest or rest[0]["role"] != "assistant":
            raise DataError(
                f"{name} has no turn of the assistant's after the {shared} messages of the prompt"
            )
        if len(rest) > 1 and len(chats) > 1:
            raise DataError(
                f"chosen and rejected part at message {shared + 1}, and {name} has "
                f"{len(rest) - 1} more after it; {_ONE_TURN}",
                kind=_PARTS_EARLY,
            )
    return {"prompt": next(iter(chats.values()))[:shared]} | rests


def messages_before(prompt: Any, chats: list[Messages], as_chat: Callable[..., Any]) -> Messages:
    """The messages that a row's prompt puts before its answers; none where these have them."""
    if prompt is None:
        return []
    if has_roles(prompt):
        return _read_chat(prompt, "prompt")
    if not isinstance(prompt, str):
        raise DataError(
            f"the prompt is {short_repr(prompt)} beside answers as chat messages; give it as text "
            "or as messages"
        )
    if all(chat[0]["role"] == "assistant" for chat in chats):
        return as_chat(prompt)
    asked = [
        [m["content"].strip() for m in chat[: _last_turn(chat)] if m["role"] == "user"]
        for chat in chats
    ]
    if not all(turns and prompt.strip() in (turns[0], turns[-1]) for turns in asked):
        raise DataError(
            f"the prompt {short_repr(prompt)} is neither the first nor the last message of the "
            "user's before an answer; data.columns=prompt=NAME sets it aside"
        )
    return []


def _last_turn(chat: Messages) -> int:
    """The position of a chat's last message of the assistant's."""
    return max((i for i, m in enumerate(chat) if m["role"] == "assistant"), default=len(chat))


def _read_chat(value: Any, name: str) -> Messages:
    if any(weight is not None for weight in read_weights(value, name)):
        raise DataError(f"{name} has weights of messages, which only `messages` may have")
    return read_messages(value, name)


def _begins(whole: Sequence[Any], beginning: Sequence[Any]) -> bool:
    return whole[: len(beginning)] == beginning


def parse_response(value: Any, name: str) -> str | Messages:
    """A response: its text, or a list of the assistant's message.

    Args:
      value: of the column ``name``.

    Raises:
      DataError: the value is neither, or has several turns.
    """
    if isinstance(value, str):
        return value
    if not has_roles(value):
        raise DataError(
            f"{name} is {short_repr(value)}; it must be text, or chat messages of which the last "
            "is the assistant's"
        )
    messages = read_messages(value, name)
    if [message["role"] for message in messages] != ["assistant"]:
        raise DataError(
            f"{name} has {len(messages)} messages after the prompt; an answer is one turn of the "
            "assistant's, and what stands before it belongs to the prompt"
        )
    return messages
