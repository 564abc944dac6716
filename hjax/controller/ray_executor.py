"""A pool on Ray as an executor: messages to its processes, and results that stay with them.

A message goes to every process of the pool, results go from process to process as objects of Ray's
store, and the controller holds references to them.
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
from hjax.controller.messages import BuildWorker, Call, Message, ResultOf, from_bytes
from hjax.controller.process import LARGE, QueuedMessage, RemoteResult, read_all, write
from hjax.controller.ray_pool import STOP_SECONDS, ProcessHandle, ProcessPool, again
from hjax.controller.timeline import Timeline
from hjax.errors import ProcessLost, RunError
from hjax.sharded_values import ArrayRegions

# Parcels of messages to a pool that have not been answered; later messages wait and go together.
UNDER_WAY = 8


class RayFuture(Future):
    """A result that stays where it was made until somebody asks for it."""

    def __init__(self, executor: RayExecutor, number: int, inner: Any, label: str):
        super().__init__(inner, label)
        self.executor, self.number = executor, number
        self.start = executor.starts
        weakref.finalize(self, executor.forget, number)

    def result(self, timeout_seconds: float = DEADLINE_SECONDS) -> Any:
        """Wait for the value and bring it here; see ``Future``."""
        until = time.monotonic() + timeout_seconds
        super().result(timeout_seconds)
        left = max(until - time.monotonic(), 1.0)
        return self.executor.fetch(self, left)


class RayExecutor(ProcessPool):
    """Carries out a pool's messages in its processes.

    Args:
      cluster: the RayCluster that the pool is of.
      name, devices, timeline: as of ``ThreadExecutor``.
    """

    def __init__(self, cluster: Any, name: str, devices: Sequence[Any], timeline: Timeline):
        super().__init__(cluster, name, len(devices))
        self._timeline = timeline
        self.later = cluster.later
        self._numbers = itertools.count()
        self._sequence = itertools.count()
        # Calls that were not answered.
        self._waiting: dict[int, _Waiting] = {}
        self._in_vain = (-1, 0.0)  # call that takes what was lost, and since when that is known
        self._oldest = (-1, 0.0)  # call that was not answered, and since when it is the oldest
        self._dropped: list[int] = []
        self._outbox: list[tuple[QueuedMessage, Message, list[Any]]] = []
        self._under_way = 0
        self._start()

    def restart(self, counts: Sequence[int] = ()) -> None:
        """New processes, see ``ProcessPool``; calls that were not answered fail."""
        with self._lock:
            self._abandon(ProcessLost(f"pool {self.name} was started anew"))
            self._sequence = itertools.count()
            self._dropped, self._outbox, self._under_way = [], [], 0
        super().restart(counts)

    # Messages

    def submit(self, message: Message) -> Future:
        """Send a message to every process of the pool."""
        with self._lock:
            if self._closed:
                raise RunError(f"{message.label} was called after its pool was closed")
            number = next(self._numbers)
            inner: concurrent.futures.Future = concurrent.futures.Future()
            future = RayFuture(self, number, inner, message.label)
            if self._lost is not None:
                inner.set_exception(again(self._lost))
                return future
            used: list[Any] = []  # results that must stay until this message has run
            arguments = self._sent(message.arguments, message, used)
            options = self._sent(dict(message.options), message, used)
            if isinstance(message, BuildWorker):
                sent: Message = BuildWorker(message.role, message.worker, arguments, options)
            else:
                sent = Call(message.role, message.method, arguments, options, message.reads)
            written = write(sent, ray_calls.RayStore())
            dropped, self._dropped = self._dropped, []
            self._cluster.sent_bytes += len(written.data) * len(self._handles)
            sources = frozenset((x.executor, x.start) for x in used if x.executor is not self)
            self._waiting[number] = _Waiting(inner, message.label, sources)
            self._outbox.append((QueuedMessage(number, written, tuple(dropped)), message, used))
            self._send()
        return future

    def _send(self) -> None:
        """Send what waits, all in one, unless much is under way: then it waits for an answer.

        No two messages can wait for each other so: one takes results of earlier ones only, and
        those are sent before it.
        """
        if not self._outbox or self._under_way >= UNDER_WAY:
            return
        waiting, self._outbox = self._outbox, []
        parcel, sequence = [posted for posted, _, _ in waiting], next(self._sequence)
        references = [handle.actor.run.remote(sequence, parcel) for handle in self._handles]
        self._under_way += 1
        _Gather(self, [(posted.number, message, used) for posted, message, used in waiting],
                references, list(self._handles))  # fmt: skip

    def _sent(self, value: Any, message: Message, used: list[Any]) -> Any:
        """A message's values with results by reference, and large arrays cut by rows."""
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
            if isinstance(x, np.ndarray) and x.nbytes >= LARGE and x.dtype.kind not in "OUSMm":
                return by_rows(x, self.processes)
            return x

        return sharded_values.map_leaves(leaf, value)

    def gathered(
        self, sent: Sequence[_Sent], answers: Sequence[Any], handles: Sequence[ProcessHandle]
    ) -> None:
        """All processes have answered to messages that went together, or failed to."""
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, ray_calls.Died):
                self.lose(handle, "died", answer)
                return
        with self._lock:
            if list(handles) == self._handles:
                self._under_way -= 1
                self._send()
        for i, (number, message, _) in enumerate(sent):
            outcomes = [a if isinstance(a, BaseException) else a[i] for a in answers]
            self._ended(number, message, outcomes, handles)

    def _ended(
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
                inner.set_exception(from_bytes(outcome.error))
                return
        if isinstance(message, Call) and outcomes[0].phase:
            starts = [o.start + h.offset for o, h in zip(outcomes, handles, strict=True)]
            ends = [o.end + h.offset for o, h in zip(outcomes, handles, strict=True)]
            phase = outcomes[0].phase
            self._timeline.add(
                self.name, message.role, message.method, phase, min(starts), max(ends)
            )
        inner.set_result(None)

    def _abandon(self, error: ProcessLost) -> None:
        waiting, self._waiting = list(self._waiting.values()), {}
        for call in waiting:
            told = again(error)
            told.add_note(f"in the call {call.label}")
            if not call.inner.done():
                call.inner.set_exception(told)

    # Results

    def export(self, future: RayFuture, reads: frozenset[str] | None) -> list[Any]:
        """References to what each process writes down of a result."""
        self._check_start(future)
        return [handle.actor.export.remote(future.number, reads) for handle in self._handles]

    def _check_start(self, future: RayFuture) -> None:
        if future.start != self.starts:
            raise ProcessLost(f"{future.label}: its result went with pool {self.name}'s processes")

    def fetch(self, future: RayFuture, seconds: float) -> Any:
        """A result, brought to the controller."""
        with self._lock:
            if self._lost is not None:
                raise again(self._lost)
            references = self.export(future, None)
        late = f"{future.label} has not been brought here within {seconds:g} seconds"
        try:
            value = sharded_values.whole(read_all(self._get(references, seconds, late)))
        except ray_calls.Died as error:
            self._cluster.check()
            raise again(self._lost or ProcessLost(f"pool {self.name}: {error}")) from None
        self._cluster.fetched_bytes += size_of(value)
        return value

    def forget(self, number: int) -> None:
        """Nobody will ask for a result; its processes are told with the next message."""
        self._dropped.append(number)

    # The cluster's questions

    def waits_in_vain(self, seconds: float) -> bool:
        """Whether the call at work takes results that were lost with their pool.

        One of the pool's processes may have what it needs, and wait in a program for another that
        has not: after so many seconds the pool counts as lost. A process alone waits for no other.
        """
        with self._lock:
            number, call = next(iter(self._waiting.items()), (-1, None))
        if call is None or self.processes == 1 or self._lost is not None:
            return False
        gone = {e.name for e, start in call.sources if e.lost is not None or e.starts != start}
        if not gone:
            return False
        now = time.monotonic()
        if number != self._in_vain[0]:
            self._in_vain = number, now
        if now - self._in_vain[1] <= seconds:
            return True
        names = ", ".join(sorted(gone))
        self.fail(ProcessLost(f"pool {self.name} waits for what was lost with pool {names}"))
        return False

    def _beat(self, seconds: float) -> Iterator[str]:
        self._look_at_calls()
        self.waits_in_vain(seconds)
        yield from super()._beat(seconds)

    def _look_at_calls(self) -> None:
        """Processes that answer may hang in a program; a call may take so long and no more."""
        now, most = time.monotonic(), self._cluster.call_seconds
        with self._lock:
            number, call = next(iter(self._waiting.items()), (-1, None))
            if number != self._oldest[0]:
                self._oldest = number, now
        if call is not None and now - self._oldest[1] > most and self._handles:
            how = f"has been at {call.label} for {most:g} seconds (cluster.call_seconds)"
            self.lose(self._handles[0], how)

    def machine(self) -> list[dict[str, Any]]:
        """What each process's probe reads."""
        late = f"pool {self.name} has not said within 60 seconds how its machines are"
        return self._get([h.actor.machine.remote() for h in self._handles], 60, late)

    def close(self) -> None:
        """Let the message under way finish; see ``Executor``."""
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
        self._cluster.closed(self)


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """A call that was not answered, and whose results it takes: pools, at which of their starts."""

    inner: concurrent.futures.Future
    label: str
    sources: frozenset[tuple[RayExecutor, int]]


# Number, message, and the results that must stay until it has run.
_Sent = tuple[int, Message, list[Any]]


class _Gather:
    """Waits for the answers of a pool's processes to messages that went together."""

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
        later = executor.later
        for rank, reference in enumerate(references):
            # Called in a thread of Ray's own, which must not wait for anything.
            reference.future().add_done_callback(
                lambda done, rank=rank: later(lambda: self._done(rank, done))
            )

    def _done(self, rank: int, done: concurrent.futures.Future) -> None:
        error = done.exception()
        with self._lock:
            self._outcomes[rank] = error if error is not None else done.result()
            self._left -= 1
            if isinstance(error, ray_calls.Died):
                # The others may wait for this one for ever.
                self._executor.lose(self._handles[rank], "died", error)
            if self._left:
                return
        self._executor.gathered(self._sent, self._outcomes, self._handles)
        self._sent = ()


def by_rows(x: np.ndarray, parts: int) -> Any:
    """An array of the controller's, cut by rows, so that every process takes its own."""
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
