"""Futures: what a worker group's call returns at once."""

import concurrent.futures
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hjax.errors import RunError
from hjax.sharded_values import map_leaves

DEADLINE_SECONDS = 24 * 3600.0


class Future:
    """The result of a call that may not have run yet.

    Pass it on to another group's call without waiting; the receiving pool waits for it.
    """

    def __init__(self, inner: concurrent.futures.Future, label: str):
        self._inner = inner
        self.label = label

    def result(self, timeout_seconds: float = DEADLINE_SECONDS) -> Any:
        """Wait for the value; an exception of the call is raised here.

        Raises:
          RunError: the deadline passed; the message names the late call.
        """
        try:
            return self._inner.result(timeout_seconds)
        except (concurrent.futures.TimeoutError, TimeoutError) as error:
            if self._inner.done():
                raise
            raise RunError(
                f"{self.label} has not answered within {timeout_seconds:g} seconds"
            ) from error

    def done(self) -> bool:
        """Whether the call has finished, successfully or not."""
        return self._inner.done()


def resolve(value: Any) -> Any:
    """``value`` with every Future in it (in dicts, lists, tuples) replaced by its result."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Mapping):
        return {key: resolve(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*map(resolve, value))
    if isinstance(value, list | tuple):
        return type(value)(resolve(item) for item in value)
    return value


def join(*parts: Any, **named: Any) -> dict[str, Any]:
    """Wait for dicts or futures of dicts and merge them on the controller; later ones win.

    A part passed by keyword becomes a dict under that key, so results of the same names do not
    collide: ``join(batch, rewards, baseline=greedy_rewards)``.

    Arrays come to the host as numpy arrays, so that the controller can mix results of different
    pools. Dicts keep the order of their keys (``jax.tree.map`` would sort them).
    """
    merged: dict[str, Any] = {}
    for part in parts:
        merged.update(resolve(part))
    merged.update(resolve(named))
    joined: dict[str, Any] = map_leaves(
        lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, merged
    )
    return joined
