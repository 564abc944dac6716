"""Shutdown of a server: by a signal, within seconds, even if its engine does not stop."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable

# Seconds after limits.drain_seconds at which the process exits, whatever runs in it.
EXIT_SECONDS = 4


def exit_after(seconds: float) -> None:
    """Exit the process after ``seconds`` with status 1: compiling cannot be interrupted."""
    timer = threading.Timer(seconds, _exit)
    timer.daemon = True
    timer.start()


def _exit() -> None:
    print("hjax: the engine did not end in time; left", file=sys.stderr, flush=True)
    os._exit(1)


def handle_signals(stop: Callable[[], None], drain_seconds: float) -> Callable[[], int]:
    """Have SIGTERM and SIGINT call ``stop`` on the event loop, once or more.

    Args:
      drain_seconds: that requests have to finish; ``EXIT_SECONDS`` seconds later the process exits.

    Returns:
      a function that gives the exit status at the end.
    """
    came: list[int] = []

    def heard(number: int) -> None:
        if signal.SIGINT in came and number == signal.SIGINT:
            os._exit(130)  # a second Ctrl-C does not wait
        came.append(number)
        exit_after(drain_seconds + EXIT_SECONDS)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, heard, number)
    return lambda: 130 if signal.SIGINT in came else 0
