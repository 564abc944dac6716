"""How far work below the display has come: who does it tells, whoever shows it listens."""

import contextlib
from collections.abc import Callable, Iterator

# Told what is done, how much of it, and how much there is (in any unit).
Listener = Callable[[str, int, int], None]

_listeners: list[Listener] = []


@contextlib.contextmanager
def shown(listener: Listener) -> Iterator[None]:
    """Hear of all work of this process, in whatever thread it is done, while the block lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def tell(what: str, done: int, total: int) -> None:
    """So much is done."""
    for listener in tuple(_listeners):
        listener(what, done, total)
