"""The reader of chat messages, for data files and for the server's requests.

It returns messages as chat templates take them, and refuses each field that it cannot use by name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import DataError, truncate

# Names of a message's reasoning. As in transformers each message has it under the first two, which
# are the names that templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Templates know `developer` by its older name, and `tool` by the newer one.
_ROLES = {"developer": "system", "function": "tool"} | {
    role: role for role in ("system", "user", "assistant", "tool")
}
# Fields by the role that may have them; the others stand in messages of every role.
_ROLE_OF = {"tool_call_id": "tool"} | dict.fromkeys(
    ("tool_calls", "function_call", "refusal", "annotations", *REASONING), "assistant"
)
_FIELDS = ("role", "content", "name", *_ROLE_OF)
_WEIGHTS = ("weight", "train")
# What servers and clients put into messages, their parts and calls, beside the text that a template
# writes. Messages of a request may have them, as answers are echoed with all their fields.
_DESCRIPTIVE_FIELDS = frozenset((
    "annotations", "cache_control", "created", "created_at", "extra_content", "finish_reason", "id",
    "index", "logprobs", "metadata", "model", "object", "provider_specific_fields", "status",
    "stop_reason", "thought_signature", "timestamp", "type", "usage",
))  # fmt: skip
# Other forms of a message's reasoning, for servers; the text stands in one of REASONING too.
_REASONING_BLOCKS = ("reasoning_details", "thinking_blocks")
# Variables of a template that are no arguments: hjax gives them.
_TAKEN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


class MessageError(DataError):
    """A chat message, a tool or a template's arguments that cannot be used.

    Args:
      message: one line that begins with the field.
      field: its name, such as `messages[1].tool_calls[0].function.name`.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message, kind="unusable messages")
        self.field = field


def read_messages(
    value: Any, name: str = "messages", *, request: bool = False
) -> list[dict[str, Any]]:
    """Chat messages as templates take them.

    Each has `role` and `content`, a string; of the assistant also `tool_calls`, whose arguments are
    objects, and its reasoning as `reasoning_content` and as `thinking`; `name` and `tool_call_id`
    where they are given. Parts of text are joined. The old `function_call` becomes a tool call, the
    roles `developer` and `function` become `system` and `tool`.

    Args:
      value: a list of objects. A null field counts as absent, and so does an empty one beside
        `content`.
      name: of the list, in errors.
      request: of a server, whose answers are echoed: fields that describe a message and unknown
        ones that are false or empty are left out, arguments may be empty or cut, the content of the
        assistant and of tools may be null, ids of results are not compared, and there are no
        weights.

    Raises:
      MessageError: a field that is wrong, unknown, or of another role's messages.
    """
    if not isinstance(value, list) or not value:
        raise MessageError(
            f"{name} must be a list of chat messages, each with a role, not {_shown(value)}", name
        )
    messages: list[dict[str, Any]] = []
    ids: set[str] = set()
    for i, each in enumerate(value):
        message = _read_message(each, f"{name}[{i}]", request)
        answered = message.get("tool_call_id")
        if not request and ids and answered and answered not in ids:
            wanted = f"no call before it has this id; there are {', '.join(sorted(ids))}"
            raise _invalid(f"{name}[{i}].tool_call_id", answered, wanted)
        ids |= {call["id"] for call in message.get("tool_calls", ()) if "id" in call}
        messages.append(message)
    return messages


def read_weights(value: Sequence[Mapping[str, Any]], name: str = "messages") -> list[bool | None]:
    """Whether each message is learned from, by its `weight` (0 or 1) or `train`; None: not said.

    Raises:
      MessageError: another weight, two that differ, or one on what is not the assistant's.
    """
    found: list[bool | None] = []
    for i, message in enumerate(value):
        said = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
        for key, weight in said.items():
            field = f"{name}[{i}].{key}"
            if not isinstance(weight, bool | int | float) or weight not in (0, 1):
                raise _invalid(field, weight, "must be 1 (learned) or 0 (not learned)")
            if weight and message.get("role") != "assistant":
                raise _invalid(field, weight, "only turns of the assistant's are learned")
        if len(set(map(bool, said.values()))) > 1:
            raise _invalid(f"{name}[{i}].train", said["train"], "says another thing than weight")
        found.append(bool(next(iter(said.values()))) if said else None)
    return found


