"""Checksums of a checkpoint: one per item, written when it is saved and verified when it is read.

``checksums.json`` in its folder has the step and, for each item (a folder of arrays, or
``controller.json``), its bytes and BLAKE2b over its files' names, lengths and contents, by name.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hjax.errors import DataError, short_repr
from hjax.files import read_json, replace_file, special_file

CHECKSUMS = "checksums.json"
_READ_BYTES, _THREADS = 1 << 20, 8  # bytes per read; items hashed at a time


def write_checksums(folder: Path, step: int | str) -> None:
    """Write the checksums of everything in a checkpoint's folder; ``step``: its final name."""
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    content = {"step": step, "items": _checksums(folder, names)}
    replace_file(folder / CHECKSUMS, json.dumps(content, indent=1) + "\n")


def verify_checksums(folder: Path, names: Iterable[str] | None = None) -> bool:
    """Verify items of a checkpoint against its checksums.

    Args:
      folder: of the checkpoint; its name is the step.
      names: of items; None: all that were saved.

    Returns:
      whether it has checksums; checkpoints of earlier versions have none.

    Raises:
      DataError: it is of another step, an item is missing or differs from what was saved, or
        something else than a file is in a file's place, which its reader would wait for.
      OSError: it cannot be read.
    """
    for path in folder.rglob("*"):
        if special := special_file(path):
            raise DataError(f"{path.relative_to(folder)} is {special}, not a file")
    saved = read_checksums(folder)
    if not saved:
        return False
    names = list(saved) if names is None else list(names)
    for name in names:
        if name not in saved:
            raise DataError(f"{name} is not among what was saved")
        if not (folder / name).exists():
            raise DataError(f"{name} is missing")
    for name, found in _checksums(folder, names).items():
        if found != saved[name]:
            raise DataError(f"{name} is not what was saved: its checksum differs")
    return True


def read_checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """The saved checksums of a checkpoint, by item; empty if it has none.

    Raises:
      DataError: the file is damaged, or of another step.
      OSError: the file cannot be read.
    """
    content = read_json(folder / CHECKSUMS)
    if content is None:
        return {}
    try:
        step, saved = content["step"], dict(content["items"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"{CHECKSUMS} is damaged") from error
    if str(step) != folder.name:
        raise DataError(f"it was saved as step {short_repr(step)}")
    if wrong := [name for name in saved if name in ("", "..") or name != Path(name).name]:
        raise DataError(f"{CHECKSUMS} names {short_repr(wrong[0])}, which is not in its folder")
    return saved


def _checksums(folder: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _checksum(folder / name), names), strict=True))


def _checksum(item: Path) -> dict[str, Any]:
    """Bytes and checksum of a file, or of all files in a folder."""
    files = [item] if item.is_file() else [path for path in item.rglob("*") if path.is_file()]
    total, digest = 0, hashlib.blake2b(digest_size=32)
    for path in sorted(files):
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.relative_to(item.parent).as_posix()}\0{size}\0".encode())
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
        total += size
    return {"bytes": total, "blake2b": digest.hexdigest()}
