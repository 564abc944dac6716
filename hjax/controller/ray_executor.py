"""A pool on Ray as an executor: sends messages to its processes, where results stay.

A message goes to every process of the pool. Results go from process to process through Ray's object
store; the controller only holds references.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hjax import sharded_values
from hjax.controller import ray_calls
from hjax.controller.futures import DEADLINE_SECONDS, Future
from hjax.controller.messages import Call, Message, ResultOf, deserialize
from hjax.controller.process import (
    QueuedMessage,
    RemoteResult,
    is_large,
    merge_exports,
    serialize_value,
)
from hjax.controller.ray_pool import STOP_SECONDS, ProcessHandle, ProcessPool, copy_error
from hjax.controller.timeline import Timeline
from hjax.errors import ProcessLost, RunError
from hjax.sharded_values import ArrayRegions

# Most parcels of messages to a pool in flight; further messages are batched into the next parcel.
MAX_IN_FLIGHT = 8


class RayFuture(Future):
    """A result that stays where it was computed until somebody asks for it."""

    def __init__(self, executor: RayExecutor, number: int, inner: Any, label: str):
        super().__init__(inner, label)
        self.executor, self.number = executor, number
        self.start = executor.starts
        weakref.finalize(self, executor.release_result, number)

    def result(self, timeout_seconds: float = DEADLINE_SECONDS) -> Any:
        """Wait for the value and fetch it; see ``Future``."""
        until = time.monotonic() + timeout_seconds
        super().result(timeout_seconds)
        return self.executor.fetch(self, max(until - time.monotonic(), 1.0))


class RayExecutor(ProcessPool):
    """Runs a pool's messages in its processes.

    Args:
      cluster: the pool's RayCluster.
      name, devices, timeline: as of ``ThreadExecutor``.
    """

    def __init__(self, cluster: Any, name: str, devices: Sequence[Any], timeline: Timeline):
        super().__init__(cluster, name, len(devices))
        self._timeline = timeline
        self.run_later = cluster.run_later
        self._numbers = itertools.count()
        self._sequence = itertools.count()
        # Pending calls, by number.
        self._waiting: dict[int, _Waiting] = {}
        self._blocked_call = (-1, 0.0)  # call that needs lost results, and since when
        self._oldest_call = (-1, 0.0)  # oldest pending call, and since when it is that
        self._dropped: list[int] = []
        self._outbox: list[tuple[QueuedMessage, Message, list[Any]]] = []
        self._in_flight = 0
        self._start()

    def restart(self, counts: Sequence[int] = ()) -> None:
        """Replace the processes, see ``ProcessPool``; pending calls fail."""
        with self._lock:
            self._fail_pending(ProcessLost(f"pool {self.name} was started anew"))
            self._sequence = itertools.count()
            self._dropped, self._outbox, self._in_flight = [], [], 0
        super().restart(counts)

    def submit(self, message: Message) -> Future:
        """Send a message to every process of the pool."""
        with self._lock:
            if self._closed:
                raise RunError(f"{message.label} was called after its pool was closed")
            number = next(self._numbers)
            inner: concurrent.futures.Future = concurrent.futures.Future()
            future = RayFuture(self, number, inner, message.label)
            if self._lost is not None:
                inner.set_exception(copy_error(self._lost))
                return future
            used: list[Any] = []  # results needed until this message has run
            arguments = self._sent(message.arguments, message, used)
            options = self._sent(dict(message.options), message, used)
            sent = dataclasses.replace(message, arguments=arguments, options=options)
            written = serialize_value(sent, ray_calls.RayStore())
            dropped, self._dropped = self._dropped, []
            self._cluster.sent_bytes += len(written.data) * len(self._handles)
            sources = frozenset((x.executor, x.start) for x in used if x.executor is not self)
            self._waiting[number] = _Waiting(inner, message.label, sources)
            self._outbox.append((QueuedMessage(number, written, tuple(dropped)), message, used))
            self._send()
        return future

    def _send(self) -> None:
        """Send all queued messages as one parcel, unless too many are in flight.

        This cannot deadlock: a message needs results of earlier messages only, which are sent
        before it.
        """
        if not self._outbox or self._in_flight >= MAX_IN_FLIGHT:
            return
        waiting, self._outbox = self._outbox, []
        parcel, sequence = [queued for queued, _, _ in waiting], next(self._sequence)
        references = [handle.actor.run.remote(sequence, parcel) for handle in self._handles]
        self._in_flight += 1
        _Gather(self, [(queued.number, message, used) for queued, message, used in waiting],
                references, list(self._handles))  # fmt: skip

    def _sent(self, value: Any, message: Message, used: list[Any]) -> Any:
        """A message's values: results become references, large arrays are split by rows."""
        reads = message.reads if isinstance(message, Call) else None

        def leaf(x: Any) -> Any:
            if isinstance(x, RayFuture):
                used.append(x)
                if x.executor is not self:
                    return RemoteResult(tuple(x.executor.export(x, reads)))
                self._check_start(x)
                return ResultOf(x.number)
            if isinstance(x, Future):
                return x.result()
            if isinstance(x, jax.Array):
                x = np.asarray(x)
            if is_large(x) and x.dtype.kind not in "OUSMm":
                return split_rows(x, self.processes)
            return x

        return sharded_values.map_leaves(leaf, value)

    def on_answers(
        self, sent: Sequence[_Sent], answers: Sequence[Any], handles: Sequence[ProcessHandle]
    ) -> None:
        """Handle the answers of all processes to the messages of a parcel, or their failures."""
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, ray_calls.ActorDied):
                self.mark_lost(handle, "died", answer)
                return
        with self._lock:
            if list(handles) == self._handles:
                self._in_flight -= 1
                self._send()
        for i, (number, message, _) in enumerate(sent):
            outcomes = [a if isinstance(a, BaseException) else a[i] for a in answers]
            self._finish_call(number, message, outcomes, handles)

    def _finish_call(
        self,
        number: int,
        message: Message,
        outcomes: Sequence[Any],
        handles: Sequence[ProcessHandle],
    ) -> None:
        with self._lock:
            call = self._waiting.pop(number, None)
        if call is None:
            return
        inner = call.inner
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                inner.set_exception(RunError(f"{message.label}: {outcome}"))
                return
            if outcome.error is not None:
                inner.set_exception(deserialize(outcome.error))
                return
        if isinstance(message, Call) and outcomes[0].phase:
            starts = [o.start + h.offset for o, h in zip(outcomes, handles, strict=True)]
            ends = [o.end + h.offset for o, h in zip(outcomes, handles, strict=True)]
            self._timeline.add(
                self.name, message.role, message.method, outcomes[0].phase, min(starts), max(ends)
            )
        inner.set_result(None)

    def _fail_pending(self, error: ProcessLost) -> None:
        waiting, self._waiting = list(self._waiting.values()), {}
        for call in waiting:
            told = copy_error(error)
            told.add_note(f"in the call {call.label}")
            if not call.inner.done():
                call.inner.set_exception(told)

    def export(self, future: RayFuture, reads: frozenset[str] | None) -> list[Any]:
        """References to a result as each process exports it."""
        self._check_start(future)
        return [handle.actor.export.remote(future.number, reads) for handle in self._handles]

    def _check_start(self, future: RayFuture) -> None:
        if future.start != self.starts:
            raise ProcessLost(f"{future.label}: its result was lost with pool {self.name}")

    def fetch(self, future: RayFuture, seconds: float) -> Any:
        """A result, fetched to the controller."""
        with self._lock:
            if self._lost is not None:
                raise copy_error(self._lost)
            references = self.export(future, None)
        late = f"{future.label} was not fetched within {seconds:g} seconds"
        try:
            value = sharded_values.whole(merge_exports(self._get(references, seconds, late)))
        except ray_calls.ActorDied as error:
            self._cluster.check()
            raise copy_error(self._lost or ProcessLost(f"pool {self.name}: {error}")) from None
        self._cluster.fetched_bytes += size_of(value)
        return value

    def release_result(self, number: int) -> None:
        """Release a result; the processes are told with the next message."""
        self._dropped.append(number)

    def waits_for_lost_results(self, seconds: float) -> bool:
        """Whether the running call needs results that were lost with their pool.

        One of the pool's processes may have what it needs, and wait inside a program for another
        that has not: after so many seconds the pool counts as lost. One process waits for none.
        """
        with self._lock:
            number, call = next(iter(self._waiting.items()), (-1, None))
        if call is None or self.processes == 1 or self._lost is not None:
            return False
        gone = {e.name for e, start in call.sources if e.lost is not None or e.starts != start}
        if not gone:
            return False
        now = time.monotonic()
        if number != self._blocked_call[0]:
            self._blocked_call = number, now
        if now - self._blocked_call[1] <= seconds:
            return True
        names = ", ".join(sorted(gone))
        self.fail(ProcessLost(f"pool {self.name} waits for results lost with pool {names}"))
        return False

    def _check_heartbeats(self, seconds: float) -> Iterator[str]:
        self._check_call_deadlines()
        self.waits_for_lost_results(seconds)
        yield from super()._check_heartbeats(seconds)

    def _check_call_deadlines(self) -> None:
        """Fail the pool if a call exceeds its timeout; the process may hang in a program."""
        now, most = time.monotonic(), self._cluster.call_seconds
        with self._lock:
            number, call = next(iter(self._waiting.items()), (-1, None))
            if number != self._oldest_call[0]:
                self._oldest_call = number, now
        if call is not None and now - self._oldest_call[1] > most and self._handles:
            how = f"has run {call.label} for {most:g} seconds (cluster.call_seconds)"
            self.mark_lost(self._handles[0], how)

    def machine(self) -> list[dict[str, Any]]:
        """The probe's figures of each process."""
        late = f"pool {self.name} has not reported on its machines within 60 seconds"
        return self._get([h.actor.machine.remote() for h in self._handles], 60, late)

    def close(self) -> None:
        """Wait for the running message; see ``Executor``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for call in waiting:
            if not call.inner.done():
                why = f"{call.label} was not waited for: its pool was closed"
                call.inner.set_exception(RunError(why))
        if self._lost is None:
            with contextlib.suppress(Exception):  # who does not stop in time is killed
                self._get([h.actor.stop.remote() for h in self._handles], STOP_SECONDS, "late")
        self._kill()
        self._cluster.remove_pool(self)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A pending call, and the pools (with their starts) whose results it needs."""

    inner: concurrent.futures.Future
    label: str
    sources: frozenset[tuple[RayExecutor, int]]


