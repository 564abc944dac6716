"""Agents in processes of their own, hundreds of sessions in each, one deadline for each session."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Mapping
from typing import Any

from hjax.agents.agent_settings import AgentSettings
from hjax.errors import ConfigError, one_line
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed
from hjax.user_code import imported

# The run occupies the accelerators, so JAX in an agent's process uses the CPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu"}
# How long a process waits for a session to end, before it hears of others; how long after that it
# may take to answer; and how long after its deadline a session may.
_POLL_SECONDS, _ANSWER_SECONDS, _LATE_SECONDS = 0.1, 30.0, 5.0


@dataclasses.dataclass(frozen=True)
class AgentOutcome:
    """How a session ended.

    Attributes:
      reward: None: the agent could not be run, or a fault.
      fault: ``timeout``, ``exception``, ``killed``; empty: none.
      text: of a fault, what happened.
      seconds: that it took.
    """

    reward: float | None = None
    fault: str = ""
    text: str = ""
    seconds: float = 0.0


OutcomeFuture = concurrent.futures.Future[AgentOutcome]


class AgentPool:
    """Runs agents in several processes. It ends with ``close``, and with this process.

    Args:
      settings: what runs.
    """

    def __init__(self, settings: AgentSettings):
        setup = pickle.dumps(
            {
                "function": settings.function,
                "program": None if settings.function else settings.program(),
                "files": imported(),
                "memory_bytes": settings.memory_bytes,
            }
        )
        self._seconds = settings.deadline
        self._hosts = [_AgentHost(setup, self._seconds) for _ in range(settings.processes)]

    def begin(
        self, number: int, task: Mapping[str, Any], url: str, key: str, seed: int
    ) -> OutcomeFuture:
        """Begin a session; ``number`` is one that no open session has.

        The future fails with ConfigError if the agent cannot be loaded.
        """
        host = min(self._hosts, key=lambda each: each.open_sessions)
        return host.begin(
            {
                "number": number,
                "task": dict(task),
                "url": url,
                "key": key,
                "seed": seed,
                "seconds": self._seconds,
            }
        )

    def end(self, number: int) -> None:
        """Stop a session, without waiting; does nothing if it is not open."""
        for host in self._hosts:
            host.end(number)

    def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            host.close()


class _AgentHost:
    """One process, and the thread that talks to it."""

    def __init__(self, setup: bytes, seconds: float):
        self._process = IsolatedProcess("hjax.agents.agent_process:serve", setup, _ENVIRONMENT)
        self._process.start()
        self._seconds = seconds
        self._changed = threading.Condition()
        self._begun: list[dict[str, Any]] = []  # that the process does not know of
        self._stopped: list[int] = []
        self._open: dict[int, tuple[OutcomeFuture, float]] = {}  # with the time of its deadline
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hjax-agents", daemon=True)
        self._thread.start()

    @property
    def open_sessions(self) -> int:
        """How many have not ended."""
        return len(self._open)

    def begin(self, session: dict[str, Any]) -> OutcomeFuture:
        """Begin a session."""
        future = OutcomeFuture()
        with self._changed:
            self._begun.append(session)
            late = time.monotonic() + self._seconds + _LATE_SECONDS
            self._open[session["number"]] = future, late
            self._changed.notify()
        return future

    def end(self, number: int) -> None:
        """Stop a session."""
        with self._changed:
            if number in self._open:
                self._stopped.append(number)
                self._changed.notify()
        self._finish(number, AgentOutcome(fault="killed", text="the session was stopped"))

    def close(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._process.interrupt()
        self._process.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._open or self._stopped or self._closed):
                    self._changed.wait()
                if self._closed:
                    break
                request = pickle.dumps((self._begun, self._stopped, _POLL_SECONDS))
                self._begun, self._stopped = [], []
            self._exchange(request)
        self._lose_all("killed", "the agents' processes were ended")

    def _exchange(self, request: bytes) -> None:
        try:
            for told in json.loads(self._process.call(request, _ANSWER_SECONDS)):
                number = told.pop("number")
                self._finish(number, AgentOutcome(**told))
        except DeadlineExceeded:
            self._lose_all("killed", "the agents' process did not answer, and was ended")
        except ProcessDied as error:
            self._lose_all("killed", str(error))
        except TaskFailed as error:
            if error.at_start:
                self._lose_all("", "", ConfigError(one_line(error)))
            else:
                self._lose_all("killed", str(error))
        except (ValueError, TypeError, AttributeError):
            self._process.close()
            self._lose_all("killed", "the agents' process answered something unreadable")
        now = time.monotonic()
        if any(now > late for _, late in list(self._open.values())):
            # One that blocks the others' event loop cannot be cancelled.
            self._process.close()
            for number, (_, late) in list(self._open.items()):
                kind = "timeout" if now > late else "killed"
                said = "a session has blocked its process past its deadline, which was ended"
                self._finish(number, AgentOutcome(fault=kind, text=said))

    def _finish(self, number: int, outcome: AgentOutcome) -> None:
        with self._changed:
            future, _ = self._open.pop(number, (None, 0.0))
        if future is not None:
            future.set_result(outcome)

    def _lose_all(self, fault: str, text: str, error: Exception | None = None) -> None:
        for number, (future, _) in list(self._open.items()):
            if error is None:
                self._finish(number, AgentOutcome(fault=fault, text=text))
            else:
                with self._changed:
                    self._open.pop(number, None)
                future.set_exception(error)
