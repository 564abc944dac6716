"""Validation of a request's JSON: parsing, and pydantic models of its objects."""

import json
import re
from typing import Any, TypeVar

import pydantic

from hjax.errors import truncate
from hjax.serving.limits import ServerLimits
from hjax.serving.request_errors import RequestRefused
from hjax.user_input import object_with_unique_keys


def parse_object(body: bytes, limits: ServerLimits) -> dict[str, Any]:
    """The JSON object in a body.

    Args:
      body: as it was received.
      limits: on the values in it.

    Raises:
      RequestRefused: something else.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    _check_size(body, limits)
    try:
        # Given bytes, `json` would accept UTF-16 too, and lone surrogates.
        value = json.loads(
            body.decode("utf-8-sig"),
            parse_constant=constant,
            object_pairs_hook=object_with_unique_keys,
        )
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if b"\\u" in body:
        _check_characters(value)
    if not isinstance(value, dict):
        raise RequestRefused(f"the body is {as_json(value)}; a JSON object is wanted")
    return value


def _check_size(body: bytes, limits: ServerLimits) -> None:
    """Refuse a JSON text with too many values, before any of them is made. Of a text that is not
    JSON at least those before its first fault are counted."""
    body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = body.count(b'"') // 2
    brackets, commas = _count_outside(body)
    if strings <= limits.body_parts and _too_many(strings + brackets, commas, limits):
        # Some of them may stand in strings.
        brackets, commas = _count_outside(b"".join(body.split(b'"')[::2]))
    if said := _too_many(strings + brackets, commas, limits):
        raise RequestRefused(f"the body has {said}", 413)


def _count_outside(body: bytes) -> tuple[int, int]:
    return body.count(b"[") + body.count(b"{"), body.count(b",")


def _too_many(parts: int, commas: int, limits: ServerLimits) -> str:
    if parts > limits.body_parts:
        return f"{parts} arrays, objects and strings: at most {limits.body_parts}"
    values = parts + commas
    return f"{values} values: at most {limits.body_values}" if values > limits.body_values else ""


def _check_characters(value: Any) -> None:
    """Refuse lone surrogates (half characters): JSON can write them, but not encode them."""
    left = [value]
    try:
        while left:
            match left.pop():
                case str() as text:
                    text.encode()
                case list() as values:
                    left += values
                case dict() as fields:
                    left += [*fields, *fields.values()]
    except UnicodeEncodeError as error:
        raise RequestRefused(f"the body is no text: {error.reason}") from None


class RequestFields(pydantic.BaseModel):
    """An object of a request; subclasses declare its fields. A null field counts as absent."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        known = {field.alias or name for name, field in cls.model_fields.items()}
        # One unknown field is enough to be refused; drop the others.
        for name in [name for name in given if name not in known][1:]:
            del given[name]
        return given


Of = TypeVar("Of", bound=RequestFields)
_WANTED = {
    "model_type": "an object",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
}


def validate_fields(kind: type[Of], given: Any) -> Of:
    """A request's object, its fields validated.

    Raises:
      RequestRefused: the first field that is wrong or unknown.
    """
    try:
        return kind.model_validate(given)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    name = "".join(f"[{x}]" if isinstance(x, int) else f".{x}" for x in first["loc"])[1:]
    if first["type"] == "extra_forbidden":
        said = "not supported here; leave it out (docs/serving.md has what is)"
        raise RequestRefused(f"{name}: {said}", param=name)
    if first["type"] == "missing":
        raise RequestRefused(f"{name} is missing", param=name)
    plain = re.sub("^(Input should be|Value error,) ", "", first["msg"])
    raise invalid_field(name, first["input"], _WANTED.get(first["type"], plain))


def invalid_field(name: str, value: Any, wanted: str) -> RequestRefused:
    """The refusal of a field's value."""
    return RequestRefused(f"{name}={as_json(value)}: {wanted}", param=name)


def as_json(value: Any, limit: int = 60) -> str:
    """A value as JSON, cut to a line's length."""
    text = ""
    # With the check of cycles the encoder would keep what it has not come to.
    encoder = json.JSONEncoder(ensure_ascii=False, check_circular=False)
    for part in encoder.iterencode(value):
        text += part
        if len(text) > limit:
            break
    return truncate(text, limit)
