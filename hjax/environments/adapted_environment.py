"""Environments of other packages by name: ``openenv:http://HOST:PORT``, ``textarena:ID``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from hjax.environments.environment import Environment
from hjax.errors import ConfigError, DataError, one_line, short_repr

# The first word of a name, and the class that plays what it names.
ADAPTERS = {
    "openenv": "hjax.environments.openenv_adapter:OpenEnvEnvironment",
    "textarena": "hjax.environments.textarena_adapter:TextArenaEnvironment",
    "verifiers": "hjax.environments.verifiers_adapter:VerifiersEnvironment",
}


class AdaptedEnvironment(Environment):
    """Base class of environments that play those of another package.

    ``environment.function=NAME:TARGET`` makes a subclass for its target. A file of your own may
    subclass one too, set ``target`` and change how texts and actions are read.

    Attributes:
      target: what is played: an address, or the id of an environment.
    """

    target: ClassVar[str] = ""

    @classmethod
    def check_target(cls) -> None:
        """See that the target can be played, before any episode.

        Raises:
          ConfigError: a package is missing, or the target is none.
        """
        raise NotImplementedError(f"{cls.__name__} must define check_target")

    def first_text(self, task: Mapping[str, Any], seen: str) -> str:
        """The first observation: the row's prompt, if it has any, above what the environment shows.

        Raises:
          DataError: the prompt is no text.
        """
        prompt = task.get("prompt") or ""
        if not isinstance(prompt, str):
            raise DataError(
                f"prompt is {short_repr(prompt)}; beside an environment of {type(self).__name__} "
                "it must be text, which is shown above the first observation"
            )
        return "\n".join(part for part in (prompt, seen) if part)

    def _begin_call(self) -> None:
        # A little before the deadline of the call, which would end all episodes of this process.
        self._seconds = 0.9 * self.step_seconds
        self._deadline = time.monotonic() + self._seconds

    def _left(self) -> float:
        """Seconds that the call still has."""
        return max(self._deadline - time.monotonic(), 1e-3)


def adapted_class(name: str, target: str) -> type[AdaptedEnvironment]:
    """The class of a name of ``ADAPTERS``, for a target."""
    module, _, attribute = ADAPTERS[name].partition(":")
    base = getattr(importlib.import_module(module), attribute)
    return type(base.__name__, (base,), {"target": target})


def adapter_package(module: str, package: str) -> ModuleType:
    """A package that an adapter needs.

    Raises:
      ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"it needs {package}, which cannot be imported ({one_line(error)}): "
            f"pip install {package}"
        ) from None
