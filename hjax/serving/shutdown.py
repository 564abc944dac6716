"""The end of a server: by a signal, within seconds, also where its engine does not end."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

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


def on_signals(stop: Callable[[], None], drain_seconds: float) -> Callable[[], int]:
    """Have SIGTERM and SIGINT call ``stop`` on the event loop, once or more.

    Args:
      drain_seconds: that requests have to end; ``GONE`` seconds later the process does.

    Returns:
      the exit status, to be asked for at the end.
    """
    came: list[int] = []

    def heard(number: int) -> None:
        if signal.SIGINT in came and number == signal.SIGINT:
            os._exit(130)  # a second Ctrl-C does not wait
        came.append(number)
        leave_after(drain_seconds + GONE)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, heard, number)
    return lambda: 130 if signal.SIGINT in came else 0
