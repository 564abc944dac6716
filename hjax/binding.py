"""Which methods of a worker class can be called from the controller, and how: found in one way."""

from __future__ import annotations

import importlib
from typing import Any


def worker_class(worker: Any) -> Any:
    """A worker's class, imported where it is named ``module:Class``."""
    if not isinstance(worker, str):
        return worker
    module, _, name = worker.partition(":")
    return getattr(importlib.import_module(module), name)


def binding(worker: Any, name: str) -> Any:
    """The function of a worker class's method that was bound to a protocol, None without one.

    An override that is not bound itself stands for the method it overrides.

    Returns:
      a function with ``protocol``, ``phase``, and maybe ``reads`` and ``background``.
    """
    for base in getattr(worker, "__mro__", (worker,)):
        method = vars(base).get(name)
        if hasattr(method, "protocol"):
            return method
    return None


def bound_methods(worker: Any) -> dict[str, Any]:
    """By name, the bindings of all methods of a worker class that the controller can call."""
    cls = worker_class(worker)
    names = (name for name in dir(cls) if not name.startswith("__"))
    return {name: found for name in names if (found := binding(cls, name)) is not None}
