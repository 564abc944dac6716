"""What a request says of its answers' text: OpenAI's response_format, vLLM's structured_outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

from hjax.errors import ConfigError
from hjax.rollout.constraint import Constraint
from hjax.serving.fields import Fields, shown
from hjax.serving.refusal import Refused

_FORMATS = ("text", "json_object", "json_schema")


@dataclasses.dataclass(frozen=True)
class Format:
    """What an answer's text must be.

    Attributes:
      constraint: that it must match.
      field: by which the request said so.
    """

    constraint: Constraint
    field: str


def read_format(fields: Fields) -> Format | None:
    """What ``response_format`` asks for; None: any text.

    Raises:
      Refused: something else than OpenAI's text, json_object and json_schema.
    """
    name = "response_format"
    format = Fields(fields.object(name), name)
    kind = format.take("type", "text")
    if kind not in _FORMATS:
        raise format.wrong("type", kind, ", ".join(_FORMATS))
    found = None
    if kind == "json_object":
        found = _made(name, json_schema={"type": "object"})
    if kind == "json_schema":
        within = f"{name}.json_schema"
        schema = Fields(format.object("json_schema"), within)
        if not schema.text("name"):
            raise Refused(f"{within}.name is missing", param=f"{within}.name")
        schema.text("description")
        schema.flag("strict")  # kept to in any case
        found = _made(f"{within}.schema", json_schema=schema.take("schema"))
        schema.end()
    format.end()
    return found


def read_structured(fields: Fields) -> Format | None:
    """What ``structured_outputs`` asks for; None: any text.

    Raises:
      Refused: something else than one of regex and json.
    """
    name = "structured_outputs"
    given = Fields(fields.object(name), name)
    regex, schema = given.text("regex", ""), given.take("json")
    given.end()
    if regex and schema is not None:
        raise Refused(f"{name}: regex and json; give one of them", param=name)
    if regex:
        return _made(f"{name}.regex", regex=regex)
    return None if schema is None else _made(f"{name}.json", json_schema=schema)


def _made(name: str, regex: str | None = None, json_schema: Any = None) -> Format:
    try:
        if regex is not None:
            return Format(Constraint(regex=regex), name)
        if isinstance(json_schema, str):  # vLLM takes its text too
            return Format(Constraint(json_schema=json_schema), name)
        if not isinstance(json_schema, dict):
            raise Refused(f"{name}={shown(json_schema)}: a JSON schema, an object", param=name)
        return Format(Constraint.of_json(json_schema), name)
    except ConfigError as error:
        raise Refused(f"{name}: {error}", param=name) from None
