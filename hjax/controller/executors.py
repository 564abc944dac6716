"""Executors: they run a pool's messages, one executor per pool.

``ThreadExecutor`` runs them in a thread of this process; ``tests/pickling.py`` has an executor
whose workers share nothing with the controller. With ``DebuggingExecutor`` one role's calls stop in
a debugger.
"""

import collections
import concurrent.futures
import dataclasses
import pdb
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol

import jax

from hjax.controller.futures import Future, resolve
from hjax.controller.messages import Call, Message
from hjax.controller.timeline import Timeline
from hjax.controller.worker_host import CallResult, WorkerHost
from hjax.errors import RunError
from hjax.roles import binding

_NOTE = "in the call"


class Executor(Protocol):
    """Runs a pool's messages in order: in this process, in a Ray actor, anywhere."""

    def submit(self, message: Message) -> Future:
        """Queue a message; returns at once. The future of a ``BuildWorker`` has no value."""

    def close(self) -> None:
        """Wait for the running message and for background work, then stop.

        Messages in the queue are not run: their futures raise a RunError.
        """


# Makes a pool's executor from its name, its devices and the timeline.
ExecutorFactory = Callable[[str, Sequence[jax.Device], Timeline], Executor]


def run_message(message: Message, run: Callable[[], Any]) -> Any:
    """Run a message; an error gets a note that names the call in which it arose."""
    try:
        return run()
    except Exception as error:
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_NOTE} {message.label}")
        raise


class ThreadExecutor:
    """Runs a pool's messages in one thread of this process.

    Nothing is copied: arrays stay on their devices, other values are passed by reference.

    Args:
      name: of the pool.
      devices: of the pool.
      timeline: where calls are recorded.
    """

    def __init__(self, name: str, devices: Sequence[jax.Device], timeline: Timeline):
        self.host = WorkerHost(devices)
        self._name, self._timeline = name, timeline
        self._messages = MessageQueue(self._run, name)

    def submit(self, message: Message) -> Future:
        """Queue a message on the pool's thread."""
        done: concurrent.futures.Future = concurrent.futures.Future()
        self._messages.put(message, (message, done), done.set_exception)
        return Future(done, message.label)

    def close(self) -> None:
        """Wait for the running message; see ``Executor``."""
        self._messages.close()

    def _run(self, item: tuple[Message, concurrent.futures.Future]) -> None:
        message, done = item
        try:
            answer = run_message(message, lambda: self._answer(message))
            if answer.phase and isinstance(message, Call):
                self._timeline.add(
                    self._name,
                    message.role,
                    message.method,
                    phase=answer.phase,
                    start=answer.start,
                    end=answer.end,
                )
            if answer.background:
                self._messages.finish_in_background(message, answer.value, done.set_result,
                                             done.set_exception)  # fmt: skip
            else:
                done.set_result(answer.value)
        except BaseException as error:
            done.set_exception(error)

    def _answer(self, message: Message) -> CallResult:
        # Futures of earlier calls are waited for here: the dataflow's only synchronisation.
        arguments, options = resolve(message.arguments), resolve(dict(message.options))
        return self.host.run(dataclasses.replace(message, arguments=arguments, options=options))


class MessageQueue:
    """A queue whose items run in one thread, in order, until it is closed.

    Args:
      run: called with each item.
      name: of the thread.
    """

    def __init__(self, run: Callable[[Any], None], name: str):
        self._run = run
        self._items: collections.deque[tuple[Message, Any, Callable[[RunError], Any]]]
        self._items = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        # One thread, in order: background work of several processes waits for each other.
        self._background = concurrent.futures.ThreadPoolExecutor(1, f"{name} (rest)")
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def put(self, message: Message, item: Any, refuse: Callable[[RunError], Any]) -> None:
        """Queue an item; ``refuse`` is called if the queue is closed before it runs.

        Raises:
          RunError: the pool was closed.
        """
        with self._changed:
            if self._closed:
                raise RunError(f"{message.label} was called after its pool was closed")
            self._items.append((message, item, refuse))
            self._changed.notify()

    def close(self) -> None:
        """Wait for the running item and for background work; refuse the others."""
        with self._changed:
            self._closed = True
            waiting, self._items = list(self._items), collections.deque()
            self._changed.notify()
        for message, _, refuse in waiting:
            refuse(RunError(f"{message.label} was not run: its pool was closed"))
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._background.shutdown()

    def finish_in_background(
        self,
        message: Message,
        rest: Callable[[], Any],
        succeed: Callable[[Any], Any],
        fail: Callable[[BaseException], Any],
    ) -> None:
        """Finish a call in the background thread, while the next items run."""

        def run() -> None:
            try:
                succeed(run_message(message, rest))
            except BaseException as error:
                fail(error)

        self._background.submit(run)

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._closed)
                if not self._items:
                    return
                _, item, _ = self._items.popleft()
            self._run(item)
            del item  # what it holds may be large


class DebuggingExecutor(ThreadExecutor):
    """A ``ThreadExecutor`` that opens a debugger at the first line of each of a role's calls in a
    step.

    It also opens where an error is raised.

    Args:
      role: whose calls.
      name, devices, timeline: as of ``ThreadExecutor``.
    """

    def __init__(self, role: str, name: str, devices: Sequence[jax.Device], timeline: Timeline):
        self._role = role
        super().__init__(name, devices, timeline)

    def _answer(self, message: Message) -> CallResult:
        if not isinstance(message, Call) or message.role != self._role:
            return super()._answer(message)
        worker = self.host.workers.get(message.role)
        bound = binding(type(worker), message.method)
        if bound is None or not bound.phase:
            return super()._answer(message)
        debugger = pdb.Pdb(nosigint=True, readrc=False)
        code = getattr(worker, message.method).__code__
        debugger.set_break(code.co_filename, first_line(code))
        debugger.rcLines.append("continue")  # up to there
        answer: Callable[[Message], CallResult] = super()._answer
        try:
            answered = debugger.runcall(answer, message)
            if answered is None:
                raise RunError(f"the debugger was left in {message.label}")
            return answered
        except RunError:
            raise
        except Exception as error:
            print(f"{message.label}: {type(error).__name__}: {error}")
            pdb.post_mortem(error.__traceback__)
            raise


def first_line(code: CodeType) -> int:
    """The first line of a function's body."""
    lines = sorted({line for _, _, line in code.co_lines() if line is not None})
    return next((line for line in lines if line > code.co_firstlineno), lines[0])


def debugging_executors(
    role: str, others: ExecutorFactory, roles_of: Callable[[str], Any]
) -> ExecutorFactory:
    """An executor factory like ``others``, except for the pool of one role, which runs in this
    process.

    Args:
      role: that is debugged.
      others: makes the other pools' executors.
      roles_of: the roles of a pool, by its name.
    """

    def make(name: str, devices: Sequence[Any], timeline: Timeline) -> Any:
        if role not in roles_of(name):
            return others(name, devices, timeline)
        own = jax.devices()
        here = devices if all(isinstance(d, jax.Device) for d in devices) else own[: len(devices)]
        return DebuggingExecutor(role, name, here, timeline)

    return make
