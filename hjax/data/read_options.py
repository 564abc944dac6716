"""Options for reading data files: column names, chat templates, overlong prompts.

They are parsed from the strings of the config's `data` section.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

from hjax.data.row_formats import COLUMNS, read_format
from hjax.data.sources import split_name, split_paths
from hjax.errors import ConfigError, DataError

OVERLONG = ("error", "filter", "truncate_left")


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """Options of `Dataset.from_file`.

    Attributes:
      columns: maps a file's column name to hjax's.
      overlong: what happens to a prompt above the limit: `error`, `filter` (its row is dropped) or
        `truncate_left` (its first tokens are dropped).
      chat: whether a prompt that is text becomes the user message of a chat.
      system: system message of chats that have none; empty: none.
      template: further variables of the chat template.
      tools: definitions of the functions that every chat has; a row's own stand instead.
      format: whose columns the rows have (``hjax.data.row_formats``).
    """

    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overlong: str = "error"
    chat: bool = False
    system: str = ""
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] = ()
    format: str = COLUMNS

    @classmethod
    def from_config(cls, data: Any) -> Self:
        """The options of the config's section `data`.

        Raises:
          ConfigError: a string that cannot be parsed.
        """
        return cls(
            parse_column_names(data.columns),
            data.overlong,
            data.chat,
            data.system,
            parse_template_arguments(data.template_arguments),
            format=data.format,
        )

    def rename_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with renamed columns; a column that already has a new name is replaced."""
        if not self.columns:
            return dict(row)
        moved = {new: row[old] for old, new in self.columns.items() if old in row}
        return {k: v for k, v in row.items() if k not in self.columns and k not in moved} | moved

    def read_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with renamed columns, and with hjax's where it has those of another format.

        Raises:
          DataError: columns that the format does not have, or Alpaca's `input` beside a prompt.
        """
        if self.format == COLUMNS and "instruction" in self.columns and row.get("input"):
            raise DataError(
                "an instruction has an input beside it, which data.columns does not put into the "
                "prompt; data.format=alpaca (without data.columns) does"
            )
        return read_format(self.rename_columns(row), self.format)

    def messages(self, text: str) -> str | list[dict[str, Any]]:
        """A text prompt, as chat messages if the ``chat`` option is set."""
        return self.chat_of(text) if self.chat else text

    def chat_of(self, text: str) -> list[dict[str, Any]]:
        """The chat that begins with a text as the user's message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": text}]


def parse_column_names(text: str) -> dict[str, str]:
    """Parse `question=prompt, answer=solution` to {column in the file: column in hjax}.

    Raises:
      ConfigError: wrong syntax, or two columns get the same name.
    """
    found = dict(_pairs(text, "config.data.columns", "question=prompt"))
    if len(set(found.values())) < len(found):
        raise ConfigError(f"config.data.columns={text!r}: two columns get the same name")
    return found


def parse_source_weights(text: str) -> dict[str, float]:
    """Parse the data sources' weights, `gsm8k=2, math=1`, to a dict.

    Raises:
      ConfigError: wrong syntax, or a weight that is not a finite number above 0.
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


def parse_mixture(text: str) -> tuple[str, dict[str, float]]:
    """Parse a mixture, `math=gsm8k.jsonl*2, code=mbpp.parquet`.

    Returns:
      the named files, as a `data.path` has them, and the weights by name; 1 where none is given.

    Raises:
      ConfigError: a file without a name, a name twice, or a weight that is not above 0.
    """
    parts, weights = [], {}
    for part in split_paths(text):
        name, path = split_name(part)
        file, star, number = path.rpartition("*")
        try:
            weight = float(number) if star else 1.0
        except ValueError:  # the star is a pattern's
            file, weight = path, 1.0
        if not name or name in weights or not 0 < weight < float("inf"):
            wrong = f"{name} is there twice" if name in weights else f"{part!r} is not so"
            raise ConfigError(
                f"config.data.mixture={text!r}: {wrong}; files are NAME=FILE or NAME=FILE*WEIGHT, "
                "of different names and with weights above 0, separated by commas"
            )
        parts.append(f"{name}={(file if star else path).strip()}")
        weights[name] = weight
    return ",".join(parts), weights


def parse_template_arguments(text: str) -> dict[str, Any]:
    """Parse a JSON object to a dict; an empty string gives an empty dict.

    Raises:
      ConfigError: the text is no JSON object.
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
