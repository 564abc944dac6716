"""Whether a chat template writes each part of a conversation: a template ignores what it does not
know, without a word."""

from collections.abc import Iterator, Sequence
from typing import Any

from hjax.data.chat_messages import REASONING, MessageError
from hjax.data.conversation import Conversation
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError

Messages = list[dict[str, Any]]
# What is added to a part: where the rendering stays the same, the template leaves the part out.
_MARK = " \u00b7\u00b7"


class TemplateCoverage:
    """Checks conversations against a tokenizer's template, each kind of part once.

    Args:
      tokenizer: whose template it is.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._written: set[tuple[Any, ...]] = set()

    def check(self, conversation: Conversation, names: Sequence[str]) -> None:
        """Raise MessageError for a part that the template leaves out.

        Names of tools in their results may be left out where the calls have them.

        Args:
          conversation: the chat, with its answer if there is one.
          names: of the messages in errors, the last of them if another stands before.
        """
        messages = conversation.messages
        names = [*["data.system"] * (len(messages) - len(names)), *names]
        if conversation.tools:
            self._require(("tools",), "tools", conversation, messages, messages, tools=None)
        for i, message in enumerate(messages):
            # Of the assistant's turns templates write all when they are the last.
            seen = messages[: i + 1] if message["role"] == "assistant" else messages
            for kind, field, changed in _changes(message, i):
                other = [*seen[:i], changed, *seen[i + 1 :]]
                known = field == "name" and message["role"] == "tool" and _called(
                    message["name"], messages[:i]
                )
                if not known:
                    self._require(kind, f"{names[i]}.{field}", conversation, seen, other)

    def _require(
        self,
        kind: tuple[Any, ...],
        field: str,
        conversation: Conversation,
        messages: Messages,
        changed: Messages,
        **tools: None,
    ) -> None:
        """Raise unless the changed messages, or no tools, are rendered differently."""
        if kind in self._written:
            return
        given = {"tools": conversation.tools or None, **conversation.template_arguments}
        text = self._render(messages, given)
        if text is None:
            return
        if text == self._render(changed, given | tools):
            raise MessageError(
                f"{field}: the chat template of tokenizer {self._tokenizer.name} leaves it out; "
                + ("rename the column (data.columns=tools=NAME), " if tools else "remove it, ")
                + "or give the tokenizer a template that writes it",
                field,
            )
        self._written.add(kind)

    def _render(self, messages: Messages, variables: dict[str, Any]) -> str | None:
        try:
            return self._tokenizer.chat(messages, add_generation_prompt=False, **variables)
        except DataError:  # of the whole conversation the caller's own rendering says so
            return None


def _changes(
    message: dict[str, Any], place: int
) -> Iterator[tuple[tuple[Any, ...], str, dict[str, Any]]]:
    """(kind, field, message with another value of it) of each part."""
    role, calls = message["role"], message.get("tool_calls", [])
    form = (role, place == 0, bool(calls), bool(message["content"]), REASONING[0] in message)
    if message["content"]:
        yield (*form, "content"), "content", message | {"content": message["content"] + _MARK}
    for key in ("name", REASONING[0]):
        if key in message:
            without = {k: v for k, v in message.items() if k != key and k not in REASONING[:2]}
            yield (*form, key), key, without if key != "name" else _without(message, key)
    for j, call in enumerate(calls):
        function = call["function"]
        for key, other in (("name", function["name"] + "_"), ("arguments", {_MARK: 0})):
            if key == "name" or function["arguments"]:
                changed = call | {"function": function | {key: other}}
                yield (
                    (*form, key, min(j, 1)),
                    f"tool_calls[{j}].function.{key}",
                    message | {"tool_calls": [*calls[:j], changed, *calls[j + 1 :]]},
                )


def _without(message: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in keys}


def _called(name: str, messages: Messages) -> bool:
    """Whether a function of this name was called in the messages."""
    calls = (call for message in messages for call in message.get("tool_calls", ()))
    return any(call["function"]["name"] == name for call in calls)
