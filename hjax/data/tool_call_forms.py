"""Tool calls in a turn's text: the forms that chat templates have models write them in."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

_FUNCTION = re.compile(r"<function=([^<>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class CallForm:
    """How a model writes a tool call: JSON with a name and arguments, or tags around each.

    Attributes:
      begin, end: the tags around it; empty: the call is the whole answer.
      arguments: the JSON's key of the arguments.
      in_tags: whether it is ``<function=NAME>`` with ``<parameter=KEY>`` around each value instead.
    """

    begin: str
    end: str
    arguments: str
    in_tags: bool = False

    @property
    def several(self) -> bool:
        """Whether an answer may have several calls."""
        return bool(self.begin)


# Those of Hermes and Qwen up to 3; of Qwen 3.5 and Nemotron 3; and of Llama 3.
TAGGED = CallForm("<tool_call>", "</tool_call>", "arguments")
IN_TAGS = CallForm("<tool_call>", "</tool_call>", "", in_tags=True)
BARE = CallForm("", "", "parameters")


def call_form(template: str) -> CallForm | None:
    """How a chat template has the model write calls; None: it does not say, or in another form."""
    if all(part in template for part in (TAGGED.begin, TAGGED.end, '"name"', '"arguments"')):
        return TAGGED
    if all(part in template for part in (IN_TAGS.begin, IN_TAGS.end, "<function=", "<parameter=")):
        return IN_TAGS
    if all(part in template for part in ("""'{"name": "' +""", """'"parameters": '""")):
        return BARE
    return None


@dataclasses.dataclass(frozen=True)
class CallPart:
    """Part of a tool call, or all of it.

    Attributes:
      index: of the call in its answer.
      arguments: JSON text, or its next part.
      name: of the function; "" if an earlier part has it.
      id: by which a result refers to the call; only in a call's first part.
    """

    index: int
    arguments: str
    name: str = ""
    id: str = ""

    @classmethod
    def first(cls, index: int, name: str, arguments: str = "") -> CallPart:
        """A call's first part, with a new id."""
        return cls(index, arguments, name, f"call_{secrets.token_hex(12)}")

    @classmethod
    def merged(cls, parts: Sequence[CallPart]) -> tuple[CallPart, ...]:
        """The calls that parts, in order, make up."""
        calls: dict[int, CallPart] = {}
        for part in parts:
            old = calls.get(part.index)
            whole = part.arguments if old is None else old.arguments + part.arguments
            calls[part.index] = dataclasses.replace(old or part, arguments=whole)
        return tuple(calls.values())


# By function the JSON schema of its arguments.
Parameters = Mapping[str, Mapping[str, Any]]


def read_calls(
    text: str, form: CallForm, names: Sequence[str], parameters: Parameters
) -> tuple[CallPart, ...]:
    """The calls that a text consists of; none if any of it is not a call.

    Args:
      text: from the first call on.
      form: of the calls.
      names: of the functions, for calls without tags around them.
      parameters: say which values in tags are text; others are JSON.
    """
    if not form.begin:
        call = _read(text.strip(), form)
        return () if call is None or call[0] not in names else (CallPart.first(0, *call),)
    *blocks, after = text.split(form.end)
    found: list[CallPart] = []
    for block in blocks:
        before, tag, inside = block.partition(form.begin)
        if not tag or before.strip():
            return ()
        inside = inside.strip()
        call = _read_tags(inside, parameters) if form.in_tags else _read(inside, form)
        if call is None:
            return ()
        found.append(CallPart.first(len(found), *call))
    return () if after.strip() else tuple(found)


def _read(text: str, form: CallForm) -> tuple[str, str] | None:
    """A call's name, and its arguments as JSON text."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get(form.arguments, {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)


def _read_tags(text: str, parameters: Parameters) -> tuple[str, str] | None:
    """As ``_read``, of a function in tags."""
    found = _FUNCTION.fullmatch(text)
    if found is None or _PARAMETER.sub("", found[2]).strip():
        return None
    known = parameters.get(found[1], {}).get("properties", {})
    arguments = {}
    for key, value in _PARAMETER.findall(found[2]):
        arguments[key] = value
        if not _is_text(known.get(key, {})):
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = json.loads(value)
    return found[1], json.dumps(arguments, ensure_ascii=False)


def _is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a JSON schema allows texts, or does not say."""
    types = schema.get("type")
    options = schema.get("anyOf") or schema.get("oneOf") or ()
    texts = [isinstance(value, str) for value in schema.get("enum", ())]
    if types is None and not options and not texts:
        return "$ref" not in schema
    named = types if isinstance(types, list) else [types]
    return "string" in named or any(texts) or any(map(_is_text, options))


def split_calls(
    text: str, form: CallForm, parameters: Parameters
) -> tuple[str, tuple[CallPart, ...], bool]:
    """The text of a turn before its calls, the calls, and whether there is a beginning of a call
    that cannot be read (the text is then the whole turn)."""
    if not form.begin:
        call = _read(text.strip(), form) if text.lstrip().startswith("{") else None
        if call is None:
            return text, (), False
        return "", (CallPart.first(0, *call),), False
    before, tag, rest = text.partition(form.begin)
    calls = read_calls(tag + rest, form, (), parameters) if tag else ()
    return (before, calls, False) if calls else (text, (), bool(tag))
