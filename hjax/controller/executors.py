"""Executors: where a pool's messages are carried out.

A pool has one. ``ThreadExecutor`` is this process's; ``hjax.controller.pickled`` has one whose
workers share nothing with the controller.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from hjax.controller.futures import Future, resolve
from hjax.controller.host import Answer, WorkerHost
from hjax.controller.messages import Build, Call, Message
from hjax.controller.timeline import Timeline

_NOTE = "in the call"


class Executor(Protocol):
    """Carries out a pool's messages in their order: here, in a Ray actor, wherever."""

    def submit(self, message: Message) -> Future:
        """Queue a message; returns at once. The future of a ``Build`` has no value."""

    def close(self) -> None:
        """Let queued messages finish, then stop."""


# Makes the executor of a pool: its name, its devices, where calls are recorded.
ExecutorFactory = Callable[[str, Sequence[jax.Device], Timeline], Executor]


def named(message: Message, run: Callable[[], Any]) -> Any:
    """Run a message; an error says in a note which call it arose in, not who passed it on."""
    try:
        return run()
    except Exception as error:
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_NOTE} {message.label}")
        raise


class ThreadExecutor:
    """Carries out a pool's messages in one thread of this process.

    Nothing is copied: arrays stay on their devices, other values are handed over as they are.

    Args:
      name: of the pool.
      devices: of the pool.
      timeline: where calls are recorded.
    """

    def __init__(self, name: str, devices: Sequence[jax.Device], timeline: Timeline):
        self.host = WorkerHost(devices)
        self._name, self._timeline = name, timeline
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, message: Message) -> Future:
        """Queue a message on the pool's thread."""
        done: concurrent.futures.Future = concurrent.futures.Future()
        task = self._thread.submit(self._run, message, done)
        task.add_done_callback(lambda task: done.cancel() if task.cancelled() else None)
        return Future(done, message.label)

    def close(self) -> None:
        """Let the message under way finish, then stop."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, message: Message, done: concurrent.futures.Future) -> None:
        try:
            answer = named(message, lambda: self._answer(message))
        except BaseException as error:
            done.set_exception(error)
            return
        if answer.phase and isinstance(message, Call):
            self._timeline.record(self._name, message.role, message.method, answer)
        if answer.background:
            in_background(message, answer.value, done.set_result, done.set_exception)
        else:
            done.set_result(answer.value)

    def _answer(self, message: Message) -> Answer:
        # A future of an earlier call is waited for here: the dataflow's only synchronisation.
        arguments, options = resolve(message.arguments), resolve(dict(message.options))
        if isinstance(message, Build):
            self.host.build(Build(message.role, message.worker, arguments, options))
            return Answer(None)
        call = Call(message.role, message.method, arguments, options, message.reads)
        return self.host.call(call)


def in_background(
    message: Message,
    rest: Callable[[], Any],
    succeed: Callable[[Any], Any],
    fail: Callable[[BaseException], Any],
) -> None:
    """Finish a call in a thread of its own, while its pool goes on."""

    def run() -> None:
        try:
            value = named(message, rest)
        except BaseException as error:
            fail(error)
        else:
            succeed(value)

    threading.Thread(target=run, name=f"{message.label} (rest)").start()
