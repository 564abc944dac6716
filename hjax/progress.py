"""Progress of long work: code that does it reports, a display listens."""

import contextlib
from collections.abc import Callable, Iterator

# Called with what is done, how much of it is done, and the total (in any unit).
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


@contextlib.contextmanager
def progress_listener(listener: Listener) -> Iterator[None]:
    """Listen to the progress of all work of this process, in every thread, within the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def report_progress(what: str, done: int, total: int) -> None:
    """Report how much of ``total`` is done."""
    for listener in tuple(_listeners):
        listener(what, done, total)
