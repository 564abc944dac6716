"""Generation ahead of learning: batches collected with weights of bounded age.

A thread of the controller calls ``Algorithm.collect`` for the batches to come, while the trainer
calls ``learn`` for the one whose turn it is. Neither waits for results: their calls run where their
pools are. A version of the weights is a number of steps learned from.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, Batch
from hjax.controller.futures import DEADLINE_SECONDS
from hjax.data.dataset import PromptSampler
from hjax.data.mixing import MixedSampler
from hjax.errors import RunError
from hjax.run.rollout_policy import RolloutPolicy


@dataclasses.dataclass(frozen=True)
class StalenessSchedule:
    """Which weights generate what.

    Attributes:
      staleness: versions by which a batch may lag behind the weights that learn from it.
      fixed: whether each part of each batch has its version beforehand; else it is the newest.
      every: steps between checkpoints: in a fixed schedule no batch that is learned from after one
        is begun before it, so that a run resumed there is the undisturbed one. 0: none.
      parts: in which a batch is generated, each of ``tokens`` tokens (0: one part, whole).
      steps: of the run; nothing is generated for more than these.
    """

    staleness: int
    fixed: bool = False
    every: int = 0
    parts: int = 1
    tokens: int = 0
    steps: int = 0

    @classmethod
    def of(cls, config: ConfigDict) -> StalenessSchedule:
        """That of a run's config."""
        rollout, parts = config.rollout, 1
        if rollout.partial_tokens:
            parts = -(-rollout.max_response_length // rollout.partial_tokens)
        return cls(
            rollout.max_staleness,
            fixed=rollout.deterministic,
            every=config.checkpoint.every if rollout.deterministic else 0,
            parts=parts,
            tokens=rollout.partial_tokens,
            steps=config.steps,
        )

    def version(self, number: int, part: int) -> int:
        """The version that a fixed schedule gives a part of a batch.

        Args:
          number: of the batch, from 0.
          part: of it, from 0; those of the second half are generated one version later.
        """
        later = 1 if self.staleness and 2 * part >= self.parts > 1 else 0
        fence = number // self.every * self.every if self.every else 0
        return max(number - self.staleness + later, fence)


@dataclasses.dataclass
class PendingBatch:
    """A batch on its way.

    Attributes:
      number: of the batch, from 0.
      prompts: state of the prompts' order before its prompts were drawn.
      oldest: version of its first tokens; -1 before there are any.
      ready: whether ``collect`` has made its calls.
      collected: what it gave.
    """

    number: int
    prompts: dict[str, int]
    oldest: int = -1
    ready: bool = False
    collected: Any = None


class BatchQueue:
    """Batches in their order; those that have become too old are dropped and counted.

    Args:
      staleness: the most versions by which a batch's oldest token may lag behind.
    """

    def __init__(self, staleness: int):
        self.staleness = staleness
        self.dropped = 0
        self.tickets: collections.deque[PendingBatch] = collections.deque()

    def take(self, version: int) -> PendingBatch | None:
        """The first batch that weights of a version may learn from; None: there is none yet."""
        while self.tickets and self.tickets[0].ready:
            ticket = self.tickets.popleft()
            if version - ticket.oldest <= self.staleness:
                return ticket
            self.dropped += 1
        return None


class AsyncRollout:
    """Collects batches ahead of learning.

    Args:
      algorithm: whose ``collect``; it is called in this object's thread.
      policy: the actor, with a rollout apart.
      prompts: their order.
      draw: gives the prompt batch of indices into the data and a number from 1, with which its
        tokens are drawn.
      schedule: which weights generate what.
      version: steps learned from so far.
      state: of an earlier object, to go on from.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        policy: RolloutPolicy,
        prompts: PromptSampler | MixedSampler,
        draw: Callable[[np.ndarray, int], Batch],
        schedule: StalenessSchedule,
        version: int = 0,
        state: Mapping[str, int] | None = None,
    ):
        self._algorithm, self._policy, self._prompts = algorithm, policy, prompts
        self._draw, self.schedule = draw, schedule
        self.queue = BatchQueue(schedule.staleness)
        state = state or {"number": version, "dropped": 0}
        self._number, self.queue.dropped = int(state["number"]), int(state["dropped"])
        self._first = self._version = version
        self._taken: tuple[int, PendingBatch] | None = None  # by learning, at which version
        self._wanted = -1  # version that the next generation waits for
        self._resting = False  # nothing more is wanted for now
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        policy.keep, policy.parts, policy.tokens = schedule.fixed, schedule.parts, schedule.tokens
        policy.announce(version)
        self._thread = threading.Thread(target=self._serve, name="rollouts ahead", daemon=True)
        self._thread.start()

    def next(self, version: int) -> Any:
        """What ``collect`` gave for the next batch that is not too old.

        Args:
          version: steps learned from so far; the weights as they are get this number.

        Raises:
          RunError: collecting failed with it, or takes longer than calls may.
        """
        self._announce(version)
        found: list[PendingBatch] = []

        def ready() -> bool:
            before = self.queue.dropped
            ticket = self.queue.take(version)
            found.extend([] if ticket is None else [ticket])
            if self.queue.dropped > before:
                self._changed.notify_all()  # there is room for others
            return bool(found)

        self._wait(ready)
        self._taken = version, found[0]
        return found[0].collected

    def settle(self, version: int) -> None:
        """Wait until all that older weights are to generate has been asked for.

        Then others may be put in their place: for an evaluation, between steps.
        """
        self._announce(version)
        if self.schedule.fixed:
            self._wait(lambda: self._resting or self._wanted >= version)

    def _announce(self, version: int) -> None:
        self._policy.announce(version)
        with self._changed:
            if version != self._version:
                self._resting = False  # until the thread has looked again
            self._version = version
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or ready(), DEADLINE_SECONDS):
                raise RunError(
                    f"generation ahead of learning has not answered within {DEADLINE_SECONDS:g} "
                    "seconds"
                )
            if self._error is not None:
                raise self._error

    def metrics(self, batch: Batch) -> dict[str, float]:
        """``rollout/dropped``, batches so far; ``rollout/staleness``, mean per token, versions."""
        metrics = {"rollout/dropped": float(self.queue.dropped)}
        if "versions" in batch:
            mask = np.asarray(batch["response_mask"], bool)
            lag = self._version - np.asarray(batch["versions"])[mask]
            metrics["rollout/staleness"] = float(lag.mean()) if lag.size else 0.0
        return metrics

    def state(self, version: int = -1) -> tuple[dict[str, int], dict[str, int]]:
        """Where to go on from: the prompts' order, and this object's own; plain JSON.

        What is on its way is not in them: its prompts are drawn again.

        Args:
          version: steps learned from; a batch that was taken at this version was not. -1: all
            that were taken were.
        """
        with self._changed:
            first = self.queue.tickets[0] if self.queue.tickets else None
            if self._taken is not None and self._taken[0] == version:
                first = self._taken[1]
            prompts = self._prompts.state() if first is None else first.prompts
            number = self._number if first is None else first.number
            return prompts, {"number": number, "dropped": self.queue.dropped}

    def close(self) -> None:
        """Collect no more; waits for what is being asked for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # In the thread

    def _serve(self) -> None:
        try:
            while True:
                self._collect()
        except _Closed:
            return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _collect(self) -> None:
        self._pause(self._may_start)
        with self._changed:
            ticket = PendingBatch(self._number, self._prompts.state())
            self.queue.tickets.append(ticket)
            prompts = self._draw(self._prompts.next(), ticket.number + 1)
            self._number += 1
        with self._policy.choosing(_Turn(self, ticket)):
            collected = self._algorithm.collect(prompts)
        with self._changed:
            ticket.collected, ticket.ready = collected, True
            if ticket.oldest < 0:  # it generated nothing; then it is as new as can be
                ticket.oldest = self._version
            self._changed.notify_all()
        if not self.schedule.fixed:
            self._policy.idle()  # so that the next batch takes the weights that are newest then

    def _may_start(self) -> bool:
        """Whether the next batch is wanted, and would not be too old when its turn comes."""
        turn = self._number - self.queue.dropped
        rested, self._resting = self._resting, turn > max(self.schedule.steps - 1, self._version)
        if self._resting:
            if not rested:
                self._changed.notify_all()
            return False
        return self.schedule.fixed or turn <= self._version + self.schedule.staleness

    def _pause(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until())
            if self._closed:
                raise _Closed

    def wanted(self, ticket: PendingBatch, part: int) -> int | None:
        """The version that is to generate a part of a batch, once it is there; None: the newest."""
        if not self.schedule.fixed:
            self._pause(lambda: True)
            return None
        with self._changed:
            fixed = self.schedule.version(ticket.number, part)
            self._wanted = version = max(fixed, self._first, self._wanted)
            self._changed.notify_all()
        self._pause(lambda: self._version >= version)
        return version


@dataclasses.dataclass(frozen=True)
class _Turn:
    """Says with which weights a batch is generated, as ``RolloutPolicy.choosing`` takes it."""

    ahead: AsyncRollout
    ticket: PendingBatch

    def wanted(self, part: int) -> int | None:
        """The version for a part of the batch, once there is one; None: the newest."""
        return self.ahead.wanted(self.ticket, part)

    def used(self, version: int) -> None:
        """Told which it was; the first is that of the batch's oldest tokens: versions rise."""
        if self.ticket.oldest < 0:
            self.ticket.oldest = version


class _Closed(Exception):
    """The run is over."""
