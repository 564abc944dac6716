"""The fields of a request's JSON object, taken one by one; what nobody took is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hjax.serving.refusal import Refused


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
      Refused: something else.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        # Given bytes, `json` would take UTF-16 too, and halves of characters.
        value = json.loads(body.decode("utf-8-sig"), parse_constant=constant)
    except ValueError as error:
        raise Refused(f"the body is not JSON: {error}") from None
    if b"\\u" in body:
        _check_characters(value)
    if not isinstance(value, dict):
        raise Refused(f"the body is {shown(value)}; a JSON object is wanted")
    return value


def _check_characters(value: Any) -> None:
    """JSON can write half a character, which nothing can be said or encoded with."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refused(f"the body is no text: {error.reason}") from None


class Fields:
    """A JSON object that is read; a field that is null counts as not given.

    Args:
      given: the object.
      within: what it stands in, for messages; "" is the request itself.
    """

    def __init__(self, given: Mapping[str, Any], within: str = ""):
        self._left = {name: value for name, value in given.items() if value is not None}
        self._within = f"{within}." if within else ""

    def take(self, name: str, default: Any = None) -> Any:
        """The value as it is; ``default`` where it is not given."""
        return self._left.pop(name, default)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int | None:
        """A whole number from ``low`` to ``high``."""
        value = self.take(name, default)
        if value is not default and (type(value) is not int or not low <= value <= high):
            raise self.wrong(name, value, f"a whole number, {low} to {high}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object; empty where it is not given."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise self.wrong(name, value, "an object")
        return value

    def list(self, name: str) -> list[Any]:
        """An array; empty where it is not given."""
        value = self.take(name, [])
        if not isinstance(value, list):
            raise self.wrong(name, value, "an array")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """A field of which nothing but these values is supported; they change nothing."""
        value = self.take(name, allowed[0])
        if not any(type(value) is type(each) and value == each for each in allowed):
            said = " or ".join(json.dumps(each) for each in allowed)
            raise self.wrong(name, value, f"not supported here; leave it out, or {said}")

    def end(self) -> None:
        """Refuse what was not taken."""
        for name in self._left:
            raise Refused(
                f"{self._within}{name}: not supported here; leave it out (docs/serving.md has what "
                "is)",
                param=self._within + name,
            )

    def wrong(self, name: str, value: Any, wanted: str) -> Refused:
        """The refusal of a value."""
        name = self._within + name
        return Refused(f"{name}={shown(value)}: {wanted}", param=name)


def shown(value: Any, limit: int = 60) -> str:
    """A value as JSON, cut to a line's length."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 3] + "..."
