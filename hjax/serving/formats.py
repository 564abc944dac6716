"""What a request says of its answers' text: OpenAI's response_format, vLLM's structured_outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
      parts: of what it is made of the names and constraints, to say which of them does not do.
    """

    constraint: Constraint
    field: str
    parts: tuple[tuple[str, Constraint], ...] = ()


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
        found = _of_schema(name, {"type": "object"})
    if kind == "json_schema":
        within = f"{name}.json_schema"
        schema = Fields(format.object("json_schema"), within)
        if not schema.text("name"):
            raise Refused(f"{within}.name is missing", param=f"{within}.name")
        schema.text("description")
        schema.flag("strict")  # kept to in any case
        found = _of_schema(f"{within}.schema", schema.take("schema"))
        schema.end()
    format.end()
    return found


def read_structured(fields: Fields) -> Format | None:
    """What ``structured_outputs`` asks for; None: any text.

    Raises:
      Refused: something else than one of regex, json, choice and grammar.
    """
    name = "structured_outputs"
    given = Fields(fields.object(name), name)
    texts = {kind: text for kind in ("regex", "grammar") if (text := given.text(kind))}
    schema, choice = given.take("json"), given.list("choice")
    given.end()
    kinds = [*texts, *(["json"] if schema is not None else []), *(["choice"] if choice else [])]
    if len(kinds) > 1:
        raise Refused(f"{name}: {' and '.join(kinds)}; give one of them", param=name)
    if texts:
        [kind] = texts
        return _made(f"{name}.{kind}", lambda: Constraint(**texts))
    if choice:
        return _made(f"{name}.choice", lambda: Constraint.of_choice(choice))
    return None if schema is None else _of_schema(f"{name}.json", schema)


def _of_schema(name: str, schema: Any) -> Format:
    if isinstance(schema, str):  # vLLM takes its text too
        return _made(name, lambda: Constraint(json_schema=schema))
    if not isinstance(schema, dict):
        raise Refused(f"{name}={shown(schema)}: a JSON schema, an object", param=name)
    return _made(name, lambda: Constraint.of_json(schema))


def _made(name: str, make: Callable[[], Constraint]) -> Format:
    try:
        return Format(make(), name)
    except ConfigError as error:
        raise Refused(f"{name}: {error}", param=name) from None