def read_tools(value: Any, name: str = "tools") -> list[dict[str, Any]]:
    """Tools as chat templates take them: a list of objects, or its JSON text; None is no tool.

    Raises:
      MessageError: something else, or a tool without a name.
    """
    tools = [] if value in (None, "") else _parsed(value, name, "a list of tools")
    if not isinstance(tools, list):
        raise _invalid(name, tools, "must be a list of tools")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(
                f"{name}[{i}]",
                tool,
                'must be {"type": "function", "function": {"name": ..., "parameters": ...}}; where '
                f"it is no tool, data.columns={name}=NAME renames the column",
            )
    return tools


def read_template_arguments(value: Any, name: str) -> dict[str, Any]:
    """Further variables of a chat template: an object, or its JSON text; None is none.

    Raises:
      MessageError: something else, or a variable that hjax sets itself.
    """
    arguments = {} if value is None else _parsed(value, name, "an object")
    if not isinstance(arguments, Mapping):
        raise _invalid(name, arguments, "must be an object")
    taken = next((key for key in _TAKEN if arguments.get(key) is not None), None)
    if taken:
        raise MessageError(f"{name}.{taken}: hjax sets this variable itself; leave it out", name)
    return {key: each for key, each in arguments.items() if each is not None}


def _invalid(field: str, value: Any, wanted: str) -> MessageError:
    return MessageError(f"{field}={_shown(value)}: {wanted}", field)


def _shown(value: Any) -> str:
    return truncate(json.dumps(value, ensure_ascii=False, default=repr), 60)


