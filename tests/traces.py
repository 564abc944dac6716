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


def sockets(pids: Iterable[int]) -> dict[str, str]:
    """Sockets on which processes listen for connections, with their addresses."""
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    return {socket: address for socket, address in listening().items() if socket in held}


def listening() -> dict[str, str]:
    """All sockets of this machine on which somebody listens, with their addresses, in the digits
    of /proc/net/tcp and tcp6."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENS:
                    found[f"socket:[{fields[9]}]"] = fields[1].partition(":")[0]
    return found
