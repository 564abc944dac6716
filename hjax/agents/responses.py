"""OpenAI's responses API as chat completions: the request, the answer, and its events."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hjax.serving.request_errors import RequestRefused

# Fields with the same meaning in both, and those of a chat for others.
_SAME = (
    "model", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "stream", "metadata",
    "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
# What changes nothing here: nothing is stored, or told beside the answer.
_NEUTRAL = ("store", "include", "stream_options", "truncation", "reasoning", "text")
_READ = ("input", "instructions", "tools", "tool_choice", "max_output_tokens")
_NO_CALLS = ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls")


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion that a request for a response asks for.

    Raises:
      RequestRefused: a field or an item that is not supported, such as a stored response or a tool
        of OpenAI's own.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given:
        if name in _NO_CALLS and given[name]:
            said = "responses are not kept, so give the whole input; leave it out"
            raise RequestRefused(f"{name}: {said}", param=name)
        if name not in (*_SAME, *_NEUTRAL, *_READ, *_NO_CALLS):
            raise RequestRefused(f"{name}: not supported here; leave it out", param=name)
    made = {name: given[name] for name in _SAME if name in given}
    made["messages"] = _messages(given)
    if tools := given.get("tools"):
        made["tools"] = [_tool(tool, i) for i, tool in enumerate(tools)]
    choice = given.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        made["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif choice is not None:
        made["tool_choice"] = choice
    if "max_output_tokens" in given:
        made["max_tokens"] = given["max_output_tokens"]
    if isinstance(text := given.get("text"), Mapping) and (form := text.get("format")):
        if form.get("type") == "json_schema":
            schema = {name: value for name, value in form.items() if name != "type"}
            form = {"type": "json_schema", "json_schema": schema}
        made["response_format"] = form
    return made


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    items, found = given.get("input", []), list[dict[str, Any]]()
    if instructions := given.get("instructions"):
        found.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*found, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RequestRefused("input must be text or a list of items", param="input")
    for i, item in enumerate(items):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            found.append({"role": item.get("role"), "content": _content(item, i)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": None})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = _content({"content": item.get("output")}, i)
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind != "reasoning":  # of another server's
            said = f"input[{i}] of type {kind!r} is not supported here; leave it out"
            raise RequestRefused(said, param="input")
    return found


def _content(item: Mapping[str, Any], i: int) -> Any:
    content = item.get("content")
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            said = f"input[{i}] has a part that is no text; only text is supported"
            raise RequestRefused(said, param="input")
    return "".join(part["text"] for part in content)


def _tool(tool: Any, i: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        said = f"tools[{i}] of type {kind!r}: only functions are supported; leave it out"
        raise RequestRefused(said, param="tools")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def response_object(whole: Mapping[str, Any]) -> dict[str, Any]:
    """A whole chat completion as a response."""
    [choice] = whole["choices"]
    message, usage = choice["message"], whole["usage"]
    cut = choice["finish_reason"] == "length"
    status = "incomplete" if cut else "completed"
    output: list[dict[str, Any]] = []
    if message["content"] or not message.get("tool_calls"):
        part: dict[str, Any] = {
            "type": "output_text",
            "text": message["content"] or "",
            "annotations": [],
        }
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant"}
        output.append(head | {"status": status, "content": [part]})
    for call in message.get("tool_calls", ()):
        head = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": status}
        output.append(head | {"call_id": call["id"], **call["function"]})
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": whole["created"],
        "model": whole["model"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": None,
        "metadata": {},
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0} | usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a response's stream, numbered."""
    for number, event in enumerate(_events(response)):
        yield event | {"sequence_number": number}


def _events(response: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for index, item in enumerate(response["output"]):
        at = {"item_id": item["id"], "output_index": index}
        begun = item | {"status": "in_progress"}
        if item["type"] == "function_call":
            text, kind = item["arguments"], "response.function_call_arguments"
            parts: Sequence[dict[str, Any]] = (
                {"type": f"{kind}.delta", **at, "delta": text},
                {"type": f"{kind}.done", **at, "arguments": text, "name": item["name"]},
            )
            begun["arguments"] = ""
        else:
            [part] = item["content"]
            at["content_index"] = 0
            empty = part | {"text": ""}
            parts = (
                {"type": "response.content_part.added", **at, "part": empty},
                {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []},
                {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []},
                {"type": "response.content_part.done", **at, "part": part},
            )
            begun["content"] = []
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        yield from parts
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    end = "completed" if response["status"] == "completed" else "incomplete"
    yield {"type": f"response.{end}", "response": dict(response)}
