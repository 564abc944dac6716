"""Timeline of a run: which role ran on which pool when, in Chrome's trace format."""

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """One call: ``start`` and ``end`` in seconds of ``time.perf_counter``."""

    pool: str
    role: str
    method: str
    phase: str
    step: int
    start: float
    end: float


class Timeline:
    """Collects the spans of the last calls; safe to use from every pool's thread."""

    def __init__(self, keep: int = 4000):
        self._spans: collections.deque[Span] = collections.deque(maxlen=keep)
        self._lock = threading.Lock()
        self._origin = time.perf_counter()
        self.step = 0

    def add(self, pool: str, role: str, method: str, phase: str, start: float, end: float) -> None:
        """Record a call that ran from ``start`` to ``end`` (``time.perf_counter`` seconds)."""
        with self._lock:
            self._spans.append(Span(pool, role, method, phase, self.step, start, end))

    def spans(self, step: int | None = None) -> list[Span]:
        """The recorded spans, of one step if given."""
        with self._lock:
            return [s for s in self._spans if step is None or s.step == step]

    def phase_seconds(self, step: int) -> dict[str, float]:
        """Seconds of a step during which at least one call of each phase ran."""
        spans = self.spans(step)
        phases = {s.phase for s in spans}
        return {p: union_seconds((s.start, s.end) for s in spans if s.phase == p) for p in phases}

    def chrome_trace(self) -> dict[str, Any]:
        """The spans as a Chrome trace: a process per pool, a thread per role, microseconds."""
        spans = self.spans()
        pools = {name: i for i, name in enumerate(sorted({s.pool for s in spans}))}
        roles = {name: i for i, name in enumerate(sorted({s.role for s in spans}))}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": i, "args": {"name": f"pool {name}"}}
            for name, i in pools.items()
        ]
        for pool, role in sorted({(s.pool, s.role) for s in spans}):
            events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": pools[pool],
                    "tid": roles[role],
                    "args": {"name": role},
                }
            )
        events += [
            {
                "name": s.method,
                "cat": s.phase,
                "ph": "X",
                "ts": round((s.start - self._origin) * 1e6, 1),
                "dur": round((s.end - s.start) * 1e6, 1),
                "pid": pools[s.pool],
                "tid": roles[s.role],
                "args": {"role": s.role, "pool": s.pool, "step": s.step},
            }
            for s in spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Total length of a union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
