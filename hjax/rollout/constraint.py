"""What the text of a response must be, as a request says it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from hjax.errors import ConfigError

# Characters of a pattern or schema.
LARGEST = 2**17


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What the whole text of a response must match. Give one of the two.

    Attributes:
      regex: a regular expression, by the syntax of Rust's crate regex: Python's but for
        lookarounds, back references and word boundaries. A ``^`` at its beginning and a ``$`` at
        its end say what holds anyway.
      json_schema: JSON text of a JSON schema (draft 2020-12), as ``of_json`` makes it. Properties
        come in the schema's order; between the parts of a JSON text stands nothing, a space, or a
        line break with up to 32 blanks.

    Raises:
      ConfigError: none or both of them, one that is too long, what is no JSON schema's text.
    """

    regex: str | None = None
    json_schema: str | None = None

    def __post_init__(self) -> None:
        if (self.regex is None) == (self.json_schema is None):
            raise ConfigError("a constraint is a regex or a json_schema; give one of them")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, str) or _broken(value):
                raise ConfigError(f"{field.name}={value!r}: a string of whole characters")
            if len(value) > LARGEST:
                raise ConfigError(
                    f"{field.name} of {len(value)} characters: at most {LARGEST}; shorten it"
                )
        if self.json_schema is not None:
            self._check_schema(self.json_schema)

    @staticmethod
    def _check_schema(text: str) -> None:
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema: not JSON ({error})") from None
        if not isinstance(schema, dict):
            raise ConfigError(f"json_schema={text[:40]}: an object, {{}} for any JSON value")
        if "x-guidance" in schema:
            raise ConfigError("json_schema: x-guidance is not supported here; leave it out")

    @classmethod
    def of_json(cls, schema: Mapping[str, Any]) -> Constraint:
        """JSON text of a value that a schema allows; ``{"type": "object"}``: of any object."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema: not JSON ({error})") from None
        return cls(json_schema=text)


def _broken(text: str) -> bool:
    """Whether it has half a character, which no bytes stand for."""
    return any("\ud800" <= character <= "\udfff" for character in text)
