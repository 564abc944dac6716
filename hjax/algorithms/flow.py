"""Dataflow operators after RLlib Flow (Liang et al. 2021, arXiv 2011.12719), as plain functions.

A flow is an iterator of batches or of futures of batches. The operators do not wait for futures, so
``ahead`` and ``concurrently`` overlap calls by issuing them early, wherever they run.
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
    """Make all calls before any of their futures is waited for; returns their results.

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


def in_step(flow: Iterable[T], *others: Iterable[Any]) -> Iterator[T]:
    """The items of a flow; each item also advances every other flow by one item.

    The other flows run for their side effects (replaying a buffer, say): their items are dropped,
    and one may end early. (RLlib Flow's ``Concurrently`` in round robin.)
    """
    iterators = [iter(other) for other in others]
    for item in flow:
        for iterator in iterators:
            next(iterator, None)
        yield item


def ahead(flow: Iterable[T], items: int) -> Iterator[T]:
    """Prefetch: the items of a flow, requested `items` ahead of their use.

    Args:
      flow: of futures, otherwise nothing overlaps.
      items: 0 or more; 1 is one-step off-policy.
    """
    if items < 0:
        raise ConfigError(f"ahead by {items} items: 0 (none) or more")
    prefetched = collections.deque[T]()
    for item in flow:
        prefetched.append(item)
        if len(prefetched) > items:
            yield prefetched.popleft()
    yield from prefetched


def as_completed(
    futures: Iterable[Future], timeout_seconds: float = DEADLINE_SECONDS
) -> Iterator[Future]:
    """Futures in the order in which they complete; those completed together in their input order.

    Raises:
      RunError: none completed within the timeout; the message names the pending calls.
    """
    waiting = list(futures)
    while waiting:
        deadline = time.monotonic() + timeout_seconds
        while not (done := [future for future in waiting if future.done()]):
            if time.monotonic() > deadline:
                pending = ", ".join(future.label for future in waiting)
                raise RunError(f"{pending}: not answered within {timeout_seconds:g} seconds")
            time.sleep(_POLL_SECONDS)
        waiting = [future for future in waiting if not future.done() or future not in done]
        yield from done


class Replay:
    """Replay buffer: keeps the newest batches and samples from them uniformly.

    Batches are kept as numpy arrays on the controller. They are not part of a checkpoint: an
    algorithm that wants to restore them must save them itself, because ``state`` is plain JSON.

    Args:
      batches: capacity; the oldest batch is evicted.
      seed: of the sampling.
    """

    def __init__(self, batches: int, seed: int = 0):
        if batches < 1:
            raise ConfigError(f"a replay buffer of {batches} batches: 1 or more")
        self._batches: collections.deque[Batch] = collections.deque(maxlen=batches)
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._batches)

    def store(self, batch: Any) -> Batch:
        """Add a batch (a future is waited for) and return it."""
        self._batches.append(join(batch))
        return self._batches[-1]

    def sample(self, count: int = 1) -> list[Batch]:
        """Sample `count` batches without replacement, or all if there are fewer."""
        return [self._batches[int(i)] for i in self._rng.permutation(len(self._batches))[:count]]
