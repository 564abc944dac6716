"""Counts the programs XLA compiles, by name."""

from __future__ import annotations

import threading

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Programs compiled in this process since it was made (or loaded from the disk cache)."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._names: list[str] = []
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def take_names(self) -> list[str]:
        """Names of the programs compiled since last asked."""
        with self._lock:
            names, self._names = self._names, []
        return names

    def _heard(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event != _EVENT:
            return
        name = str(details.get("fun_name", "program"))
        if name.startswith("jit(") and name.endswith(")"):
            name = name[4:-1]
        with self._lock:
            self.count += 1
            self.seconds += duration_secs
            self._names.append(name)
