"""Calls of tools in an answer, where the chat template says how the model writes them."""

from __future__ import annotations

import dataclasses
import json
import re
import secrets

from hjax.rollout.stopping import StopStrings

_BEGIN, _END = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"\s*{_BEGIN}\s*(.*?)\s*{_END}\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call that the model makes.

    Attributes:
      name: of the function.
      arguments: JSON text of an object.
      id: by which the caller's answer names it.
    """

    name: str
    arguments: str
    id: str = dataclasses.field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def writes_calls(template: str) -> bool:
    """Whether a template has models write calls as JSON between tags: Hermes', Qwen's form."""
    tagged = _BEGIN in template and _END in template
    return tagged and '"name"' in template and '"arguments"' in template


def read_calls(text: str) -> tuple[ToolCall, ...]:
    """The calls that a text is made of; none if anything in it is not one."""
    calls, at = [], 0
    while at < len(text):
        block = _BLOCK.match(text, at)
        if not block:
            return ()
        try:
            call = json.loads(block[1])
        except (ValueError, RecursionError):
            return ()
        if not isinstance(call, dict):
            return ()
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return ()
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        at = block.end()
    return tuple(calls)


class CallReader:
    """Parts the text of an answer from the calls at its end, as it comes."""

    def __init__(self) -> None:
        self._before = StopStrings([_BEGIN])
        self._rest = ""

    def feed(self, text: str) -> str:
        """The text that surely is no call."""
        if self._before.found is not None:
            self._rest += text
            return ""
        # What follows the tag in the same piece is not given out by StopStrings: it is fed by
        # character, which costs little beside drawing one.
        shown = ""
        for at, character in enumerate(text):
            shown += self._before.feed(character)
            if self._before.found is not None:
                self._rest = _BEGIN + text[at + 1 :]
                break
        return shown

    def close(self) -> tuple[str, tuple[ToolCall, ...]]:
        """What is left as text, and the calls: one of them is empty."""
        calls = read_calls(self._rest)
        return ("" if calls else self._before.close() + self._rest), calls
