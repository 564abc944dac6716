"""Paths and JSON from users, read with one-line errors."""

import json
import os
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, DataError, truncate
from hjax.files import LARGEST_FILE, StrPath, read_bytes, special_file

_LARGEST_OBJECT = 2**26  # bytes of a file of settings, whose values take many times as much
_SHOWN = 80  # characters of a path in a message


def user_path(text: StrPath, setting: str) -> Path:
    """A path as a user gives it, with `~` expanded; it need not exist.

    Args:
      text: the path.
      setting: its name in messages: `--workdir=`, `data.path=`.

    Raises:
      ConfigError: it cannot be looked up (`~` of nobody, too long, a loop of links, no permission),
        or is a link to nothing.
    """
    shown = truncate(os.fspath(text), _SHOWN)
    try:
        path = Path(text).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise ConfigError(f"{setting}{shown}: {special_file(path)}") from None
    except RuntimeError:
        user = shown.partition("/")[0]
        raise ConfigError(f"{setting}{shown}: there is no user of the name in {user!r}") from None
    except OSError as error:
        raise ConfigError(f"{setting}{shown}: {error.strerror}") from error
    except ValueError as error:  # a zero byte
        raise ConfigError(f"{setting}{shown!r}: {error}") from error
    return path


def parse_json(data: bytes, where: str = "", unique_keys: bool = False) -> Any:
    """The value of JSON text in UTF-8.

    Args:
      data: of a file or a line, with or without a byte order mark.
      where: its name in messages; empty: the caller adds it.
      unique_keys: whether an object with the same key twice is refused; else its last value counts.

    Raises:
      DataError: it is not UTF-8, not JSON, or too deeply nested.
    """
    named = f"{where}: " if where else ""
    hook = object_with_unique_keys if unique_keys else None
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=hook)
    except UnicodeDecodeError as error:
        raise DataError(f"{named}not UTF-8 (byte {error.start}: {error.reason})") from None
    except ValueError as error:
        raise DataError(f"{named}not valid JSON ({error})") from None
    except RecursionError:
        raise DataError(f"{named}not usable JSON (too deeply nested)") from None


def object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as an ``object_pairs_hook``.

    Raises:
      ValueError: a key comes twice; readers take different ones of its values.
    """
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"a key comes twice in an object: {truncate(name, _SHOWN)!r}")
        found[name] = value
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      DataError: it cannot be read, is larger than settings are, or is no object.
    """
    content = parse_json(read_file(path, _LARGEST_OBJECT), str(path))
    if not isinstance(content, dict):
        raise DataError(f"{path}: must be a JSON object, not {type(content).__name__}")
    return content


# Ends of the names of files that are read in a model's directory.
_MODEL_FILES = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")


def check_directory(path: Path) -> None:
    """Raise DataError if a model's directory has something else in a file's place (a FIFO, a link
    to nothing, a directory), which would count as a missing file or be waited for."""
    for file in path.iterdir() if path.is_dir() else ():
        if not file.name.endswith(_MODEL_FILES):
            continue
        if found := special_file(file) or ("a directory" if file.is_dir() else ""):
            raise DataError(f"{file}: {found}, not a file")


def read_file(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a file; raises DataError if it cannot be read, or has more than ``most``: by
    default than a template or a tokenizer has."""
    try:
        return read_bytes(path, most)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; raises DataError if it cannot be read or is no such text."""
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 (byte {error.start}: {error.reason})") from None
