"""Where prompts come from: files, patterns and folders of them, and Hugging Face's data sets."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hjax.errors import DataError
from hjax.given import given_path

SUFFIXES = (".jsonl", ".parquet", ".txt")
# owner/name, with a configuration and a split: owner/name/main:train.
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?::([\w\[\]%:+-]+))?")
# What `datasets.save_to_disk` writes beside the rows.
_SAVED = ("state.json", "dataset_dict.json")


def parts(path: str | Path) -> list[str]:
    """What a `data.path` names, one by one: it lists them with commas between."""
    if isinstance(path, Path):
        return [str(path)]
    found = [part.strip() for part in path.split(",") if part.strip()]
    return found or [path]


def files_of(part: str) -> list[Path] | None:
    """The files that one part names: itself, those of a pattern, or of a folder, sorted.

    Returns:
      None: it is a data set of Hugging Face's.

    Raises:
      DataError: a pattern or folder without such files.
    """
    path = given_path(part, "data: ")
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


def hub_rows(part: str, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of a data set of Hugging Face's: a name, or a folder of `save_to_disk`.

    Args:
      part: `owner/name`, `owner/name/configuration`, each with `:split` behind it or not; or the
        folder, likewise.
      split: which one where ``part`` names none.

    Raises:
      DataError: `datasets` is not installed, or it cannot load this.
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
            assert match is not None  # or files_of had taken it
            table = datasets.load_dataset(match[1], match[2], split=match[3] or split)
        rows = [dict(row) for row in table]
    except Exception as error:  # the library raises many kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{part}: datasets cannot load it ({reason})") from error
    yield from ((f"{part}: row {number}", row) for number, row in enumerate(rows, start=1))
