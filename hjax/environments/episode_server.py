"""The process of environments: holds the objects of several episodes and answers their calls.

Requests come pickled from the run; answers are JSON, because output of this process is never
unpickled.
"""

import contextlib
import importlib
import inspect
import json
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from hjax.environments.adapted_environment import (
    ADAPTERS,
    AdaptedEnvironment,
    adapted_class,
)
from hjax.environments.environment import Environment, Observation, Step, anchor_digest
from hjax.errors import ConfigError, DataError, short_repr, truncate
from hjax.user_code import load_object, provide_files, user_traceback

# Longest text of an observation, in characters, and of an error's traceback.
TEXT_LIMIT, TRACEBACK_LIMIT = 1 << 20, 8000
# Fields of an observation that is chat messages.
CONVERSATION = ("messages", "tools", "template_arguments")
_HERE = str(Path(__file__).parent)


def load_environment(spec: str, setting: str = "environment.function") -> type[Environment]:
    """The class of an environment: ``path.py:Class``, ``module:Class`` for those of hjax, or
    ``NAME:TARGET`` for those of other packages.

    Args:
      spec: its name.
      setting: that names it, for messages.

    Raises:
      ConfigError: another form, no such file or name, no class with reset, step and close, or one
        of another package that cannot be played.
    """
    module, _, name = spec.partition(":")
    if module in ADAPTERS:
        found: Any = adapted_class(module, name)
    elif module.startswith("hjax.") and name:
        found = getattr(importlib.import_module(module), name, None)
    else:
        found = load_object(spec, setting)
    lacking = [n for n in ("reset", "step", "close") if not callable(getattr(found, n, None))]
    if not inspect.isclass(found) or lacking:
        what = f"has no {', '.join(lacking)}" if inspect.isclass(found) else "is no class"
        raise ConfigError(f"{setting}={spec!r}: it {what}; subclass hjax.Environment")
    if issubclass(found, AdaptedEnvironment):
        try:
            found.check_target()
        except ConfigError as error:
            raise ConfigError(f"{setting}={spec!r}: {error}") from None
    return cast(type[Environment], found)


def takes_sandbox(environment: type[Environment]) -> bool:
    """Whether an environment runs programs: its constructor's argument ``sandbox`` is the run's
    ``hjax.sandbox.sandbox_settings.SandboxSettings``, whose ``make()`` is the sandbox."""
    return "sandbox" in inspect.signature(environment).parameters


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """The function that answers calls, see ``hjax.isolated_process.IsolatedProcess``.

    Args:
      setup: pickled ``spec`` of ``load_environment``, ``options`` for its constructor, ``files`` of
        the run's user code, ``step_seconds``, the deadline of a call, and ``memory_bytes``, the
        limit of this process's data; 0: none.
    """
    told = pickle.loads(setup)
    provide_files(told["files"])
    if told["memory_bytes"]:
        with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (told["memory_bytes"],) * 2)
    Environment.step_seconds = told["step_seconds"]
    server = _EpisodeServer(load_environment(told["spec"]), told["options"])
    return server.answer


class _EpisodeServer:
    """Environments by the number of their episode."""

    def __init__(self, environment: type[Environment], options: Mapping[str, Any]):
        self._environment, self._options = environment, options
        self._open: dict[int, Environment] = {}

    def answer(self, request: bytes) -> bytes:
        """The answer to a call, as JSON; the environment's errors are answers too."""
        call, episode, arguments = pickle.loads(request)
        start = time.perf_counter()
        try:
            made = getattr(self, f"_{call}")(episode, *arguments)
        except MemoryError as error:
            made = {"fault": "exception", "text": f"MemoryError: {error}", "restart": True}
        except BaseException as error:  # SystemExit of the environment's too
            made = {"fault": "exception", "text": _traceback(error)}
        made["seconds"] = time.perf_counter() - start
        return json.dumps(made).encode()

    def _reset(self, episode: int, task: Mapping[str, Any], seed: int) -> dict[str, Any]:
        self._open[episode] = environment = self._environment(**self._options)
        observation = environment.reset(task, seed)
        if not isinstance(observation, Observation):
            raise DataError(
                f"{type(environment).__name__}.reset returned {short_repr(observation, 80)}; it "
                "must be a hjax.Observation"
            )
        return _observed(observation)

    def _step(self, episode: int, action: str) -> dict[str, Any]:
        environment = self._open[episode]
        step = environment.step(action)
        if not isinstance(step, Step):
            raise DataError(
                f"{type(environment).__name__}.step returned {short_repr(step, 80)}; it must be a "
                "hjax.Step"
            )
        told = {name: getattr(step, name) for name in ("reward", "done", "valid", "fresh")}
        return _observed(step.observation) | told | {"metrics": dict(step.metrics)}

    def _close(self, episode: int) -> dict[str, Any]:
        environment = self._open.pop(episode, None)
        if environment is not None:
            environment.close()
        return {}


def _observed(observation: Observation) -> dict[str, Any]:
    size = max(len(observation.text), len(json.dumps(observation.messages)))
    if size > TEXT_LIMIT:
        raise DataError(f"an observation of {size} characters; at most {TEXT_LIMIT}")
    anchor = None if observation.anchor is None else anchor_digest(observation.anchor).hex()
    told = {"observation": observation.text, "anchor": anchor, "stop": list(observation.stop)}
    chat = {name: getattr(observation, name) for name in CONVERSATION}
    return told | {name: value for name, value in chat.items() if value}


def _traceback(error: BaseException) -> str:
    try:
        text = user_traceback(error, _HERE)
    except Exception:  # formatting the error may fail too
        text = type(error).__name__
    return truncate(text, TRACEBACK_LIMIT)
