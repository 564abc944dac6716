"""Constraints for decoding: a regex, a JSON schema or a grammar that a response must match."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import ConfigError

# Most characters of a pattern, schema or grammar.
MAX_CHARACTERS = 2**17
# Characters with a meaning in a pattern; `&`, `-`, `~` only in character classes.
_REGEX_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


@dataclasses.dataclass(frozen=True)
class Constraint:
    """What the whole text of a response must match. Give one of the three.

    Attributes:
      regex: a regular expression in the syntax of Rust's crate regex: Python's without lookarounds,
        back references and word boundaries. The whole text is matched, so a ``^`` at its beginning
        and a ``$`` at its end change nothing.
      json_schema: JSON text of a JSON schema (draft 2020-12), as ``of_json`` makes it. Properties
        come in the schema's order; between the parts of a JSON text stands nothing, a space, or a
        line break with up to 32 blanks.
      grammar: in Lark's syntax as llguidance has it, from its rule ``start``; JSON by ``%json
        {...}``. Without ``%llguidance``.

    Raises:
      ConfigError: none or several of them, one that is too long, text that is no JSON schema.
    """

    regex: str | None = None
    json_schema: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "a constraint is a regex, a json_schema or a grammar; give one of them"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not isinstance(value, str) or _has_surrogate(value):
                raise ConfigError(f"{field.name}={value!r}: a string of whole characters")
            if len(value) > MAX_CHARACTERS:
                raise ConfigError(
                    f"{field.name} of {len(value)} characters: at most {MAX_CHARACTERS}; shorten it"
                )
        if self.json_schema is not None:
            self._check_schema(self.json_schema)
        if self.grammar is not None and re.search(r"^[ \t]*%llguidance", self.grammar, re.M):
            raise ConfigError("grammar: %llguidance is not supported here; leave it out")

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
        """JSON text of a value that a schema allows; ``{"type": "object"}`` allows any object."""
        try:
            text = json.dumps(schema)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"json_schema: not JSON ({error})") from None
        return cls(json_schema=text)

    @classmethod
    def of_choice(cls, texts: Sequence[str]) -> Constraint:
        """One of several texts, exactly."""
        if isinstance(texts, str) or not texts or not all(isinstance(t, str) for t in texts):
            raise ConfigError(f"choice={texts!r}: a list of texts, one at least")
        each = (_REGEX_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
        return cls(regex=f"(?:{'|'.join(each)})")


def _has_surrogate(text: str) -> bool:
    """Whether a text has a lone surrogate (half a character), which has no bytes in UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in text)
