"""Counts the programs XLA compiles, by name."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"
# The last thing before it.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# JAX's listeners stay for good, so that there is one, which tells the counters still in use.
_counters: weakref.WeakSet[CompileCounter] = weakref.WeakSet()
_lock = threading.Lock()


class CompileCounter:
    """Programs compiled in this process since it was made (or loaded from the disk cache).

    Args:
      tell: is told of each program's name as its compilation begins, with None, and as it ends,
        with the seconds it took; in whatever thread compiles.
    """

    def __init__(self, tell: Callable[[str, float | None], None] | None = None) -> None:
        self.count = 0
        self.seconds = 0.0
        self._tell = tell
        self._names: list[str] = []
        with _lock:
            _listen()
            _counters.add(self)

    def take_names(self) -> list[str]:
        """Names of the programs compiled since last asked."""
        with _lock:
            names, self._names = self._names, []
        return names

    def add(self, name: str, seconds: float) -> None:
        """One more program."""
        self.count += 1
        self.seconds += seconds
        self._names.append(name)

    def tell(self, name: str, seconds: float | None) -> None:
        """Its compilation begins (None), or has ended."""
        if self._tell is not None:
            self._tell(name, seconds)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **details: str | int) -> None:
    if event not in (_EVENT, _LOWERED):
        return
    name = str(details.get("fun_name", "program"))
    if name.startswith("jit(") and name.endswith(")"):
        name = name[4:-1]
    with _lock:
        counters = list(_counters)
        for counter in counters if event == _EVENT else ():
            counter.add(name, duration_secs)
    for counter in counters:
        counter.tell(name, duration_secs if event == _EVENT else None)
