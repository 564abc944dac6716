"""Response formats (structured outputs): OpenAI's field, and vLLM's under both of its names."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from hjax.errors import ConfigError
from hjax.rollout.constraint import Constraint
from hjax.serving.fields import RequestFields, invalid_field
from hjax.serving.neutral_fields import only
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
        return _of_schema(name, _ANY_OBJECT) if self.type == "json_object" else None


class StructuredOutputs(RequestFields):
    """vLLM's ``structured_outputs``."""

    regex: str = ""
    grammar: str = ""
    wanted: Any = Field(default=None, alias="json")
    choice: list[Any] = []
    json_object: bool = False
    disable_fallback: bool = True  # there is but one engine
    disable_any_whitespace: Annotated[Any, only(False)] = False
    disable_additional_properties: Annotated[Any, only(False)] = False


class FormatFields(RequestFields):
    """The fields of a request about the format of its text, of vLLM: its present and older ones."""

    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: Any = None
    guided_regex: str = ""
    guided_choice: list[Any] = []
    guided_grammar: str = ""

    def text_format(self, other: TextFormat | None = None) -> TextFormat | None:
        """The only format that there is; None: any text.

        Args:
          other: of another field.

        Raises:
          RequestRefused: several of them, or an invalid one.
        """
        found = [] if other is None else [other]
        new = {**dict(self.structured_outputs), "json": self.structured_outputs.wanted}
        for kind, make in _MAKERS.items():
            older = f"guided_{kind}"
            for field, value in (
                (f"structured_outputs.{kind}", new[kind]),
                (older, getattr(self, older)),
            ):
                if value or (kind == "json" and value is not None):
                    found.append(make(field, value))
        if new["json_object"]:
            found.append(_of_schema("structured_outputs.json_object", _ANY_OBJECT))
        if len(found) > 1:
            names = [each.field for each in found]
            param = names[0].partition(".")[0]
            raise RequestRefused(f"{' and '.join(names)}: give one of them", param=param)
        return found[0] if found else None


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


_ANY_OBJECT = {"type": "object"}
# Formats by their kind, from a field's name and value.
_MAKERS: Mapping[str, Callable[[str, Any], TextFormat]] = {
    "regex": lambda field, text: _made(field, lambda: Constraint(regex=text)),
    "grammar": lambda field, text: _made(field, lambda: Constraint(grammar=text)),
    "choice": lambda field, texts: _made(field, lambda: Constraint.of_choice(texts)),
    "json": _of_schema,
}
