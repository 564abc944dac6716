"""Operators on flows, after RLlib Flow (Liang et al. 2021, arXiv 2011.12719), as plain functions.

A flow is an iterator of whatever a dataflow hands on: batches, or futures of them, which are not
waited for here. So ``ahead`` and ``concurrently`` overlap calls by making them early, and where
these run is no concern of theirs.
"""

import collections
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from hjax.algorithms.algorithm import Batch
from hjax.controller import Future, join
from hjax.controller.futures import DEADLINE_SECONDS
from hjax.errors import ConfigError, RunError

T = TypeVar("T")
_POLL_SECONDS = 0.002


def concurrently(*calls: Callable[[], T]) -> list[T]:
    """Make calls that return futures, all of them before any is waited for; what they returned.

    Example:
        >>> sampled, greedy = concurrently(lambda: 1, lambda: 2)
    """
    return [call() for call in calls]


def union(*flows: Iterable[T]) -> Iterator[T]:
    """One item of each flow in turn, until all of them have ended."""
    waiting = collections.deque(iter(flow) for flow in flows)
    while waiting:
        flow = waiting.popleft()
        try:
            item = next(flow)
        except StopIteration:
            continue
        waiting.append(flow)
        yield item


def in_step(flow: Iterable[T], *beside: Iterable[Any]) -> Iterator[T]:
    """The items of a flow; with each of them every flow beside it goes on by one.

    Those beside it are for what they do (a buffer that is replayed, say): what they give is left,
    and one that ends is left alone. (RLlib Flow's ``Concurrently`` in round robin.)
    """
    others = [iter(other) for other in beside]
    for item in flow:
        for other in others:
            next(other, None)
        yield item


def ahead(flow: Iterable[T], items: int) -> Iterator[T]:
    """The items of a flow, so many of them asked for before they are needed.

    Args:
      flow: of futures, else nothing overlaps.
      items: 0 or more; 1 is one step off.
    """
    if items < 0:
        raise ConfigError(f"ahead by {items} items: 0 (none) or more")
    source, held = iter(flow), collections.deque[T]()
    for item in source:
        held.append(item)
        if len(held) > items:
            yield held.popleft()
    yield from held


def as_completed(
    futures: Iterable[Future], timeout_seconds: float = DEADLINE_SECONDS
) -> Iterator[Future]:
    """Futures in the order in which they are done; those done at once in their own order.

    Raises:
      RunError: none was done within the time; the calls that are late are named.
    """
    waiting = list(futures)
    while waiting:
        deadline = time.monotonic() + timeout_seconds
        while not (done := [future for future in waiting if future.done()]):
            if time.monotonic() > deadline:
                late = ", ".join(future.label for future in waiting)
                raise RunError(f"{late}: not answered within {timeout_seconds:g} seconds")
            time.sleep(_POLL_SECONDS)
        waiting = [future for future in waiting if not future.done() or future not in done]
        yield from done


class Replay:
    """Batches that are learned from again: the newest so many, drawn with equal chances.

    They are kept as numpy arrays on the controller. A class that keeps one over a resume saves
    what its ``state`` needs itself; batches are no plain JSON.

    Args:
      batches: that are kept; older ones leave.
      seed: of the draws.
    """

    def __init__(self, batches: int, seed: int = 0):
        if batches < 1:
            raise ConfigError(f"a replay buffer of {batches} batches: 1 or more")
        self._held: collections.deque[Batch] = collections.deque(maxlen=batches)
        self._draw = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._held)

    def store(self, batch: Any) -> Batch:
        """Keep a batch (waits for one that is a future), and hand it on."""
        self._held.append(join(batch))
        return self._held[-1]

    def sample(self, count: int = 1) -> list[Batch]:
        """So many of the batches that are kept, or all if there are fewer, none twice."""
        chosen = self._draw.permutation(len(self._held))[:count]
        return [self._held[int(i)] for i in chosen]
