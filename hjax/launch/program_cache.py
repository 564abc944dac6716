"""Compiled programs that are kept: what a kill or a full disk has torn is not kept.

JAX writes an entry of its cache in place, warns of one that it cannot read in every run, compiles
the program anew, and never replaces it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import zlib
from pathlib import Path

# The time of this file says up to when entries have been looked at.
_CHECKED = ".hjax-checked"
# An entry that was written to so shortly before is looked at again: it may not have been whole.
_WRITING_SECONDS = 600.0
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def drop_torn(folder: Path) -> int:
    """Delete torn entries of JAX's cache among those written since the last look; how many."""
    marker, now = folder / _CHECKED, time.time()
    try:
        checked = marker.stat().st_mtime
    except OSError:
        checked = 0.0
    dropped = 0
    with contextlib.suppress(OSError):  # there is none yet, or it is not ours to clean
        for entry in os.scandir(folder):
            if not entry.name.endswith("-cache") or entry.stat().st_mtime < checked:
                continue
            if not _whole(Path(entry.path).read_bytes()):
                Path(entry.path).unlink(missing_ok=True)
                dropped += 1
        marker.touch()
        os.utime(marker, (now - _WRITING_SECONDS,) * 2)
    return dropped


def _whole(data: bytes) -> bool:
    """Whether an entry, compressed, can be read to its end."""
    if not data.startswith(_ZSTANDARD):
        try:
            return len(zlib.decompress(data)) > 0
        except zlib.error:
            return False
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:  # then JAX cannot read it either, and says so
        return True
    try:
        return len(zstandard.ZstdDecompressor().decompress(data)) > 0
    except zstandard.ZstdError:
        return False
