"""Folders that a process makes and removes; if it is killed, a later one removes them.

Each has a file that is locked while its process lives.
"""

import contextlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

_LOCK = "lock"
# Seconds within which a folder that was just made gets its lock.
_NEW_SECONDS = 60.0
# What ``tempfile`` adds to a prefix.
_RANDOM = re.compile(r"[a-z0-9_]{8}")


class TemporaryFolder:
    """A folder of this process, until ``remove`` or the end of its ``with`` block.

    Folders of this user with such a name, whose processes have ended, are removed first.

    Args:
      prefix: of its name.
      parent: where it is made; None: the temporary directory.

    Attributes:
      path: of the folder; ``lock`` is taken in it.

    Raises:
      OSError: it cannot be made.
    """

    def __init__(self, prefix: str, parent: Path | None = None):
        parent = Path(tempfile.gettempdir() if parent is None else parent)
        _remove_left_over(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
        try:
            self._handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            remove_folder(self.path)
            raise
        _lock(self._handle)

    def remove(self) -> None:
        """Remove it with all that is in it, whatever its permissions; again: nothing."""
        if self._handle >= 0:
            remove_folder(self.path)
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def _remove_left_over(parent: Path, prefix: str) -> None:
    for folder in parent.iterdir():
        name = folder.name
        if not name.startswith(prefix) or not _RANDOM.fullmatch(name.removeprefix(prefix)):
            continue
        with contextlib.suppress(OSError):
            found = folder.lstat()
            own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if not own or time.time() - found.st_mtime < _NEW_SECONDS:
                continue
            flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
            try:
                handle = os.open(folder / _LOCK, flags)
            except FileNotFoundError:
                folder.rmdir()  # killed before it had one; only empty ones are
                continue
            try:
                if _lock(handle):
                    remove_folder(folder)
            finally:
                os.close(handle)


def _lock(handle: int) -> bool:
    """Lock an open file until it is closed, at the latest with this process; False: another has
    locked it, or there are no locks here."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def remove_folder(folder: Path) -> None:
    """Remove a folder, also one that is closed to its owner or thousands of folders deep."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], capture_output=True, check=False)
        subprocess.run(["rm", "-rf", str(folder)], capture_output=True, check=False)
