"""Whether a chat template only appends: is a call's prompt with what was sampled the beginning of
the next call's prompt?

It is found by rendering scripted conversations: two questions (UAUA), a tool call with its result
(UCTA), both (UCTAUA), each without thoughts, with thoughts that are given back, and with thoughts
that an agent's messages leave out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from hjax.data.tokenizer import Tokenizer
from hjax.errors import DataError

Messages = list[dict[str, Any]]
# How a template continues a call's prompt: it keeps prompt and sample; writes the sample otherwise;
# writes an earlier part of the prompt otherwise; or refuses the conversation.
SAME, SAMPLED, PROMPT, REFUSED = "same", "sampled", "prompt", "refused"
KINDS = ("append-only", "strips thoughts", "rewrites turns", "loses calls", "refuses tools")

_ANSWER, _THOUGHT, _RESULT = "The answer.", "I think.", "7"
_ARGUMENTS = {"a": 3, "b": 4}
_NUMBER = {"type": "integer"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": _NUMBER, "b": _NUMBER},
            "required": ["a", "b"],
        },
    },
}
# gpt-oss writes the recipient of a call after the channel, its template before.
_HARMONY_CALL = " to=functions.add<|channel|>commentary json<|message|>"
_SAMPLED_HARMONY_CALL = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
# Speakers of a conversation: user, answer, call, tool.
_CONVERSATIONS = ("UAUA", "UCTA", "UCTAUA")
_THOUGHTS = ("plain", "thoughts", "thoughts dropped")


@dataclasses.dataclass(frozen=True)
class TemplateContinuation:
    """How a chat template continues conversations.

    Attributes:
      marks: by conversation and kind of thoughts, such as ("UCTA", "plain"), for each prompt after
        the first SAME, SAMPLED or PROMPT; (REFUSED,) where the template raises.
      loses_calls: whether it leaves a tool call out of the conversation.
    """

    marks: Mapping[tuple[str, str], tuple[str, ...]]
    loses_calls: bool

    @property
    def refuses_tools(self) -> bool:
        """Whether it raises for a tool call or its result."""
        return self.marks["UCTA", "plain"] == (REFUSED,)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if self.refuses_tools:
            return "refuses tools"
        if self.loses_calls:
            return "loses calls"
        plain = [self.marks[talk, "plain"] for talk in _CONVERSATIONS]
        if any(mark != SAME for marks in plain for mark in marks):
            return "rewrites turns"
        given_back = [self.marks[talk, "thoughts"] for talk in _CONVERSATIONS]
        same = all(mark == SAME for marks in given_back for mark in marks)
        return "append-only" if same else "strips thoughts"


def template_continuation(tokenizer: Tokenizer) -> TemplateContinuation:
    """How a tokenizer's chat template continues conversations.

    Raises:
      DataError: there is no template, or it refuses a plain conversation.
    """
    script = _Script(tokenizer)
    marks = {(talk, how): script.marks(talk, how) for talk in _CONVERSATIONS for how in _THOUGHTS}
    return TemplateContinuation(marks, script.loses_calls)


class _Script:
    """Renders scripted conversations with one template."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._system: Messages = [{"role": "system", "content": "Be terse."}]
        if self._rendered([*self._system, _user(1)], False) is None:
            self._system = []
        tokenizer.chat([*self._system, _user(1)], True)  # which says what is wrong

    @functools.cached_property
    def loses_calls(self) -> bool:
        """Whether a call, or its arguments, stand nowhere in the rendering of a conversation."""
        before = [*self._system, _user(1)]
        whole = self._rendered([*before, _assistant("", call=True)], False, [_TOOL])
        other = self._rendered([*before, _assistant("", call=True, value=86420)], False, [_TOOL])
        return whole is not None and whole == other

    @functools.cached_property
    def _arguments_are_text(self) -> bool:
        """Whether the template takes a call's arguments as JSON text alone."""
        before, call = [*self._system, _user(1)], _assistant("", call=True)
        return (
            self._rendered([*before, call], False, [_TOOL]) is None
            and self._rendered([*before, _with_text_arguments(call)], False, [_TOOL]) is not None
        )

    @functools.cached_property
    def _thoughts(self) -> str:
        """Where thoughts stand: in the message's ``field`` for them, at the beginning of the
        ``content`` (the template opens them itself), in the ``sample`` alone, since the template
        leaves them out; or nowhere: it knows none."""
        before = [*self._system, _user(1)]
        whole = self._rendered([*before, _assistant(_ANSWER, thought=_THOUGHT)], False)
        asked = self._rendered(before, True) or ""
        if whole is not None and _THOUGHT in whole:
            return "field"
        if asked.rstrip().endswith("<think>"):
            return "content"
        return "sample" if "<think>" in (self._tokenizer.template_for([_TOOL]) or "") else ""

    def marks(self, talk: str, how: str) -> tuple[str, ...]:
        """The marks of a conversation, see ``TemplateContinuation``."""
        thought = _THOUGHT if how != "plain" and self._thoughts else ""
        tools = [_TOOL] if "C" in talk else None
        messages, prompts, sampled = [*self._system], list[str](), list[str | None]()
        for at, speaker in enumerate(talk):
            if speaker == "U":
                messages = [*messages, _user(1 + talk[:at].count("U"))]
            elif speaker == "T":
                result = {"role": "tool", "content": _RESULT, "name": "add"}
                messages = [*messages, result | {"tool_call_id": "call00000"}]
            else:
                turn = self._turn(speaker == "C", thought)
                prompt = self._rendered(messages, True, tools)
                whole = self._rendered([*messages, turn], False, tools)
                if prompt is None or whole is None:
                    return (REFUSED,)
                prompts.append(prompt)
                sampled.append(self._sampled(prompt, whole, turn, thought))
                kept = "" if how == "thoughts dropped" else thought
                messages = [*messages, self._turn(speaker == "C", kept)]
        return tuple(map(_mark, prompts, sampled, prompts[1:]))

    def _turn(self, call: bool, thought: str) -> dict[str, Any]:
        text = "" if call else _ANSWER
        if thought and self._thoughts == "content":
            text, thought = f"{thought}\n</think>\n\n{text}", ""
        turn = _assistant(text, call=call, thought=thought)
        return _with_text_arguments(turn) if call and self._arguments_are_text else turn

    def _sampled(
        self, prompt: str, whole: str, turn: Mapping[str, Any], thought: str
    ) -> str | None:
        """What a model samples after a prompt, by the rendering of the conversation with it; None:
        the rendering does not say."""
        lost = "tool_calls" in turn and self.loses_calls
        if lost or not whole.startswith(prompt) or (thought and self._thoughts == "sample"):
            return None
        text = whole[len(prompt) :].replace(_HARMONY_CALL, _SAMPLED_HARMONY_CALL)
        return self._tokenizer.turn_ends.cut(text)[0]

    def _rendered(self, messages: Messages, asks: bool, tools: Any = None) -> str | None:
        given = {} if tools is None else {"tools": tools}
        try:
            return self._tokenizer.chat(messages, asks, **given)
        except DataError:
            return None


def _mark(prompt: str, sampled: str | None, following: str) -> str:
    if not following.startswith(prompt):
        return PROMPT
    return SAME if sampled is not None and following.startswith(prompt + sampled) else SAMPLED


def _user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {number}?"}


def _assistant(
    text: str, *, call: bool = False, thought: str = "", value: int = 3
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if call:
        function = {"name": "add", "arguments": _ARGUMENTS | {"a": value}}
        message["tool_calls"] = [{"id": "call00000", "type": "function", "function": function}]
    thoughts = {"reasoning_content": thought, "thinking": thought} if thought else {}
    return message | thoughts


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(_ARGUMENTS)}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}
