"""Signals to the processes of a cluster at a moment that is named by a call of the run.

A strike waits until the controller has sent a message for the nth time, then signals a process of a
pool: what it strikes is the same in each run, without anything of the kind in hjax itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence

from hjax.controller.messages import Call, Message
from hjax.controller.ray_executor import RayExecutor


@dataclasses.dataclass
class Strike:
    """One of them.

    Attributes:
      call: ``role.method``, or ``start``, ``join`` of a pool's processes.
      nth: of these, from 1.
      pool: whose name begins so.
      rank: of the process in the pool.
      sent: the signal.
      after: seconds.
      pending: whether the struck process's pool had yet to answer this call, and had answered all
        before it, when the signal was sent.
      waited: seconds since the call was sent.
    """

    call: str
    nth: int
    pool: str
    rank: int = 0
    sent: int = signal.SIGKILL
    after: float = 0.0
    pending: bool = False
    waited: float = 0.0

    def hit(self, executors: Sequence[RayExecutor]) -> None:
        """Strike, now or in a while."""
        [executor] = [e for e in executors if e.name.startswith(self.pool)]
        pid, since = executor.pids()[self.rank], time.monotonic()
        if self.after:
            threading.Timer(self.after, self._send, (pid, executor, since)).start()
        else:
            self._send(pid, executor, since)

    def _send(self, pid: int, executor: RayExecutor, since: float) -> None:
        labels = [call.label for call in list(executor._waiting.values())]
        self.pending, self.waited = labels[:1] == [self.call], time.monotonic() - since
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, self.sent)


@contextlib.contextmanager
def striking(*strikes: Strike) -> Iterator[list[Strike]]:
    """Strike as is said while in the block; gives those that are still to come."""
    left = list(strikes)
    seen: dict[str, int] = {}

    def came(call: str, executors: Sequence[RayExecutor]) -> None:
        seen[call] = seen.get(call, 0) + 1
        for strike in [s for s in left if (s.call, s.nth) == (call, seen[call])]:
            left.remove(strike)
            strike.hit(executors)

    submit, all_of = RayExecutor.submit, RayExecutor._wait_all

    def submitting(self: RayExecutor, message: Message):
        future = submit(self, message)
        if isinstance(message, Call):
            came(message.label, self._cluster._executors)
        return future

    def waiting(self: RayExecutor, references, doing, **options):
        if any(s.pool and self.name.startswith(s.pool) for s in left if s.call == doing):
            came(doing, [self])
        return all_of(self, references, doing, **options)

    RayExecutor.submit, RayExecutor._wait_all = submitting, waiting  # type: ignore[method-assign]
    try:
        yield left
    finally:
        RayExecutor.submit, RayExecutor._wait_all = submit, all_of  # type: ignore[method-assign]
