"""Files in a folder that an untrusted program has written to: no link is followed."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from hjax.errors import DataError


def write_within(folder: Path, path: str, content: bytes, owner: int) -> None:
    """Write a file, with the folders above it; what is in its place is replaced.

    Args:
      owner: user of what is made; 0: this process's.

    Raises:
      DataError: the path leads out of the folder, or through what is no folder.
    """
    with _opened_parent(folder, path, owner) as (parent, name):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        handle = os.open(name, flags, 0o644, dir_fd=parent)
        with os.fdopen(handle, "wb") as file:
            if owner:
                os.fchown(handle, owner, owner)
            file.write(content)


def read_within(folder: Path, path: str, limit: int) -> bytes:
    """A file's first ``limit`` bytes.

    Raises:
      DataError: the path leads out of the folder or through a link, or it is no regular file.
    """
    with _opened_parent(folder, path, None) as (parent, name):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(name, flags, dir_fd=parent), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DataError(f"sandbox: {path!r} is no regular file; only those are read")
            return file.read(limit)


@contextlib.contextmanager
def _opened_parent(folder: Path, path: str, owner: int | None) -> Iterator[tuple[int, str]]:
    """The folder of a path as a descriptor, and the last part. ``owner``: make missing folders."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in path:
        raise DataError(
            f"sandbox: {path!r} must be a relative path, without empty parts, '.' and '..'"
        )
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            if owner is not None:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=handle)
                    if owner:
                        os.chown(part, owner, owner, dir_fd=handle, follow_symlinks=False)
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(part, flags, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle, parts[-1]
    except OSError as error:
        raise DataError(f"sandbox: {path!r} cannot be used: {error.strerror}") from None
    finally:
        os.close(handle)
