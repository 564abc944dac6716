"""Actor handle for a separate rollout: learning and generating worker groups behind one interface.

Weight sync passes futures between the groups, so neither weights nor tokens go through the
controller. The receiver checks that they are the right weights (``hjax.workers.Rollout``).
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hjax.controller import Future, WorkerGroup
from hjax.errors import RunError

# Methods outside of steps that replace the actor's weights.
_REPLACED = ("initialize", "load_state", "take_weights")


class RolloutPolicy:
    """The actor's worker group, except that a separate rollout group generates, on synced weights.

    The weight version rises by one with each series of updates (those of one step) that is followed
    by a request for the weights.

    Args:
      actor: the group that learns.
      rollout: the group that generates.
      updates: the actor's methods that change its weights.
      landing: returns the layout in which the rollout's own processes receive weights; None if it
        runs in this process.

    Attributes:
      version: of the actor's weights when they were last published.
      keep_versions: whether published versions are kept until used; otherwise only the newest is.
      parts: calls in which an asynchronous batch is generated.
      part_tokens: response tokens per part.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        rollout: WorkerGroup,
        updates: Collection[str],
        landing: Callable[[], Any] = lambda: None,
    ):
        self.actor, self.rollout = actor, rollout
        self._updates = frozenset(updates)
        self._find_landing, self._landing = landing, landing()
        self.version = 0
        self.keep_versions = False
        self.parts, self.part_tokens = 1, 0
        self._changed = False
        self._published: dict[int, Future] = {}
        self._committed: tuple[int, Future] | None = None
        self._lock = threading.RLock()
        self._turns = threading.Lock()  # held from a thread's begin_turns to its end_turns
        self._local = threading.local()

    def reset(self, version: int) -> None:
        """Discard published weights; the actor's weights now have this version (a checkpoint's)."""
        with self._lock:
            self._landing = self._find_landing()  # the rollout's devices may have changed
            self.version, self._changed = version, False
            self._published, self._committed = {}, None

    def publish_version(self, version: int | None = None) -> int:
        """Publish a copy of the actor's weights as a version; returns the version.

        Call it between steps: the copy includes all updates that were requested before.

        Args:
          version: its number; None: a new one if the weights changed since the last.
        """
        with self._lock:
            known = self.version in self._published or (
                self._committed is not None and self._committed[0] == self.version
            )
            if version is None:
                version = self.version + 1 if self._changed and known else self.version
            if not known or version != self.version:
                if not self.keep_versions:
                    self._published.clear()
                self._published[version] = self.actor.publish(self._landing)
            self.version, self._changed = version, False
            return version

    @property
    def changed(self) -> bool:
        """Whether the actor's weights have changed since they were published."""
        return self._changed

    @contextlib.contextmanager
    def selecting_version(self, selector: Any) -> Iterator[None]:
        """Inside the block, generation in this thread gets its version from ``selector``
        (``hjax.run.async_rollout``)."""
        self._local.selector = selector
        try:
            yield
        finally:
            del self._local.selector

    def generate_sequences(
        self, prompts: Mapping[str, Any], greedy: bool = False, samples: int | None = None
    ) -> Future:
        """Generate responses on the rollout, see ``hjax.workers.GeneratingWorker``.

        Outside of ``selecting_version`` the rollout uses the actor's current weights, which are
        published first if they have changed.
        """
        selector = getattr(self._local, "selector", None)
        if selector is not None and self.parts > 1 and not greedy:
            return self._generate_parts(selector, prompts, samples)
        with self._committed_version(selector, 0) as version:
            return self.rollout.generate_sequences(
                prompts, greedy=greedy, samples=samples, version=version
            )

    def begin_turns(self, rows: int, row_tokens: int) -> Future:
        """Begin the turns of episodes on the rollout, see ``hjax.workers.GeneratingWorker``; the
        weights' version is chosen as for ``generate_sequences``. Waits for the ``end_turns`` of
        other threads: an evaluation and generation ahead of learning take turns."""
        selector = getattr(self._local, "selector", None)
        with self._committed_version(selector, 0, of_turns=True) as version:
            return self.rollout.begin_turns(rows, row_tokens, version=version)

    def draw_turns(self, requests: Any, step: int = 0, greedy: bool = False) -> Future:
        """Draw turns of episodes on the rollout."""
        return self.rollout.draw_turns(requests, step=step, greedy=greedy)

    def end_turns(self) -> Future:
        """End the turns of episodes on the rollout."""
        try:
            return self.rollout.end_turns()
        finally:
            if getattr(self._local, "has_turns", False):
                self._local.has_turns = False
                self._turns.release()

    def _generate_parts(
        self, selector: Any, prompts: Mapping[str, Any], samples: int | None
    ) -> Future:
        """Partial rollouts: generate in parts, between which newer weights may take over."""
        with self._committed_version(selector, 0) as version:
            batch = self.rollout.generate_sequences(
                prompts, samples=samples, version=version, tokens=self.part_tokens
            )
        tokens = self.part_tokens
        for part in range(1, self.parts):
            if not self.keep_versions:
                self.wait_idle()
            with self._committed_version(selector, part) as version:
                batch = self.rollout.continue_sequences(
                    batch, part * tokens, tokens, part == self.parts - 1, version=version
                )
        return batch

    @contextlib.contextmanager
    def _committed_version(
        self, selector: Any, part: int, of_turns: bool = False
    ) -> Iterator[Future]:
        """Hold the rollout at the version that generates; yields the future of its number.

        With ``of_turns`` this thread alone draws turns, until its ``end_turns``.
        """
        wanted = self.publish_version() if selector is None else selector.version_for(part)
        if of_turns:  # not before, as others may have to learn until the version is there
            self._turns.acquire()
            self._local.has_turns = True
        with self._lock:
            version = self.version if wanted is None else wanted
            used = self._commit(version)
            if selector is not None:
                selector.record_version(version)
            yield used

    def wait_idle(self) -> None:
        """Wait until the rollout has finished all requested calls."""
        self.rollout.take_seconds().result()

    def _commit(self, version: int) -> Future:
        """Switch the rollout to a version; returns the future of its number.

        The future fails if the weight sync failed, so the error surfaces in the generation that
        waits for it.
        """
        if self._committed is None or self._committed[0] != version:
            if version not in self._published:
                raise RunError(
                    f"version {version} of the actor's weights was never published; there are "
                    f"{', '.join(map(str, self._published)) or 'none'}"
                )
            taken = self.rollout.receive_weights(self._published[version], version)
            self._published = {v: x for v, x in self._published.items() if v > version}
            self._committed = version, self.rollout.commit(taken)
        return self._committed[1]

    def use_average(self, use: bool) -> Future:
        """Exchange the actor's weights with their moving average, or back
        (``hjax.workers.TrainableWorker``); what it then has is published again, as the same
        version, for the next generation. Not while batches are generated ahead of learning."""
        with self._lock:
            if self._changed and self._committed is not None:
                self.version += 1  # of the updates since the last generation
            self._changed = False
            exchanged = self.actor.use_average(use)
            self.rollout.initialize()  # it takes a version once
            self._published, self._committed = {}, None
            return exchanged

    def take_seconds(self) -> Future:
        """Seconds of weight sync since the last call."""
        return self.rollout.take_seconds()

    def has(self, method: str) -> bool:
        """Whether the actor has a remote method of this name."""
        return self.actor.has(method)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy and pickle look these up before `actor` is set
            raise AttributeError(name)
        found = getattr(self.actor, name)
        if name not in self._updates and name not in _REPLACED:
            return found

        def changing(*arguments: Any, **options: Any) -> Future:
            with self._lock:
                self._changed = True
                if name in _REPLACED:
                    self._published, self._committed = {}, None
            return found(*arguments, **options)

        return changing
