"""Turns on devices that training and sampling share."""

import collections
import contextlib
import threading
from collections.abc import Iterator


class DeviceTurns:
    """A lock that is granted in the order of requests.

    Programs of several devices that two threads start at once may wait for each other for ever:
    each has some of the devices, and its collectives wait for the others.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[threading.Event] = collections.deque()
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the devices, and have them until the end of the block; not reentrant."""
        mine = threading.Event()
        with self._guard:
            self._waiting.append(mine)
            if len(self._waiting) == 1:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._guard:
                self._waiting.popleft()
                if self._waiting:
                    self._waiting[0].set()
