"""hjax's files: JSON without non-finite numbers, atomic replacement, one-line errors."""

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import DataError, RunError

StrPath = str | os.PathLike[str]

CONTROLLER = "controller.json"  # in a checkpoint, the controller's state
# Bytes of a file that is read whole, and of a row: one that only claims to be large is not read.
LARGEST_FILE, _LONGEST_LINE = 2**30, 2**26
# Files of rows in a run's workdir.
METRICS = "metrics.jsonl"
WARM_START = "warm_start.jsonl"
SAMPLES = "samples.jsonl"
HISTOGRAMS = "histograms.jsonl"
STARTS = "starts.jsonl"
CALIBRATION = "calibration.jsonl"
# Rows of the data that a run leaves out: locations by what is wrong with them.
LEFT_OUT = "left_out_rows.json"
# Which checkpoint is the best by ``checkpoint.best``: its step, the metric and its value.
BEST = "best.json"
# What the devices' time went to in the steps of --profile, see hjax/run/device_trace.py.
PROFILE = "profile.json"
# Which kernels and collectives a run on an accelerator takes, see hjax/kernels/verdict.py.
KERNELS = "kernels.json"


# Folders of a run's workdir that may be removed with it; the file that its process locks.
MODEL, TENSORBOARD, LOCK = "model", "tensorboard", ".lock"
RUN_FOLDERS = ("checkpoints", MODEL, TENSORBOARD, "skipped", "profile")