def _parsed(value: Any, field: str, wanted: str) -> Any:
    """A value, parsed if it is JSON text."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
        json.dumps(found, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        raise _invalid(field, value, f"must be {wanted}, or its JSON text") from None
    return found


def _known(value: Any, field: str, known: Sequence[str], request: bool = False) -> dict[str, Any]:
    """The fields of an object that are not null."""
    if not isinstance(value, Mapping):
        raise _invalid(field, value, "must be an object")
    given = {key: each for key, each in value.items() if each is not None}
    unknown = [key for key in given if key not in known]
    if request:
        unknown = [key for key in unknown if given[key] and key not in _DESCRIPTIVE_FIELDS]
    if unknown:
        field = f"{field}.{unknown[0]}"
        raise MessageError(f"{field}: not supported here; leave it out (known: {', '.join(known)})",
                           field)  # fmt: skip
    return {key: each for key, each in given.items() if key in known}


def _text(given: Mapping[str, Any], key: str, field: str) -> str:
    """A field that must be text; empty if it is absent."""
    if not isinstance(value := given.get(key, ""), str):
        raise _invalid(f"{field}.{key}", value, "must be text")
    return value


def _read_message(value: Any, field: str, request: bool) -> dict[str, Any]:
    given = _known(value, field, (*_FIELDS, *(_REASONING_BLOCKS if request else _WEIGHTS)), request)
    named = given.get("role")
    if not isinstance(named, str) or named not in _ROLES:
        wanted = f"must be one of {', '.join(_ROLES)}"
        raise _invalid(f"{field}.role", named, wanted)
    role = _ROLES[named]
    for key, only in _ROLE_OF.items():
        if given.get(key) and role != only:
            whose = f"only in messages of the {only}; leave it out"
            raise MessageError(f"{field}.{key}: {whose}", f"{field}.{key}")
    for key in ("refusal",) if request else ("refusal", "annotations"):
        if given.get(key):
            raise _invalid(f"{field}.{key}", given[key], "not supported here; leave it out")
    for key in _REASONING_BLOCKS:
        if given.get(key) and not any(map(given.get, REASONING)):
            wanted = f"give its text as {REASONING[0]}"
            raise _invalid(f"{field}.{key}", given[key], wanted)
    calls = _read_calls(given, field, request)
    nullable = request and role in ("assistant", "tool") and "content" in value
    if "content" not in given and not calls and not nullable:
        raise MessageError(f"{field}.content is missing", f"{field}.content")
    message: dict[str, Any] = {"role": role, "content": _content(given, field, request)}
    if calls:
        message["tool_calls"] = calls
    texts = {key: text for key in ("name", "tool_call_id") if (text := _text(given, key, field))}
    return message | texts | _reasoning(given, field)


def _content(given: Mapping[str, Any], field: str, request: bool) -> str:
    """The content, or the joined text of its parts."""
    content, field = given.get("content", ""), f"{field}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _invalid(field, content, "must be text, or a list of parts of text")
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str()}:
                _known(part, f"{field}[{i}]", ("type", "text"), request)
            case _:
                said = f"{field} has {_shown(part)}: only parts of text are supported"
                raise MessageError(said, field)
    return "".join(part["text"] for part in content)


def _reasoning(given: Mapping[str, Any], field: str) -> dict[str, str]:
    said = {key: text for key in REASONING if (text := _text(given, key, field))}
    if len(set(said.values())) > 1:
        first, second, *_ = said
        raise _invalid(f"{field}.{second}", said[second], f"another text than {first}; keep one")
    return {key: text for text in {*said.values()} for key in REASONING[:2]}


def _read_calls(given: Mapping[str, Any], field: str, request: bool) -> list[dict[str, Any]]:
    calls, old = given.get("tool_calls") or [], given.get("function_call")
    if calls and old:
        raise MessageError(
            f"{field}.function_call: stands beside tool_calls; keep one", f"{field}.function_call"
        )
    if old:
        return [{"type": "function", "function": _function(old, f"{field}.function_call", request)}]
    if not isinstance(calls, list):
        raise _invalid(f"{field}.tool_calls", calls, "must be a list of calls")
    return [_call(call, f"{field}.tool_calls[{i}]", i, request) for i, call in enumerate(calls)]


def _call(value: Any, field: str, position: int, request: bool) -> dict[str, Any]:
    """A tool call; name and arguments may also stand outside of `function`."""
    flat = isinstance(value, Mapping) and value.get("function") is None and value.get("name")
    about = ("id", "type", "index")
    given = _known(value, field, (*about, *(("name", "arguments") if flat else ("function",))),
                   request)  # fmt: skip
    if not request and given.get("type", "function") != "function":
        raise _invalid(f"{field}.type", given["type"], "must be function")
    if not request and given.get("index", position) != position:
        raise _invalid(f"{field}.index", given["index"], f"must be {position}, the call's place")
    if flat:
        function = _function({k: each for k, each in given.items() if k not in about}, field,
                             request)  # fmt: skip
    elif "function" in given:
        function = _function(given["function"], f"{field}.function", request)
    else:
        raise MessageError(f"{field}.function is missing", f"{field}.function")
    call: dict[str, Any] = {"type": "function", "function": function}
    return call | ({"id": text} if (text := _text(given, "id", field)) else {})


def _function(value: Any, field: str, request: bool) -> dict[str, Any]:
    """Name and arguments of a call, in their order. Templates write the arguments as JSON
    themselves, so they take the object, not its text."""
    given = _known(value, field, ("name", "arguments"), request)
    if not _text(given, "name", field):
        raise MessageError(f"{field}.name is missing", f"{field}.name")
    field, wanted = f"{field}.arguments", "an object"
    arguments = given.get("arguments", {})
    if request and isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    try:
        given["arguments"] = _parsed(arguments, field, wanted)
    except MessageError:
        # A call that was cut at its length limit: the template has the text that there is.
        if not request or not arguments.lstrip().startswith("{"):
            raise
        return given
    if not isinstance(given["arguments"], Mapping):
        raise _invalid(field, given["arguments"], f"must be {wanted}, or its JSON text")
    return given
