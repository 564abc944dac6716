"""An executor whose workers share nothing with the controller: all goes through pickle.

What a process of its own would see, in this process: a worker is made from a description that was
written down and read again, and so is every call and result. Results stay in a store; a later call
takes from it what it reads, and the controller what it asks for. Tests run the shipped configs on
it; a distributed executor does the same with a store between processes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hjax.controller.executors import MessageQueue, run_message
from hjax.controller.futures import Future
from hjax.controller.messages import (
    BuildWorker,
    Call,
    Message,
    ResultOf,
    deserialize,
    picklable_error,
    serialize,
)
from hjax.controller.timeline import Timeline
from hjax.controller.worker_host import CallResult, WorkerHost


class ObjectStore:
    """Results by number, written down; of a dict each entry by itself.

    Attributes:
      sent_bytes: what calls and the controller have taken from it.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._results: dict[int, concurrent.futures.Future] = {}
        self.sent_bytes = 0

    def new(self) -> tuple[int, concurrent.futures.Future]:
        """A number, and the result that will stand there."""
        number = next(self._numbers)
        self._results[number] = concurrent.futures.Future()
        return number, self._results[number]

    def put(self, number: int, value: Any) -> None:
        """Write a result down, if somebody still waits for it."""
        if isinstance(value, Mapping):
            written: Any = {key: serialize(x) for key, x in value.items()}
        else:
            written = serialize(value)
        if (result := self._results.get(number)) is not None:
            result.set_result(written)

    def drop(self, number: int) -> None:
        """Forget a result that nobody will ask for."""
        self._results.pop(number, None)

    def fail(self, number: int, error: BaseException) -> None:
        """Write down what went wrong instead."""
        if (result := self._results.get(number)) is not None:
            result.set_exception(picklable_error(error))

    def get(self, number: int, reads: frozenset[str] | None = None) -> Any:
        """Read a result, of a dict the entries that are asked for; waits for it."""
        held = self._results[number].result()  # waits
        if isinstance(held, bytes):
            self.sent_bytes += len(held)
            return deserialize(held)
        chosen = {key: data for key, data in held.items() if reads is None or key in reads}
        self.sent_bytes += sum(map(len, chosen.values()))
        return {key: deserialize(data) for key, data in chosen.items()}


class StoredFuture(Future):
    """A result in a store."""

    def __init__(self, store: ObjectStore, number: int, inner: Any, label: str):
        super().__init__(inner, label)
        self.store, self.number = store, number
        weakref.finalize(self, store.drop, number)

    def result(self, timeout_seconds: float | None = None) -> Any:
        """Wait for the value and read it; see ``Future``."""
        super().result() if timeout_seconds is None else super().result(timeout_seconds)
        return self.store.get(self.number)


class PicklingExecutor:
    """Carries out a pool's messages in a thread that knows only what it reads.

    Args:
      store: of the results, one for all pools: ``functools.partial(PicklingExecutor, store)`` is
        the factory that a Trainer takes.
      name, devices, timeline: as of ``ThreadExecutor``; of the devices it is told their ids.
    """

    def __init__(
        self, store: ObjectStore, name: str, devices: Sequence[jax.Device], timeline: Timeline
    ):
        self._store, self._name, self._timeline = store, name, timeline
        ids = [device.id for device in devices]
        by_id = {device.id: device for device in jax.devices()} if ids else {}
        self._host = WorkerHost([by_id[i] for i in ids])
        self._messages = MessageQueue(self._run, name)

    def submit(self, message: Message) -> Future:
        """Write a message down and queue it."""
        number, inner = self._store.new()
        arguments = self._referring(message.arguments), self._referring(dict(message.options))
        if isinstance(message, BuildWorker):
            written: Message = BuildWorker(message.role, message.worker, *arguments)
        else:
            written = Call(message.role, message.method, *arguments, message.reads)
        # The message's own futures go along, so that their results stay until it is read.
        item = number, serialize(written), message
        self._messages.put(message, item, lambda error: self._store.fail(number, error))
        return StoredFuture(self._store, number, inner, message.label)

    def close(self) -> None:
        """Let the message under way finish; see ``Executor``."""
        self._messages.close()

    def _referring(self, value: Any) -> Any:
        """Futures replaced by references to what they will hold."""
        if isinstance(value, StoredFuture):
            return ResultOf(value.number)
        if isinstance(value, Mapping):
            return {key: self._referring(item) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._referring, value))
        if isinstance(value, list | tuple):
            return type(value)(self._referring(item) for item in value)
        return value

    def _fetched(self, value: Any, reads: frozenset[str] | None) -> Any:
        if isinstance(value, ResultOf):
            return self._store.get(value.number, reads)
        if isinstance(value, Mapping):
            return {key: self._fetched(item, None) for key, item in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._fetched(item, None) for item in value))
        if isinstance(value, list | tuple):
            return type(value)(self._fetched(item, None) for item in value)
        return value

    def _run(self, item: tuple[int, bytes, Message]) -> None:
        number, data, sent = item
        store = self._store
        try:
            message: Message = deserialize(data)
            answer = run_message(message, lambda: self._answer(self._host, message))
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
                self._messages.finish_in_background(
                    sent,
                    answer.value,
                    lambda value: store.put(number, value),
                    lambda error: store.fail(number, error),
                )
            else:
                store.put(number, answer.value)
        except BaseException as error:
            store.fail(number, error)

    def _answer(self, host: WorkerHost, message: Message) -> CallResult:
        reads = message.reads if isinstance(message, Call) else None
        arguments = tuple(self._fetched(value, reads) for value in message.arguments)
        options = {key: self._fetched(value, reads) for key, value in message.options.items()}
        if isinstance(message, BuildWorker):
            host.build(BuildWorker(message.role, message.worker, arguments, options))
            return CallResult(None)
        return host.call(Call(message.role, message.method, arguments, options, reads))
