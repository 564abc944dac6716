"""The process of agents: runs many sessions at a time on one event loop.

Requests come pickled from the run; answers are JSON, because output of this process is never
unpickled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import json
import os
import pickle
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hjax.agents.command_agent import CommandAgent
from hjax.environments.environment import check_reward
from hjax.errors import ConfigError, truncate
from hjax.user_code import load_object, provide_files, user_traceback

# An agent: called with its task, a base URL, a key and a seed.
Agent = Callable[..., Awaitable[Any]]
TRACEBACK_LIMIT = 8000
_THREADS = 1024
_ARGUMENTS = ("task", "base_url", "api_key", "seed")
_HERE = os.path.dirname(__file__)


def load_agent(spec: str, setting: str = "agent.function") -> Agent:
    """An agent in a file, ``path.py:name``: an ``async def`` with three arguments, the task, the
    base URL and the key, and perhaps a fourth, ``seed``.

    Raises:
      ConfigError: no such file or name, or something else.
    """
    found = load_object(spec, setting)
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(
            f"{setting}={spec!r}: it must be a function that begins with `async def`; other "
            "sessions wait while one blocks (asyncio.to_thread runs what does)"
        )
    takes = inspect.signature(found).parameters.values()
    fixed = [p for p in takes if p.kind is not p.VAR_KEYWORD and p.default is p.empty]
    count = len([p for p in fixed if p.kind is not p.KEYWORD_ONLY])
    if not 3 <= count <= 4 or len(fixed) != count:
        raise ConfigError(
            f"{setting}={spec!r}: it must take {', '.join(_ARGUMENTS[:3])} and perhaps seed, in "
            "this order"
        )
    agent: Agent = found
    return agent if count == 4 else lambda task, url, key, seed: agent(task, url, key)


def serve(setup: bytes) -> Callable[[bytes], bytes]:
    """The function that answers calls, see ``hjax.isolated_process.IsolatedProcess``.

    Args:
      setup: pickled ``function`` of ``load_agent``, or else ``program``, the ``ProgramSettings`` of
        a ``CommandAgent``; ``files`` of the run's user code, and ``memory_bytes``, the limit of
        this process's data; 0: none.
    """
    told = pickle.loads(setup)
    provide_files(told["files"])
    for name in [name for name in os.environ if name.startswith("OPENAI_")]:
        del os.environ[name]  # programs that the policy writes would call somebody else
    if told["memory_bytes"]:
        with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (told["memory_bytes"],) * 2)
    if told["function"]:
        return _AgentServer(load_agent(told["function"])).answer
    return _AgentServer(CommandAgent(told["program"])).answer


class _AgentServer:
    """Sessions by the number of their episode."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._ended: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        # Each session may block in a thread of its own while it waits for the policy.
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_THREADS))
        threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()

    def answer(self, request: bytes) -> bytes:
        """Begin and end sessions; returns as JSON those that have ended, after some seconds at
        most."""
        begun, stopped, seconds = pickle.loads(request)
        for session in begun:
            self._loop.call_soon_threadsafe(self._begin, session)
        for number in stopped:
            self._loop.call_soon_threadsafe(self._stop, number)
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self._ended.get(timeout=seconds))
            while True:
                found.append(self._ended.get_nowait())
        return json.dumps(found).encode()

    def _begin(self, session: Mapping[str, Any]) -> None:
        self._tasks[session["number"]] = self._loop.create_task(self._play(**session))

    def _stop(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    async def _play(
        self, number: int, task: Any, url: str, key: str, seed: int, seconds: float
    ) -> None:
        start = time.perf_counter()
        told: dict[str, Any] = {}
        try:
            async with asyncio.timeout(seconds) as deadline:
                told["reward"] = _checked(await self._agent(task, url, key, seed))
        except BaseException as error:  # SystemExit of the agent's too
            late = deadline.expired()
            if isinstance(error, asyncio.CancelledError) and not late:
                raise
            if late:
                said = f"it has taken longer than {seconds:g} s (agent.seconds)"
                told = {"fault": "timeout", "text": said}
            else:
                told = {"fault": "exception", "text": _traceback(error)}
        finally:
            self._tasks.pop(number, None)
        told |= {"number": number, "seconds": time.perf_counter() - start}
        self._ended.put(told)


def _checked(reward: Any) -> float | None:
    """The reward; None where the agent could not be run."""
    return None if reward is None else check_reward("the agent's reward", reward)


def _traceback(error: BaseException) -> str:
    try:
        text = user_traceback(error, _HERE)
    except Exception:  # formatting the error may fail too
        text = type(error).__name__
    return truncate(text, TRACEBACK_LIMIT)
