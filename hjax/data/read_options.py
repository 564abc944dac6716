"""How rows become prompts: which column is which, what a chat's template is told, what is too long.

The texts are those of the config's `data` section.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Self

from hjax.errors import ConfigError

OVERLONG = ("error", "filter", "truncate_left")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of `Dataset.from_file`.

    Attributes:
      columns: name in the file to the name here.
      overlong: what a prompt above the limit does: `error`, `filter` (the row is left out) or
        `truncate_left` (its beginning is).
      chat: whether a prompt that is text becomes the user's message of a chat.
      system: of that chat the system's message; empty: none.
      template: further variables of the chat template.
    """

    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overlong: str = "error"
    chat: bool = False
    system: str = ""
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, data: Any) -> Self:
        """What the config's section `data` says.

        Raises:
          ConfigError: a text that cannot be read, or keys that do not go together.
        """
        if data.system and not data.chat:
            raise ConfigError(
                f"config.data.system={data.system!r} is the system's message where "
                "config.data.chat=True makes chats of texts; set that too"
            )
        return cls(
            renamed(data.columns),
            data.overlong,
            data.chat,
            data.system,
            template_arguments(data.template_arguments),
        )

    def renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row under the names of here; what a new name stood for before gives way."""
        if not self.columns:
            return dict(row)
        moved = {new: row[old] for old, new in self.columns.items() if old in row}
        return {k: v for k, v in row.items() if k not in self.columns and k not in moved} | moved

    def messages(self, text: str) -> str | list[dict[str, Any]]:
        """A prompt that is text, as a chat where it is to be one."""
        if not self.chat:
            return text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]


def renamed(text: str) -> dict[str, str]:
    """`question=prompt, answer=solution` as a dict, the file's name first.

    Raises:
      ConfigError: it is not of this form, or two columns get one name.
    """
    found = dict(_pairs(text, "config.data.columns", "question=prompt"))
    if len(set(found.values())) < len(found):
        raise ConfigError(f"config.data.columns={text!r}: two columns get the same name")
    return found


def weights_of(text: str) -> dict[str, float]:
    """`gsm8k=2, math=1` as a dict.

    Raises:
      ConfigError: it is not of this form, or a number is not above 0.
    """
    found = {}
    for name, number in _pairs(text, "config.data.weights", "gsm8k=2, math=1"):
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = 0.0
        if not 0 < found[name] < float("inf"):
            raise ConfigError(
                f"config.data.weights={text!r}: the weight of {name} is {number!r}; it must be a "
                "number above 0 (leave a source out of the data to have none of it)"
            )
    return found


def template_arguments(text: str) -> dict[str, Any]:
    """A JSON object as a dict; empty: none.

    Raises:
      ConfigError: it is none.
    """
    if not text:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise ConfigError(
            f"config.data.template_arguments={text!r}: it must be a JSON object, such as "
            "'{\"enable_thinking\": false}'"
        )
    return found


def _pairs(text: str, key: str, example: str) -> list[tuple[str, str]]:
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (x.strip() for x in part.partition("="))
        if not name or not equals or not value:
            raise ConfigError(f"{key}={text!r}: {part!r} is not of the form name=…: {example}")
        found.append((name, value))
    return found
