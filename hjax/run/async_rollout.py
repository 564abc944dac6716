"""Asynchronous rollout (off-policy generation with bounded staleness).

A controller thread calls ``Algorithm.collect`` for coming batches while the trainer calls ``learn``
for the current one. Neither blocks on results, because the calls run in their resource pools.
A weight version is the number of steps that the weights have learned from.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
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
    """Which weight version generates each part of each batch.

    Attributes:
      staleness: most versions by which a batch may lag behind the weights that learn from it.
      deterministic: whether versions are fixed in advance; otherwise the newest one generates.
      checkpoint_every: steps between checkpoints; 0: none. With a deterministic schedule a batch is
        started and learned from between the same checkpoints, so a resumed run repeats exactly.
      parts: calls in which a batch is generated (partial rollouts).
      part_tokens: response tokens per part; 0: whole responses.
      steps: steps of the run; no batches are generated beyond them.
    """

    staleness: int
    deterministic: bool = False
    checkpoint_every: int = 0
    parts: int = 1
    part_tokens: int = 0
    steps: int = 0

    @classmethod
    def from_config(cls, config: ConfigDict) -> StalenessSchedule:
        """The schedule of a run's config."""
        rollout, parts = config.rollout, 1
        if rollout.partial_tokens:
            parts = -(-rollout.max_response_length // rollout.partial_tokens)
        return cls(
            rollout.max_staleness,
            deterministic=rollout.deterministic,
            checkpoint_every=config.checkpoint.every if rollout.deterministic else 0,
            parts=parts,
            part_tokens=rollout.partial_tokens,
            steps=config.steps,
        )

    def version(self, number: int, part: int) -> int:
        """The weight version of a part of a batch in a deterministic schedule.

        Args:
          number: of the batch, from 0.
          part: of the batch, from 0; parts of the second half get the next version.
        """
        later = 1 if self.staleness and 2 * part >= self.parts > 1 else 0
        every = self.checkpoint_every
        return max(number - self.staleness + later, number // every * every if every else 0)


@dataclasses.dataclass
class PendingBatch:
    """A batch that is being generated or waits to be learned from.

    Attributes:
      number: of the batch, from 0.
      prompts: state of the prompt sampler before this batch's prompts were drawn.
      oldest_version: of the weights that generated its first tokens; -1 before generation.
      ready: whether ``collect`` has returned.
      collected: what ``collect`` returned.
    """

    number: int
    prompts: dict[str, int]
    oldest_version: int = -1
    ready: bool = False
    collected: Any = None


class BatchQueue:
    """First-in, first-out queue of batches; stale ones are dropped and counted.

    Args:
      staleness: most versions by which a batch's oldest token may lag behind the learning weights.
    """

    def __init__(self, staleness: int):
        self.staleness = staleness
        self.dropped = 0
        self.batches: collections.deque[PendingBatch] = collections.deque()

    def take(self, version: int) -> PendingBatch | None:
        """Pop the first batch that is fresh enough to learn from; None if none is ready."""
        while self.batches and self.batches[0].ready:
            pending = self.batches.popleft()
            if version - pending.oldest_version <= self.staleness:
                return pending
            self.dropped += 1
        return None


class AsyncRollout:
    """Collects batches in a background thread, ahead of learning.

    Args:
      algorithm: its ``collect`` is called in the background thread.
      policy: the actor with its separate rollout.
      prompts: sampler of the prompts.
      order: makes what ``Algorithm.choose`` takes prompts from, of the batch's number from 1 and a
        function that returns the version of the weights that generate it.
      schedule: which weight version generates what.
      version: steps learned from so far.
      state: of an earlier object, to resume from.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        policy: RolloutPolicy,
        prompts: PromptSampler | MixedSampler,
        order: Callable[[int, Callable[[], int]], Any],
        schedule: StalenessSchedule,
        version: int = 0,
        state: Mapping[str, int] | None = None,
    ):
        self._algorithm, self._policy, self._prompts = algorithm, policy, prompts
        self._order, self.schedule = order, schedule
        self.queue = BatchQueue(schedule.staleness)
        state = state or {"number": version, "dropped": 0}
        self._number, self.queue.dropped = int(state["number"]), int(state["dropped"])
        self._first = self._version = version
        self._learning: tuple[int, PendingBatch] | None = None  # version that learns, its batch
        self._next_version = -1  # version that the next generation waits for
        self._idle = False  # no further batch is needed for now
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        policy.keep_versions = schedule.deterministic
        policy.parts, policy.part_tokens = schedule.parts, schedule.part_tokens
        policy.publish_version(version)
        self._thread = threading.Thread(target=self._run, name="async rollout", daemon=True)
        self._thread.start()

    def next(self, version: int) -> Any:
        """What ``collect`` returned for the next batch that is fresh enough.

        Args:
          version: steps learned from so far; the current weights are published as this version.

        Raises:
          RunError: the wait exceeds the deadline of calls. What failed in the thread is raised too.
        """
        self._publish(version)
        found: list[PendingBatch] = []

        def ready() -> bool:
            before = self.queue.dropped
            pending = self.queue.take(version)
            found.extend([] if pending is None else [pending])
            if self.queue.dropped > before:
                self._changed.notify_all()  # a dropped batch makes room for another
            return bool(found)

        self._wait(ready)
        self._learning = version, found[0]
        return found[0].collected

    def drain(self, version: int) -> None:
        """Wait until every generation by older weights has been requested.

        After it the rollout's weights may be replaced, for an evaluation between steps.
        """
        self._publish(version)
        if self.schedule.deterministic:
            self._wait(lambda: self._idle or self._next_version >= version)

    def _publish(self, version: int) -> None:
        self._policy.publish_version(version)
        with self._changed:
            if version != self._version:
                self._idle = False  # until the thread has checked again
            self._version = version
            self._changed.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._error or ready(), DEADLINE_SECONDS):
                raise RunError(
                    f"the asynchronous rollout has not answered within {DEADLINE_SECONDS:g} seconds"
                )
            if self._error is not None:
                raise self._error

    def metrics(self, batch: Batch) -> dict[str, float]:
        """``rollout/dropped``, stale batches so far; ``rollout/staleness``, mean over tokens."""
        metrics = {"rollout/dropped": float(self.queue.dropped)}
        if "versions" in batch:
            mask = np.asarray(batch["response_mask"], bool)
            lag = self._version - np.asarray(batch["versions"])[mask]
            metrics["rollout/staleness"] = float(lag.mean()) if lag.size else 0.0
        return metrics

    def state(self, version: int = -1) -> tuple[dict[str, int], dict[str, int]]:
        """State for a checkpoint: the prompt sampler's and this object's own, plain JSON.

        Batches in flight are not saved: their prompts are drawn again after a resume.

        Args:
          version: steps learned from. A batch that was taken at this version is in flight too; -1
            means that every batch taken has been learned from.
        """
        with self._changed:
            first = self.queue.batches[0] if self.queue.batches else None
            if self._learning is not None and self._learning[0] == version:
                first = self._learning[1]
            prompts = self._prompts.state() if first is None else first.prompts
            number = self._number if first is None else first.number
            return prompts, {"number": number, "dropped": self.queue.dropped}

    def close(self) -> None:
        """Stop the thread; waits for the call in progress."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    # In the background thread

    def _run(self) -> None:
        try:
            while True:
                self._collect_next()
        except _Closed:
            return
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _collect_next(self) -> None:
        self._wait_in_thread(self._may_start)
        with self._changed:
            pending = PendingBatch(self._number, self._prompts.state())
            self.queue.batches.append(pending)
            self._number += 1
        order = self._order(pending.number + 1, functools.partial(self._generating, pending))
        with self._policy.selecting_version(_VersionSelector(self, pending)):
            prompts = self._algorithm.choose(order, self._prompts.per_step)
            collected = self._algorithm.collect(prompts)
        with self._changed:
            pending.collected, pending.ready = collected, True
            if pending.oldest_version < 0:  # it generated nothing, so it is not stale
                pending.oldest_version = self._version
            self._changed.notify_all()
        if not self.schedule.deterministic:
            self._policy.wait_idle()  # so that the next batch gets the newest weights

    def _may_start(self) -> bool:
        """Whether another batch is needed, and would be fresh enough when it is learned from."""
        position = self._number - self.queue.dropped
        was_idle, self._idle = self._idle, position > max(self.schedule.steps - 1, self._version)
        if self._idle:
            if not was_idle:
                self._changed.notify_all()
            return False
        return self.schedule.deterministic or position <= self._version + self.schedule.staleness

    def _wait_in_thread(self, until: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or until())
            if self._closed:
                raise _Closed

    def _generating(self, pending: PendingBatch) -> int:
        """The version that generates a batch's first tokens; without a fixed schedule the newest,
        and what is learned meanwhile may be newer when the batch is generated."""
        version = self.version_for(pending, 0)
        with self._changed:
            return self._version if version is None else version

    def version_for(self, pending: PendingBatch, part: int) -> int | None:
        """Wait for the version that generates a part of a batch; None means the newest."""
        if not self.schedule.deterministic:
            self._wait_in_thread(lambda: True)
            return None
        with self._changed:
            planned = self.schedule.version(pending.number, part)
            self._next_version = version = max(planned, self._first, self._next_version)
            self._changed.notify_all()
        self._wait_in_thread(lambda: self._version >= version)
        return version


@dataclasses.dataclass(frozen=True)
class _VersionSelector:
    """Selects the weight version of a batch, for ``RolloutPolicy.selecting_version``."""

    rollout: AsyncRollout
    pending: PendingBatch

    def version_for(self, part: int) -> int | None:
        """Wait for the version that generates a part of the batch; None means the newest."""
        return self.rollout.version_for(self.pending, part)

    def record_version(self, version: int) -> None:
        """Record a version that was used; the first one is the oldest, because versions rise."""
        if self.pending.oldest_version < 0:
            self.pending.oldest_version = version


class _Closed(Exception):
    """Ends the thread: ``close`` was called."""
