"""Reading rows from data sources: files, glob patterns, folders and Hugging Face datasets."""

import glob
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hjax.data.invalid_rows import InvalidRows
from hjax.errors import DataError, short_repr
from hjax.user_input import parse_json, user_path

SUFFIXES = (".jsonl", ".parquet", ".txt")
# owner/name, optionally with a configuration and a split: owner/name/main:train.
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w\[\]%:+-]+))?")
# Metadata files of `datasets.save_to_disk`.
_SAVED = ("state.json", "dataset_dict.json")
# The kind of a line that cannot be read.
_UNREADABLE = "unreadable line"


def split_paths(path: str | Path) -> list[str]:
    """Split a `data.path` at its commas."""
    if isinstance(path, Path):
        return [str(path)]
    found = [part.strip() for part in path.split(",") if part.strip()]
    return found or [path]


def data_files(part: str) -> list[Path] | None:
    """The files that one source names: a file, a glob pattern's matches or a folder's, sorted.

    Returns:
      None for a Hugging Face dataset.

    Raises:
      DataError: a pattern without matches, or a folder without data files.
    """
    path = user_path(part, "data: ")
    if path.is_dir():
        if any((path / name).is_file() for name in _SAVED):
            return None
        found = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        if not found:
            raise DataError(f"{part}: the folder has no {', '.join(SUFFIXES[:-1])} or .txt file")
        return found
    if not path.exists() and glob.has_magic(part) and not _HUB.fullmatch(part):
        found = [Path(name) for name in sorted(glob.glob(str(path)))]
        if not found:
            raise DataError(f"{part}: no file matches this pattern")
        return found
    if not path.exists() and path.suffix not in SUFFIXES and _HUB.fullmatch(part):
        return None
    return [path]


def huggingface_rows(part: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of a Hugging Face dataset: a name, or a folder of `save_to_disk`.

    Args:
      part: `owner/name` or `owner/name/configuration`, each optionally with `:split`; or a folder.
      split: the split to read where ``part`` names none.

    Raises:
      DataError: `datasets` is not installed, or cannot load the dataset.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{part}: there is no such file; for a data set of Hugging Face's install its library "
            "(pip install datasets)"
        ) from error
    try:
        if Path(part).expanduser().is_dir():
            table = datasets.load_from_disk(str(Path(part).expanduser()))
            if isinstance(table, dict):
                table = table[split]
        else:
            match = _HUB.fullmatch(part)
            assert match is not None  # `data_files` returned None
            table = datasets.load_dataset(match[1], match[2], split=match[3] or split)
        rows = [dict(row) for row in table]
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{part}: datasets cannot load it ({reason})") from error
    yield from ((f"{part}: row {number}", row) for number, row in enumerate(rows, start=1))


def read_sources(path: str | Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of all sources of a `data.path`, in order."""
    rows: list[tuple[str, dict[str, Any]]] = []
    for part in split_paths(path):
        files = data_files(part)
        if files is None:
            rows += huggingface_rows(part)
        else:
            for file in files:
                rows += _read_rows(file, invalid)
    return rows


def _read_rows(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    """(location, row) pairs of a file; the location is `file:line` or `file: row n`."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: its name must end in {', '.join(SUFFIXES[:-1])} or .txt")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; data.path and data.eval_path name files")
    read = {".txt": _read_lines, ".jsonl": _read_jsonl, ".parquet": _read_parquet}[path.suffix]
    try:
        return read(path, invalid)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _read_lines(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            with invalid.checking(f"{path}:{number}", _UNREADABLE):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                except ValueError as error:
                    raise DataError(f"not UTF-8 ({error})") from None
                if text.strip():
                    rows.append((f"{path}:{number}", {"prompt": text}))
    return rows


def _read_jsonl(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            with invalid.checking(f"{path}:{number}", _UNREADABLE):
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise DataError(f"a JSON object is needed, found {short_repr(row)}")
                if b"\\u" in line:
                    _check_unicode(row)
                rows.append((f"{path}:{number}", row))
    return rows


def _check_unicode(row: dict[str, Any]) -> None:
    """Refuse halves of surrogate pairs (`\\ud83d` alone), which no tokenizer takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except RecursionError:
        raise DataError("too deeply nested", kind=_UNREADABLE) from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"it has {half!r}, half of a surrogate pair, which is no character; write both halves",
            kind="text with half a character",
        ) from None


def _read_parquet(path: Path, invalid: InvalidRows) -> list[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()  # conversion may fail too
    except Exception as error:  # Arrow's errors, and those of value conversion
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: not a readable parquet file ({reason[:200]})") from None
    return [(f"{path}: row {i}", row) for i, row in enumerate(rows, start=1)]
