"""Chat messages of a request, as a model's chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hjax.serving.fields import Fields, shown
from hjax.serving.refusal import Refused

# Of OpenAI's roles; templates know `developer` under its older name.
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}


def read_messages(given: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages.

    Raises:
      Refused: none, or one that is no message of text.
    """
    if not given:
        raise Refused("messages: give at least one", param="messages")
    return [_message(f"messages[{i}]", each) for i, each in enumerate(given)]


def _message(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refused(f"{name}={shown(given)}: an object with role and content", param=name)
    fields = Fields(given, name)
    role = fields.text("role")
    if role not in _ROLES:
        raise Refused(f"{name}.role={role!r}: {', '.join(_ROLES)}", param=f"{name}.role")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = fields.list("tool_calls") if role == "assistant" else []
    content = fields.take("content")
    if content is None and not calls:
        raise Refused(f"{name}.content is missing", param=f"{name}.content")
    message["content"] = _content(f"{name}.content", content)
    if calls:
        message["tool_calls"] = [
            _call(f"{name}.tool_calls[{i}]", each) for i, each in enumerate(calls)
        ]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if value := fields.text(key):
            message[key] = value
    fields.only("refusal", "")
    fields.only("annotations", [])
    fields.end()
    return message


def _content(name: str, given: Any) -> str:
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise Refused(f"{name}={shown(given)}: a string, or an array of text parts", param=name)
    for part in given:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise Refused(f"{name} has {shown(part)}: only parts of text are supported", param=name)
    return "".join(part["text"] for part in given)


def _call(name: str, given: Any) -> dict[str, Any]:
    """Templates write the arguments out as JSON, so they want the object, not its text."""
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(f"{name}={shown(given)}: an object with a function's name", param=name)
    arguments = function.get("arguments", "{}")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise Refused(
            f"{name}.function.arguments={shown(arguments)}: JSON text of an object", param=name
        )
    call = {"type": "function", "function": {"name": function["name"], "arguments": parsed}}
    return call | ({"id": given["id"]} if isinstance(given.get("id"), str) else {})
