"""Dataflow operators after RLlib Flow (Liang et al. 2021, arXiv 2011.12719), as plain functions.

A flow is an iterator of batches or of futures of batches. The operators do not wait for futures, so
``ahead`` and ``concurrently`` overlap calls by issuing them early, wherever they run. What a flow
keeps is its ``state()``; rows that are replayed are kept by a role of their own,
``hjax.workers.ReplayBuffer``, and stand in the checkpoint.
"""

import collections
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from hjax.controller import Future
from hjax.controller.futures import DEADLINE_SECONDS
from hjax.errors import ConfigError, RunError

T = TypeVar("T")
_POLL_SECONDS = 0.002


class Flow(Iterator[T]):
    """An iterator with a state: what ``calls``, ``concurrently``, ``union``, ``store`` and
    ``replay`` return. An algorithm puts ``state()`` into its own, and a resumed run goes on with
    the same items, bit for bit.

    Args:
      advance: returns the next item; it changes ``position``.
      flows: those it is made of.
    """

    def __init__(
        self, advance: Callable[["Flow[T]"], T], flows: Sequence[Any] = (), position: Any = 0
    ):
        self._advance, self._flows, self.position = advance, flows, position

    def __next__(self) -> T:
        return self._advance(self)

    def state(self) -> dict[str, Any]:
        """Position of this flow and of those it is made of, as plain JSON."""
        inner = [flow.state() if isinstance(flow, Flow) else None for flow in self._flows]
        return {"position": self.position, "flows": inner}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state()``."""
        if len(state["flows"]) != len(self._flows):
            raise ConfigError(
                f"a flow of {len(self._flows)} flows is restored from one of "
                f"{len(state['flows'])}; build it as it was"
            )
        self.position = state["position"]
        for flow, inner in zip(self._flows, state["flows"], strict=True):
            if inner is not None:
                flow.restore(inner)


def calls(function: Callable[[int], T]) -> Flow[T]:
    """``function(number)`` for the numbers 0, 1, 2, ...; its state is the next number."""

    def advance(flow: Flow[T]) -> T:
        flow.position += 1
        return function(flow.position - 1)

    return Flow(advance)


def concurrently(*flows: Iterable[Any], weights: Sequence[int] = ()) -> Flow[list[Any]]:
    """Rounds: a list of so many items of each flow, in order, until one of them ends.

    All items of a round are asked for before any is waited for, so that calls on different pools
    overlap; calls on one pool run in order. (RLlib Flow's ``Concurrently`` in round robin.)

    Args:
      flows: of futures, or of anything else.
      weights: items of each flow in a round; by default 1.

    Example:
        >>> next(concurrently(calls(lambda n: n), calls(lambda n: -n), weights=[1, 2]))
        [0, 0, -1]
    """
    counts = _checked_weights(flows, weights)
    iterators = [iter(flow) for flow in flows]

    def advance(flow: Flow[list[Any]]) -> list[Any]:
        made = []
        for iterator, count in zip(iterators, counts, strict=True):
            made += [next(iterator) for _ in range(count)]
        flow.position += 1
        return made

    return Flow(advance, flows)


def union(*flows: Iterable[T], weights: Sequence[int] = ()) -> Flow[T]:
    """The items of several flows in turn, until all of them have ended.

    Args:
      flows: of any items.
      weights: items that each flow gives before it is the next one's turn; by default 1.
    """
    counts = _checked_weights(flows, weights)
    iterators = [iter(flow) for flow in flows]
    start = {"turn": 0, "taken": 0, "ended": []}

    def advance(flow: Flow[T]) -> T:
        at = flow.position
        while len(at["ended"]) < len(iterators):
            turn = at["turn"]
            if turn in at["ended"] or at["taken"] == counts[turn]:
                at["turn"], at["taken"] = (turn + 1) % len(iterators), 0
                continue
            try:
                item = next(iterators[turn])
            except StopIteration:
                at["ended"].append(turn)
                continue
            at["taken"] += 1
            return item
        raise StopIteration

    return Flow(advance, flows, start)


def _checked_weights(flows: Sequence[Any], weights: Sequence[int]) -> Sequence[int]:
    if not flows:
        raise ConfigError("no flows were given; name one or more")
    counts = weights or [1] * len(flows)
    if len(counts) != len(flows) or min(counts) < 1:
        raise ConfigError(f"weights={list(counts)} of {len(flows)} flows: a number each, 1 or more")
    return counts


def store(flow: Iterable[T], buffer: Any, kind: str = "") -> Flow[T]:
    """The items of a flow, each also put into a replay buffer.

    Args:
      flow: of batches, or of their futures; nothing is waited for here.
      buffer: the worker group of a ``hjax.workers.ReplayBuffer``.
      kind: of its rows, see there.
    """
    iterator = iter(flow)

    def advance(flow: Flow[T]) -> T:
        item = next(iterator)
        buffer.store(item, kind=kind)
        flow.position += 1
        return item

    return Flow(advance, [flow])


def replay(buffer: Any, rows: int, seed: int = 0) -> Flow[Future]:
    """Futures of batches drawn from a replay buffer; its state is how many were drawn.

    Args:
      buffer: the worker group of a ``hjax.workers.ReplayBuffer``.
      rows: of each batch.
      seed: of the draws, beside the run's: two flows of one buffer need another each.
    """
    return calls(lambda number: buffer.sample(rows, number, seed))


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
