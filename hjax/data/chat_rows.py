"""Rows with chats: which messages are the prompt, which turn answers it, and what a row adds."""

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.data.chat_messages import (
    MessageError,
    read_messages,
    read_template_arguments,
    read_tools,
    read_weights,
)
from hjax.data.conversation import Conversation
from hjax.data.invalid_rows import InvalidRows
from hjax.data.preference_pairs import RESPONSE_COLUMNS, SIDES, has_roles, messages_before
from hjax.data.read_options import ReadOptions
from hjax.data.template_coverage import TemplateCoverage
from hjax.errors import DataError, short_repr

MESSAGES_COLUMN = "messages"
# Columns with tools, and with further variables of the chat template.
_TOOLS, _OLD_TOOLS = "tools", "functions"
_ARGUMENTS = ("chat_template_kwargs", "template_arguments")

Rows = Sequence[tuple[str, dict[str, Any]]]
Messages = list[dict[str, Any]]


def assistant_turns(
    rows: Rows,
    prompt_columns: Sequence[str],
    learns_demonstrations: bool,
    options: ReadOptions,
    coverage: TemplateCoverage | None,
    invalid: InvalidRows,
) -> list[tuple[str, dict[str, Any]]]:
    """One row per learned assistant turn of a conversation; other rows are returned unchanged.

    A conversation is the column `messages`, or a prompt with a response that is a list of messages.
    In each row `prompt` holds the messages before the turn and `response` the turn: its text, or
    the message where it has more than text. So each assistant token is learned from exactly once,
    and no token of another speaker is. A turn whose `weight` is 0 is only context. The other
    columns of the conversation are copied.

    Args:
      rows: (location, row) pairs of a file.
      prompt_columns: names of columns that hold a prompt.
      learns_demonstrations: the run learns from demonstrations, so `messages` win over a prompt
        and over pairs, and a response may have several turns.
      options: make chats of texts.
      coverage: checks that the chat template writes the conversations; None without a tokenizer.
      invalid: checks the rows: malformed messages, no turn to learn, or one that comes first.
    """
    made: list[tuple[str, dict[str, Any]]] = []
    for where, row in rows:
        with invalid.checking(where, "unusable messages"):
            turns = _turns(row, prompt_columns, learns_demonstrations, options, coverage)
            made += [(where, each) for each in turns]
    return made


def _turns(
    row: dict[str, Any],
    prompt_columns: Sequence[str],
    learns_demonstrations: bool,
    options: ReadOptions,
    coverage: TemplateCoverage | None,
) -> list[dict[str, Any]]:
    prompt = next((row[name] for name in prompt_columns if row.get(name) is not None), None)
    answer = next((name for name in RESPONSE_COLUMNS if row.get(name) is not None), None)
    if any(row.get(side) is not None for side in SIDES):
        if not learns_demonstrations or answer or row.get(MESSAGES_COLUMN) is None:
            return [row]
        row = {key: value for key, value in row.items() if key not in SIDES}
    before: Messages = []
    if answer is None:
        if row.get(MESSAGES_COLUMN) is None or (prompt is not None and not learns_demonstrations):
            return [row]
        name = MESSAGES_COLUMN
    else:
        name = answer
        if not has_roles(row[name]) or prompt is None or "label" in row:
            return [row]
        before = _before_answer(prompt, row[name], options, name)
    messages = before + read_messages(row[name], name)
    learned = _learned(row[name], name, len(before))
    if answer and len(learned) > 1 and not learns_demonstrations:
        return [row]
    if learned[0] == 0:
        raise DataError(f"{name} begin with the assistant's, which answers nothing")
    if coverage is not None:
        chat = _conversation(row, messages, options)
        coverage.check(chat, [*_names("prompt", before), *_names(name, messages[len(before) :])])
    rest = {key: value for key, value in row.items() if key not in prompt_columns}
    return [rest | {"prompt": messages[:at], "response": _response(messages[at])} for at in learned]


