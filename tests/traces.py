"""What processes hold of this machine that could outlast them: ports and shared memory (Linux)."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterable

LISTENS = "0A"


def segments(pids: Iterable[int]) -> set[str]:
    """Files of shared memory that processes have mapped, and that are there by name."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/dev/shm/")[2]
                if path and not path.endswith("(deleted)"):
                    found.add(f"/dev/shm/{path}")
    return found


def sockets(pids: Iterable[int]) -> set[str]:
    """Sockets on which processes listen for connections."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    return {socket for socket in listening() if socket in held}


def listening() -> set[str]:
    """All sockets of this machine on which somebody listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    found.add(f"socket:[{fields[9]}]")
    return found
