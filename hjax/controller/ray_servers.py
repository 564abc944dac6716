"""Ray's own processes: without them it answers nobody, so they are watched from outside of it."""

from __future__ import annotations

import os
import socket
import time

from hjax.controller.ray_calls import whereabouts
from hjax.machine import children, descendants, end_all, name_of, state

# Without these of its processes no part of Ray works.
NAMES = ("gcs_server", "raylet")


class Servers:
    """Those of the cluster that this process is in.

    Attributes:
      node: Ray's id of this host.
    """

    def __init__(self) -> None:
        self.meet()

    def meet(self) -> None:
        """Take note of where Ray is, and which of its processes were started here."""
        self.node, self._head = whereabouts()
        found = {pid: name_of(pid) for pid in children(os.getpid())}
        self._here = {pid: name for pid, name in found.items() if name in NAMES}
        self._kin: list[int] = []
        self._silent_since: float | None = None

    def failure(self, seconds: float) -> str:
        """Why Ray is of no use any more; empty: it is.

        Args:
          seconds: without a sign of life after which it is not.
        """
        for pid, name in self._here.items():
            if state(pid) in ("", "Z", "X"):
                return f"Ray's {name} (pid {pid} on this machine) died"
        self._kin = [kin for pid in self._here for kin in descendants(pid)]
        stopped = [(pid, name) for pid, name in self._here.items() if state(pid) in "Tt"]
        if not stopped and (self._here or reachable(self._head)):
            self._silent_since = None
            return ""
        now = time.monotonic()
        since = self._silent_since = self._silent_since or now
        if now - since <= seconds:
            return ""
        pid, name = stopped[0] if stopped else (0, "")
        who = f"Ray's {name} (pid {pid} on this machine)" if pid else f"Ray at {self._head}"
        return f"{who} has given no sign of life for {now - since:.0f} seconds"

    def end(self) -> None:
        """End those that were started here, and what they started."""
        end_all([*self._here, *self._kin])


def reachable(address: str) -> bool:
    """Whether somebody takes connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
