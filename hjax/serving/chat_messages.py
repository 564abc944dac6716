"""Chat messages of a request, as a model's chat template takes them."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from hjax.serving.fields import RequestFields, as_json
from hjax.serving.request_errors import RequestRefused


def _text(content: Any) -> Any:
    """The joined text of a list of content parts."""
    if not isinstance(content, list):
        return content
    for part in content:
        match part:
            case {"type": "text", "text": str()}:
                continue
        raise ValueError(f"has {as_json(part)}: only parts of text are supported")
    return "".join(part["text"] for part in content)


def _object(arguments: Any) -> Any:
    """Templates write the arguments as JSON themselves, so they take the object, not its text."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise ValueError("JSON text of an object") from None


class _Function(RequestFields, extra="ignore"):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_object)] = {}


class _Call(RequestFields, extra="ignore"):
    function: _Function
    id: str = ""


class ChatMessage(RequestFields):
    """A message of a request."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text)] = None
    tool_calls: list[_Call] = []
    name: str = ""
    tool_call_id: str = ""
    reasoning_content: str = ""
    refusal: Literal[""] = ""
    annotations: list[Any] = Field([], max_length=0)


Messages = Annotated[list[ChatMessage], Field(min_length=1), FailFast()]


def for_template(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as a chat template takes them.

    Raises:
      RequestRefused: one without content, or tool calls in a message that is not the assistant's.
    """
    return [_written(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _written(name: str, message: ChatMessage) -> dict[str, Any]:
    if "tool_calls" in message.model_fields_set and message.role != "assistant":
        field = f"{name}.tool_calls"
        raise RequestRefused(
            f"{field}: only in the assistant's messages; leave it out", param=field
        )
    if message.content is None and not message.tool_calls:
        raise RequestRefused(f"{name}.content is missing", param=f"{name}.content")
    # Templates know `developer` by its older name.
    role = "system" if message.role == "developer" else message.role
    written: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.tool_calls:
        written["tool_calls"] = [
            {"type": "function", "function": call.function.model_dump()}
            | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    for key in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, key):
            written[key] = value
    return written