def cache_folder(*parts: str) -> Path:
    """The folder for files that can be made again: ``$XDG_CACHE_HOME/hjax`` or
    ``~/.cache/hjax``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").joinpath("hjax", *parts)


_SPECIAL_FILES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def special_file(path: StrPath) -> str:
    """What is at a path, links followed, if it is neither a file nor a directory: "a FIFO", "a
    socket", "a device", "a link to TARGET, which does not exist"; else, and if nothing is there, an
    empty text."""
    try:
        return _SPECIAL_FILES.get(stat.S_IFMT(os.stat(path).st_mode), "")
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a loop of links"
        if isinstance(error, FileNotFoundError) and os.path.islink(path):
            return f"a link to {os.readlink(path)}, which does not exist"
        return ""


def mount_points(path: StrPath) -> list[str]:
    """Mount points at a path and below it; of bind mounts too, which ``Path.is_mount`` does not
    find where they are of the same file system."""
    root = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:  # another system than Linux
        return [root] if os.path.ismount(root) else []
    # The fifth field, with spaces and other such bytes in octal.
    octal = re.compile(rb"\\([0-7]{3})")
    found = (octal.sub(lambda x: bytes([int(x[1], 8)]), line.split(b" ")[4]) for line in lines)
    return [at for at in map(os.fsdecode, found) if f"{at}/".startswith(f"{root}/")]


def enclosing_run(path: StrPath) -> tuple[str, Path] | None:
    """The folder of a run's that a path is or lies in, by its name, and the run's workdir; None: it
    is in none."""
    own = Path(os.path.realpath(path))
    for folder in (own, *own.parents):
        files = (folder.parent / name for name in ("config.json", LOCK))
        if folder.name in RUN_FOLDERS and all(file.exists() for file in files):
            return folder.name, folder.parent
    return None


def open_regular(path: str, flags: int, mode: int = 0o666) -> int:
    """An opener for ``open``: a FIFO is not waited for, and a device neither read nor written.

    Raises:
      OSError: the path has something else than a regular file.
    """
    if flags & os.O_ACCMODE != os.O_RDONLY and (found := special_file(path)):
        raise OSError(errno.EINVAL, f"{found}, not a file", str(path))
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        found = special_file(path) or "a directory"
        raise OSError(errno.EINVAL, f"{found}, not a file", str(path))
    return descriptor


def read_bytes(path: Path, most: int = LARGEST_FILE) -> bytes:
    """The bytes of a regular file; raises OSError as ``open_regular`` does, and for more than
    ``most``."""
    with open(path, "rb", opener=open_regular) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{size} bytes; at most {most}", str(path))
        return file.read()


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


def append_rows(path: Path, rows: Sequence[Any]) -> None:
    """Append rows to a new `.jsonl` file of a command's.

    Raises:
      RunError: it cannot be written; what there is of it is removed, as it would look whole.
    """
    try:
        with open(path, "a", encoding="utf-8", errors="replace", opener=open_regular) as file:
            file.writelines(json_line(row) + "\n" for row in rows)
    except OSError as error:
        if path.is_file():
            path.unlink()
        raise RunError(f"{path} could not be written: {error.strerror}") from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `.jsonl` file; none if absent. An incomplete last line is left out.

    Raises:
      DataError: a line before the last that is not a JSON object with a step, a line that is far
        too long, a link to nothing.
    """
    if not path.exists():
        if found := special_file(path):
            raise DataError(f"{path}: {found}, not a file")
        return []
    rows = []
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{path}:{number}: not a JSON object with a step; the file is damaged")
        rows.append(row)
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file. Text after the last newline is left out: it was cut off by a kill."""
    with open(path, "rb", opener=open_regular) as file:
        while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
            yield line
    if len(line) == _LONGEST_LINE:
        raise DataError(f"{path}: a line of {_LONGEST_LINE} bytes or more; the file is damaged")


def drop_partial_line(path: Path) -> None:
    """Cut off the text after a file's last newline, which a kill has left; nothing without a file.

    Raises:
      DataError: it is far too long for a row.
    """
    if not path.exists():
        return
    with open(path, "rb+", opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _LONGEST_LINE)
        file.seek(start)
        end = start + file.read().rfind(b"\n") + 1
        if end == start > 0:
            raise DataError(f"{path}: a line of {_LONGEST_LINE} bytes or more; it is damaged")
        if end < size:
            file.truncate(end)
            os.fsync(file.fileno())


def saved_steps(directory: Path) -> list[int]:
    """The steps with a complete checkpoint in a run's ``checkpoints/``, ascending."""
    names = [p.name for p in directory.iterdir() if p.name.isascii() and p.name.isdigit()]
    # Other spellings of a number (007) are no checkpoint.
    found = [int(name) for name in names if str(int(name)) == name]
    return sorted(step for step in found if (directory / str(step)).is_dir())


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if it is absent.

    Raises:
      DataError: the file is not JSON, or far too large.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        raise DataError(f"{path}: {error.strerror}; the file is damaged") from error
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

    After an error ``path`` is unchanged. Permissions are those of any new file. If ``path`` is a
    link, the file that it leads to is replaced.

    Raises:
      OSError: with the path as its file name: it cannot be written, or has no regular file.
    """
    if found := special_file(path):
        raise OSError(errno.EINVAL, f"{found}, not a file", str(path))
    path = Path(os.path.realpath(path))
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PART}")
    # The system applies the umask; reading it would change it for other threads.
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield part
        sync_file(part)
        os.replace(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def replace_files(directory: Path, contents: Mapping[str, str]) -> None:
    """Write or replace files, by name, in a directory, which is created. After an error the
    directory, or the files that are new, are removed.

    Raises:
      OSError: with the file's name: it cannot be written.
    """
    is_new = not directory.exists()
    new = [directory / name for name in contents if not (directory / name).exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            replace_file(directory / name, content)
    except OSError:
        for path in new:
            path.unlink(missing_ok=True)
        if is_new and directory.is_dir():
            directory.rmdir()
        raise


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk; raises OSError if it could not be written."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def remove_parts(directory: Path) -> None:
    """Remove files that a killed ``replacing`` left in a directory; nobody may be writing there."""
    for part in directory.glob(f".*{_PART}"):
        part.unlink(missing_ok=True)