# (number, message, results needed until it has run)
_Sent = tuple[int, Message, list[Any]]


class _Gather:
    """Collects the answers of a pool's processes to a parcel of messages."""

    def __init__(
        self,
        executor: RayExecutor,
        sent: Sequence[_Sent],
        references: Sequence[Any],
        handles: Sequence[ProcessHandle],
    ):
        self._executor, self._sent, self._handles = executor, sent, handles
        self._outcomes: list[Any] = [None] * len(references)
        self._left = len(references)
        self._lock = threading.Lock()
        later = executor.run_later
        for rank, reference in enumerate(references):
            # Called in one of Ray's threads, which must not block.
            reference.future().add_done_callback(
                lambda done, rank=rank: later(lambda: self._done(rank, done))
            )

    def _done(self, rank: int, done: concurrent.futures.Future) -> None:
        error = done.exception()
        with self._lock:
            self._outcomes[rank] = error if error is not None else done.result()
            self._left -= 1
            if isinstance(error, ray_calls.ActorDied):
                # The others may wait for this one forever.
                self._executor.mark_lost(self._handles[rank], "died", error)
            if self._left:
                return
        self._executor.on_answers(self._sent, self._outcomes, self._handles)
        self._sent = ()


def split_rows(x: np.ndarray, parts: int) -> Any:
    """An array of the controller's, split by rows, so that every process fetches its own."""
    if not x.ndim or x.shape[0] < parts:
        return x
    ends = [x.shape[0] * i // parts for i in range(parts + 1)]
    rest = tuple((0, n) for n in x.shape[1:])
    cut = zip(ends[:-1], ends[1:], strict=True)
    return ArrayRegions(x.shape, x.dtype, tuple((((a, b), *rest), x[a:b]) for a, b in cut))


def size_of(value: Any) -> int:
    """Bytes of the arrays in a value."""
    total = 0

    def leaf(x: Any) -> None:
        nonlocal total
        total += getattr(x, "nbytes", 0)

    sharded_values.map_leaves(leaf, value)
    return total
