"""Tool calls in an answer as it is streamed, in the form that the chat template asks for."""

from __future__ import annotations

import dataclasses
import json
import re

from hjax.data.tool_call_forms import CallForm, CallPart, Parameters, read_calls
from hjax.rollout.stop_strings import StopStrings


@dataclasses.dataclass(frozen=True)
class AllowedCalls:
    """The tool calls that an answer may have.

    Attributes:
      form: of each.
      names: of the functions.
      constrained: whether a constraint enforces the form, and text of any form before it. Then
        calls are streamed as they are written; else they are returned once the whole text has
        turned out to be calls.
      forced: whether the answer is calls and nothing else.
      finish: the finish reason of an answer with calls.
      parameters: by function the JSON schema of its arguments.
    """

    form: CallForm
    names: tuple[str, ...]
    constrained: bool = False
    forced: bool = False
    finish: str = "tool_calls"
    parameters: Parameters = dataclasses.field(default_factory=dict)

    def reader(self) -> CallReader | HeldCalls:
        """A parser of one answer."""
        return HeldCalls(self) if self.constrained else CallReader(self)


class _Before:
    """The text before the first call, as it is streamed."""

    def __init__(self, form: CallForm):
        self._tag = StopStrings([form.begin] if form.begin else [])
        self._bare = not form.begin
        self._seen = ""  # text that may be a bare call
        self.rest: str | None = None  # from the first call on; None: none so far

    def feed(self, text: str) -> str:
        """The text that surely is no call; ``rest`` has what follows."""
        if self._bare:
            self._seen += text
            if (begun := self._seen.lstrip()) and not begun.startswith("{"):
                self._bare, text, self._seen = False, self._seen, ""
                return text
            if begun:
                self.rest, self._seen = self._seen, ""
            return ""
        # StopStrings does not return what follows the tag in a chunk, so it is fed by character;
        # that costs little beside drawing one.
        shown = ""
        for at, character in enumerate(text):
            shown += self._tag.feed(character)
            if self._tag.found is not None:
                self.rest = self._tag.found + text[at + 1 :]
                break
        return shown

    def close(self) -> str:
        """The text that was held back."""
        return self._seen + self._tag.close()


class CallReader:
    """Separates the text of a streamed answer from the calls at its end.

    Args:
      calls: that are allowed.
    """

    def __init__(self, calls: AllowedCalls):
        self._calls, self._before = calls, _Before(calls.form)

    def feed(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text that surely is no call, and no calls yet."""
        if self._before.rest is None:
            return self._before.feed(text), ()
        self._before.rest += text
        return "", ()

    def close(self) -> tuple[str, tuple[CallPart, ...]]:
        """What is left, as text or as calls; the other is empty."""
        rest = self._before.rest
        if rest is None:
            return self._before.close(), ()
        calls = read_calls(rest, self._calls.form, self._calls.names, self._calls.parameters)
        return ("" if calls else rest), calls

    @property
    def whole(self) -> bool:
        """Whether the calls that were returned are complete."""
        return True


class HeldCalls:
    """Streams text and calls whose form a constraint enforces.

    Args:
      calls: that are allowed.
    """

    def __init__(self, calls: AllowedCalls):
        form = calls.form
        self._before = _Before(form)
        # What precedes a call's arguments, and what follows them.
        self._head = re.compile(
            rf'\s*(?:{form.begin})?\s*{{"name": ?("(?:[^"\\]|\\.)*"), ?"{form.arguments}": ?(?={{)'
        )
        self._tail = re.compile(rf"\}}\s*{form.end}")
        if calls.forced:
            self._before.rest = ""
        self._open: _Object | None = None  # the arguments that are being parsed
        self._count = 0
        self.whole = True

    def feed(self, text: str) -> tuple[str, tuple[CallPart, ...]]:
        """The text that is no call, and what is new of calls."""
        shown = ""
        if self._before.rest is None:
            shown = self._before.feed(text)
            if self._before.rest is None:
                return shown, ()
            rest = self._before.rest
        else:
            rest = self._before.rest + text
        parts: list[CallPart] = []
        while rest:
            if self._open is not None:
                size = self._open.take(rest)
                parts.append(CallPart(self._count - 1, rest[:size]))
                rest = rest[size:]
                if self._open.ended:
                    self._open = None
            elif not self.whole:  # the end of a call
                if (found := self._tail.match(rest)) is None:
                    break
                rest, self.whole = rest[found.end() :], True
            else:
                if (found := self._head.match(rest)) is None:
                    break
                parts.append(CallPart.first(self._count, json.loads(found[1])))
                rest, self.whole = rest[found.end() :], False
                self._count += 1
                self._open = _Object()
        self._before.rest = rest
        return shown, tuple(parts)

    def close(self) -> tuple[str, tuple[CallPart, ...]]:
        """What is left, as text. The beginning of a call without a name is dropped."""
        return ("" if self._before.rest is not None else self._before.close()), ()


class _Object:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False
        self.ended = False

    def take(self, text: str) -> int:
        """How many of the next characters belong to it."""
        for at, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.ended = True
                    return at + 1
        return len(text)