def _learned(given: Sequence[Mapping[str, Any]], name: str, offset: int) -> list[int]:
    """Places of the assistant's turns that are learned, counted from the chat's beginning."""
    turns = [i for i, message in enumerate(given) if message["role"] == "assistant"]
    if not turns:
        raise DataError(
            f"{name} have no turn of the assistant's to learn from; where a run is to answer them: "
            f"data.columns={name}=prompt"
        )
    weights = read_weights(given, name)
    learned = [offset + i for i in turns if weights[i] is not False]
    if not learned:
        raise DataError(f"{name}: every turn of the assistant's has the weight 0")
    return learned


def _before_answer(prompt: Any, answer: Any, options: ReadOptions, name: str) -> Messages:
    """The messages of a prompt that stand before an answer of messages."""
    if isinstance(prompt, str):
        return messages_before(prompt, [read_messages(answer, name)], options.chat_of)
    if not is_chat(prompt):
        raise DataError(
            f"{name} holds chat messages, and the prompt is {short_repr(prompt)}; give it as text "
            "or as messages"
        )
    return read_messages(prompt, "prompt")


def _response(message: dict[str, Any]) -> str | Messages:
    return message["content"] if message.keys() == {"role", "content"} else [message]


def is_chat(value: Any) -> bool:
    """Whether a column's value is meant as chat messages."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def read_prompt(
    row: Mapping[str, Any],
    messages: Any,
    options: ReadOptions,
    coverage: TemplateCoverage | None,
    name: str,
) -> Conversation:
    """The chat that a run answers or learns to answer, with the row's tools and template arguments.

    Args:
      row: of a file; its columns `tools` (or OpenAI's old `functions`) and `chat_template_kwargs`
        (or `template_arguments`) count beside the options.
      messages: of the prompt.
      options: `data.system` stands before a chat without system message.
      coverage: checks that the chat template writes all of it.
      name: of the prompt in errors.

    Raises:
      DataError: malformed messages, or a prompt that ends with the assistant's turn.
    """
    read = read_messages(messages, name)
    if True in read_weights(messages, name):
        raise DataError(f"{name} is not learned from, and one of its turns has the weight 1")
    if read[-1]["role"] == "assistant":
        raise MessageError(
            f"{name}[{len(read) - 1}] is the assistant's: a prompt ends with what is to be "
            "answered, and a turn is not continued; remove it",
            f"{name}[{len(read) - 1}]",
        )
    chat = _conversation(row, read, options)
    if coverage is not None:
        coverage.check(chat, _names(name, read))
    return chat


def _names(name: str, messages: Messages) -> list[str]:
    return [f"{name}[{i}]" for i in range(len(messages))]


def _conversation(row: Mapping[str, Any], messages: Messages, options: ReadOptions) -> Conversation:
    if options.system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system}, *messages]
    arguments = dict(options.template)
    for column in _ARGUMENTS:
        arguments |= read_template_arguments(row.get(column), column)
    return Conversation(messages, _tools(row) or [*map(dict, options.tools)] or None, arguments)


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools, old = read_tools(row.get(_TOOLS)), row.get(_OLD_TOOLS) or []
    if not is_chat(old) or not all("name" in function for function in old):
        return tools
    if tools:
        raise DataError(f"{_OLD_TOOLS} stands beside {_TOOLS}; keep one")
    return read_tools([{"type": "function", "function": each} for each in old], _OLD_TOOLS)


def refuse_chat_columns(row: Mapping[str, Any], options: ReadOptions, what: str) -> None:
    """Raise DataError where a prompt that is no chat has what only a chat has.

    Args:
      row: of a file.
      options: of reading.
      what: names the prompt's kind.
    """
    chats = "config.data.chat=True makes chats of texts"
    if options.system:
        raise DataError(
            f"config.data.system={options.system!r} is a chat's, and the prompt is {what}; {chats}"
        )
    for column in (_TOOLS, *_ARGUMENTS):
        if row.get(column):
            raise DataError(
                f"the column {column} is a chat's, and the prompt is {what}; {chats}, and "
                f"data.columns={column}=NAME keeps it as a column of no meaning"
            )
