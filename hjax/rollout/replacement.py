"""Weights that take the place of others while requests are answered."""

from __future__ import annotations

import threading
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.sharding.manifest import named_leaves


class Replacement:
    """Somebody waits until the engine's thread has taken these weights.

    Args:
      params: as ``LanguageModel.held`` gives them.
    """

    def __init__(self, params: Any):
        self.params = params
        self._refused = ""
        self._ended = threading.Event()

    def end(self, refused: str = "") -> None:
        """Whoever waits goes on.

        Args:
          refused: why the weights were not taken; empty: they were.
        """
        self._refused = refused
        self._ended.set()

    def wait(self, seconds: float | None) -> None:
        """Until it has ended, or so many seconds; None: as long as it takes."""
        self._ended.wait(seconds)

    def check(self) -> None:
        """RunError if the weights were not taken."""
        if self._refused:
            raise RunError(self._refused)


def check_alike(params: Any, like: Any) -> None:
    """That parameters are those of the same model.

    Args:
      params: nested dict of arrays.
      like: nested dict of jax.Array or jax.ShapeDtypeStruct.

    Raises:
      ConfigError: other names, shapes or dtypes, the first of them.
    """
    new, old = named_leaves(params), named_leaves(like)
    for name in (*old, *new):
        ours, theirs = (_kind(some[name]) if name in some else "nothing" for some in (old, new))
        if ours != theirs:
            raise ConfigError(
                f"{name} of the new weights is {theirs}, of those that answer {ours}; give weights "
                "of a model of the same shapes"
            )


def _kind(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"a {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)}"
