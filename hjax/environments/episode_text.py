"""Observations as token ids: what a row has before and between the policy's turns.

Ids that the policy drew are never decoded and encoded again. An observation's ids follow them: the
end of the turn where the policy has not drawn it, what the chat template writes between two turns,
the observation, and the header of the next turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hjax.data.conversation import Conversation, response_end
from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError, short_repr

Messages = list[dict[str, Any]]
# Stands for the end of a turn of the policy where a template renders what follows it.
_TURN = "\u00b7turn\u00b7"


class Observed(Protocol):
    """An environment's answer: its text, or messages with what the template is given."""

    @property
    def observation(self) -> str:
        """Text."""

    @property
    def messages(self) -> Sequence[dict[str, Any]]:
        """Chat messages; empty: the text is a user's message."""

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Of a conversation."""

    @property
    def template_arguments(self) -> Mapping[str, Any]:
        """Of a conversation."""


class ObservationEncoder:
    """Encodes observations for one tokenizer.

    Args:
      tokenizer: of the model that plays.
      chat: whether observations are messages of a chat, by the tokenizer's template; else they are
        text as it is.
      system: system message of chats that have none; empty: none.
      variables: further variables of the chat template.

    Raises:
      DataError: a chat, and the template cannot continue one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: bool = False,
        system: str = "",
        variables: dict[str, Any] | None = None,
    ):
        self.tokenizer, self.chat = tokenizer, chat
        self._system, self._variables = system, variables or {}
        self._end = response_end(tokenizer, is_chat=chat)
        # Texts of tokens that end a turn.
        ends = [tokenizer.decode([i], skip_special=False) for i in tokenizer.eos_ids]
        self._ends = tuple(dict.fromkeys([*tokenizer.turn_ends.tokens, *filter(None, ends)]))
        if chat:
            self._between(self.conversation("1"), [{"role": "user", "content": "2"}])

    def check(self, tools: Sequence[dict[str, Any]], following: Messages) -> None:
        """Raise DataError if messages that follow a turn cannot be written in a chat with tools."""
        chat = self.conversation("1")
        self._between(dataclasses.replace(chat, tools=list(tools)), following)

    def conversation(self, first: str | Observed) -> Conversation:
        """The chat that a row begins with.

        Args:
          first: the first observation, or its text.

        Raises:
          DataError: messages, and there is no chat template.
        """
        text = first if isinstance(first, str) else first.observation
        messages: Messages = [{"role": "user", "content": text}]
        tools: list[Any] | None = None
        arguments = dict(self._variables)
        if not isinstance(first, str) and first.messages:
            if not self.chat:
                raise DataError(
                    "an environment's observation is chat messages, and turns are text here; set "
                    "data.chat=True (--chat), with a tokenizer that has a chat template"
                )
            messages, tools = list(first.messages), list(first.tools) or None
            arguments |= first.template_arguments
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        return Conversation(messages, tools, arguments)

    def begin(self, first: str | Conversation) -> list[int]:
        """Token ids of a first observation: the prompt of a row."""
        if not self.chat:
            text = first if isinstance(first, str) else first.messages[-1]["content"]
            return self.tokenizer.encode(text)
        chat = self.conversation(first) if isinstance(first, str) else first
        rendered = chat.render(self.tokenizer, add_generation_prompt=True)
        return self.tokenizer.encode(rendered, add_special=False)

    def continuation(
        self,
        first: str | Conversation,
        drawn: Sequence[int],
        ended: bool,
        following: str | Observed,
        *,
        rewritten: bool = False,
    ) -> list[int]:
        """Token ids that follow a turn of the policy.

        Args:
          first: the row's first observation.
          drawn: ids of the turn.
          ended: whether the turn has ended: by a token, or without chat by a stop string.
          following: the observation, or its text.
          rewritten: whether the template may write the chat before the turn otherwise where others
            follow, as the row keeps what it has.

        Raises:
          DataError: the template cannot continue the chat.
        """
        text = following if isinstance(following, str) else following.observation
        has_end = bool(drawn) and drawn[-1] in self.tokenizer.eos_ids
        if not self.chat:
            self.conversation(following)  # which refuses messages
            return ([] if ended or has_end else self._end) + self._after_a_turn(text)
        chat = self.conversation(first) if isinstance(first, str) else first
        messages: Messages = [{"role": "user", "content": text}]
        if not isinstance(following, str) and following.messages:
            messages = list(following.messages)
        ids = self._after_a_turn(self._between(chat, messages, rewritten))
        # The end that was drawn stays, also where it is not the one that the template writes.
        ends = {*drawn[-1:], *self._end}
        return ids[1:] if has_end and ids and ids[0] in ends else ids

    def _between(
        self, chat: Conversation, following: Messages, rewritten: bool = False
    ) -> str:
        """What the template writes from the end of a turn to the header of the next.

        The turn is rendered with a mark where it ends: its content, or in a call the value of its
        last argument, of which the template writes the rest.

        Args:
          chat: that the row begins with.
          following: messages; the first may be the turn itself, with its calls.
          rewritten: whether the chat may be written otherwise.

        Raises:
          DataError: it writes earlier messages differently where others follow, or loses them.
        """
        turn = following[0] if following[0]["role"] == "assistant" else {"role": "assistant"}
        following = following[1:] if following[0] is turn else following
        marked, tokenizer = _marked(turn), self.tokenizer
        before = ""
        if not rewritten:
            alone = [chat.render(tokenizer, add_generation_prompt=asks) for asks in (False, True)]
            before = os.path.commonprefix(alone)
        whole = chat.render(tokenizer, [marked, *following], add_generation_prompt=True)
        head, found, rest = whole.partition(_TURN)
        texts = [each["content"].strip() for each in following]
        ends = [at for end in self._ends if (at := rest.find(end)) >= 0]
        at = min(ends, default=0)
        lost = any(not any(form in rest for form in _forms(text)) for text in texts)
        inside = "tool_calls" not in turn and rest[:at].strip()
        if not head.startswith(before) or not found or _TURN in rest or lost or inside or (
            "tool_calls" in turn and not ends
        ):  # fmt: skip
            raise DataError(
                f"tokenizer {tokenizer.name}: its chat template cannot continue a chat after "
                f"{short_repr(before, 80)}: it writes {short_repr(whole, 160)}; take a template "
                "that only appends (of Mistral's, one whose system message stays first), leave the "
                "system message out, or set data.chat=False"
            )
        return rest[at:] if "tool_calls" in turn else rest

    def _after_a_turn(self, text: str) -> list[int]:
        """Token ids of a text as what follows another: no BOS, and no blank in front."""
        if self._line_break is not None:
            ids = self.tokenizer.encode("\n" + text, add_special=False)
            if ids[: len(self._line_break)] == self._line_break:
                return ids[len(self._line_break) :]
        return self.tokenizer.encode(text, add_special=False)

    @functools.cached_property
    def _line_break(self) -> list[int] | None:
        """Its ids; None: it is outside a small vocabulary."""
        with contextlib.suppress(DataError):
            return self.tokenizer.encode("\n", add_special=False)
        return None


def _marked(turn: Mapping[str, Any]) -> dict[str, Any]:
    """A turn of the assistant's with the mark at its end."""
    *calls, last = turn.get("tool_calls") or [None]
    if last is None:
        return {"role": "assistant", "content": _TURN}
    name = next(reversed(last["function"]["arguments"] or {"x": 0}))
    marked = last | {"function": last["function"] | {"arguments": {name: _TURN}}}
    kept = {key: turn[key] for key in ("role", "content")}
    return kept | {"tool_calls": [*calls, marked]}


def _forms(text: str) -> tuple[str, ...]:
    """A text as templates may write it: as it is, or as JSON."""
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]
