"""The end of a process whose engine does not end."""

from __future__ import annotations

import os
import sys
import threading

# Seconds after limits.drain_seconds when the process ends, whatever runs in it.
GONE = 4


def leave_after(seconds: float) -> None:
    """End the process then, with status 1: a program that is being compiled cannot be stopped."""
    timer = threading.Timer(seconds, _leave)
    timer.daemon = True
    timer.start()


def _leave() -> None:
    print("hjax: the engine did not end in time; left", file=sys.stderr, flush=True)
    os._exit(1)
