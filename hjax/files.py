"""hjax's files: JSON without non-finite numbers, atomic replacement, one-line errors."""

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import DataError

StrPath = str | os.PathLike[str]

# Files of rows in a run's workdir.
METRICS = "metrics.jsonl"
WARM_START = "warm_start.jsonl"
SAMPLES = "samples.jsonl"
HISTOGRAMS = "histograms.jsonl"
STARTS = "starts.jsonl"
CALIBRATION = "calibration.jsonl"
# Rows of the data that a run leaves out: locations by what is wrong with them.
LEFT_OUT = "left_out_rows.json"
# Which kernels and collectives a run on an accelerator takes, see hjax/kernels/verdict.py.
KERNELS = "kernels.json"


def cache_folder(*parts: str) -> Path:
    """The folder for files that can be made again: ``$XDG_CACHE_HOME/hjax`` or
    ``~/.cache/hjax``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("hjax", *parts)


def to_json(value: Any) -> Any:
    """``value`` in JSON's types: arrays become lists, non-finite numbers None."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "to_dict"):
        return to_json(value.to_dict())
    return to_json(np.asarray(value).tolist())


def json_line(value: Any) -> str:
    """One line of JSON; non-finite numbers become null."""
    return json.dumps(to_json(value), ensure_ascii=False)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `.jsonl` file; none if absent. An incomplete last line is left out.

    Raises:
      DataError: a line before the last that is not a JSON object with a step.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    # Text after the last newline is a line cut off by a kill.
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{path}:{number}: not a JSON object with a step; the file is damaged")
        rows.append(row)
    return rows


def saved_steps(directory: Path) -> list[int]:
    """The steps with a complete checkpoint in a run's ``checkpoints/``, ascending."""
    names = [p.name for p in directory.iterdir() if p.name.isascii() and p.name.isdigit()]
    # Other spellings of a number (007) are no checkpoint.
    found = [int(name) for name in names if str(int(name)) == name]
    return sorted(step for step in found if (directory / str(step)).is_dir())


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if it is absent.

    Raises:
      DataError: the file is not JSON.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON; the file is damaged") from error


# Suffix of files being written; one that a kill has left is useless.
_PART = ".part"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write ``content`` to ``path`` atomically: a reader sees the old or the new file."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", errors="replace")
    with replacing(path) as part:
        part.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file to write into; it replaces ``path`` at the end of the block, synced to disk.

    After an error ``path`` is unchanged. Permissions are those of any new file.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    # The system applies the umask; reading it would change it for other threads.
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield part
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove_parts(directory: Path) -> None:
    """Remove files that a killed ``replacing`` left in a directory; nobody may be writing there."""
    for part in directory.glob(f".*{_PART}"):
        part.unlink(missing_ok=True)
