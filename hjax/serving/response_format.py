"""Response formats (structured outputs): OpenAI's response_format, vLLM's structured_outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from hjax.errors import ConfigError
from hjax.rollout.constraint import Constraint
from hjax.serving.fields import RequestFields, invalid_field
from hjax.serving.request_errors import RequestRefused


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """The format of an answer's text.

    Attributes:
      constraint: that the text must match.
      field: the field of the request that sets it.
      parts: names and constraints that it is made of, to name the one that is invalid.
    """

    constraint: Constraint
    field: str
    parts: tuple[tuple[str, Constraint], ...] = ()


class _Schema(RequestFields):
    name: str = Field(min_length=1)
    description: str = ""
    strict: bool = False  # the schema always holds
    wanted: Any = Field(default=None, alias="schema")


class ResponseFormat(RequestFields):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _Schema | None = None

    def format(self) -> TextFormat | None:
        """None: any text. Raises RequestRefused: no JSON schema."""
        name = "response_format"
        if (self.type == "json_schema") != (self.json_schema is not None):
            field = f"{name}.json_schema"
            raise RequestRefused(f"{field}: with type json_schema, and only then", param=field)
        if self.json_schema is not None:
            return _of_schema(f"{name}.json_schema.schema", self.json_schema.wanted)
        return _of_schema(name, {"type": "object"}) if self.type == "json_object" else None


class StructuredOutputs(RequestFields):
    """vLLM's ``structured_outputs``."""

    regex: str = ""
    grammar: str = ""
    wanted: Any = Field(default=None, alias="json")
    choice: list[Any] = []

    def format(self) -> TextFormat | None:
        """None: any text. Raises RequestRefused: several of them, or an invalid one."""
        name = "structured_outputs"
        texts = {kind: text for kind in ("regex", "grammar") if (text := getattr(self, kind))}
        kinds = [*texts, *(["json"] if self.wanted is not None else [])]
        kinds += ["choice"] if self.choice else []
        if len(kinds) > 1:
            raise RequestRefused(f"{name}: {' and '.join(kinds)}; give one of them", param=name)
        if texts:
            return _made(f"{name}.{kinds[0]}", lambda: Constraint(**texts))
        if self.choice:
            return _made(f"{name}.choice", lambda: Constraint.of_choice(self.choice))
        return None if self.wanted is None else _of_schema(f"{name}.json", self.wanted)


def _of_schema(name: str, schema: Any) -> TextFormat:
    if isinstance(schema, str):  # vLLM takes its text too
        return _made(name, lambda: Constraint(json_schema=schema))
    if not isinstance(schema, dict):
        raise invalid_field(name, schema, "a JSON schema, an object")
    return _made(name, lambda: Constraint.of_json(schema))


def _made(name: str, make: Callable[[], Constraint]) -> TextFormat:
    try:
        return TextFormat(make(), name)
    except ConfigError as error:
        raise RequestRefused(f"{name}: {error}", param=name) from None
