"""The actor as an algorithm calls it where generation stands apart: two groups behind one handle.

Weights go from the one to the other as futures, so that neither they nor tokens pass through the
controller; that they are the right ones is seen to where they arrive (``hjax.workers.Rollout``).
"""

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from hjax.controller import Future, WorkerGroup
from hjax.errors import RunError

# Calls outside of steps after which the actor's weights are others.
_REPLACED = ("initialize", "load_state", "take_weights")


class RolloutPolicy:
    """The actor's worker group, but that a rollout's generates, with weights published before.

    A version of the weights is what learning leaves behind: its number rises by one with each run
    of updates (as many as a step makes) before the weights are asked for again.

    Args:
      actor: learns.
      rollout: generates.
      updates: the actor's methods that change its weights.
      landing: gives how the rollout, in processes of its own, has weights arrive; None: it is in
        this one.

    Attributes:
      version: number of the actor's weights as they were announced last.
      keep: whether versions stay announced until their turn; otherwise only the newest does.
      parts, tokens: in how many calls a batch ahead of learning is generated, of how many tokens.
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
        self._ask_landing, self._landing = landing, landing()
        self.version = 0
        self.keep = False
        self.parts, self.tokens = 1, 0
        self._changed = False
        self._announced: dict[int, Future] = {}
        self._committed: tuple[int, Future] | None = None
        self._lock = threading.RLock()
        self._here = threading.local()

    def reset(self, version: int) -> None:
        """Forget what was published; the actor's weights have this version, as in a checkpoint."""
        with self._lock:
            self._landing = self._ask_landing()  # it may have other devices than before
            self.version, self._changed = version, False
            self._announced, self._committed = {}, None

    def announce(self, version: int | None = None) -> int:
        """Give the weights as they are a number, and make a copy to publish.

        Call it between steps: the copy is of the weights after all updates that were called before.

        Args:
          version: the number; None: a new one if they changed since the last.
        """
        with self._lock:
            known = self.version in self._announced or (
                self._committed is not None and self._committed[0] == self.version
            )
            if version is None:
                version = self.version + 1 if self._changed and known else self.version
            if not known or version != self.version:
                if not self.keep:
                    self._announced.clear()
                self._announced[version] = self.actor.publish(self._landing)
            self.version, self._changed = version, False
            return version

    @property
    def changed(self) -> bool:
        """Whether the actor's weights were changed since they were announced."""
        return self._changed

    @contextlib.contextmanager
    def choosing(self, turn: Any) -> Iterator[None]:
        """In this thread, and inside the block, generation asks ``turn`` for its version
        (``hjax.run.async_rollout``)."""
        self._here.turn = turn
        try:
            yield
        finally:
            del self._here.turn

    def generate_sequences(
        self, prompts: Mapping[str, Any], greedy: bool = False, samples: int | None = None
    ) -> Future:
        """Answer prompts on the rollout, see ``hjax.workers.GeneratingWorker``.

        Outside of ``choosing`` with the actor's weights as they are: they are published first where
        they changed since.
        """
        turn = getattr(self._here, "turn", None)
        if turn is not None and self.parts > 1 and not greedy:
            return self._generate_parts(turn, prompts, samples)
        with self._ready(turn, 0) as version:
            return self.rollout.generate_sequences(
                prompts, greedy=greedy, samples=samples, version=version
            )

    def _generate_parts(self, turn: Any, prompts: Mapping[str, Any], samples: int | None) -> Future:
        """The same in parts, between which newer weights may take over."""
        with self._ready(turn, 0) as version:
            batch = self.rollout.generate_sequences(
                prompts, samples=samples, version=version, tokens=self.tokens
            )
        for part in range(1, self.parts):
            if not self.keep:
                self.idle()
            with self._ready(turn, part) as version:
                batch = self.rollout.continue_sequences(
                    batch, part * self.tokens, self.tokens, part == self.parts - 1, version=version
                )
        return batch

    @contextlib.contextmanager
    def _ready(self, turn: Any, part: int) -> Iterator[Future]:
        """The rollout with the weights that are to generate: the future of their number."""
        wanted = self.announce() if turn is None else turn.wanted(part)
        with self._lock:
            version = self.version if wanted is None else wanted
            used = self._use(version)
            if turn is not None:
                turn.used(version)
            yield used

    def idle(self) -> None:
        """Wait until the rollout has done all that it was asked to do until now."""
        self.rollout.take_seconds().result()

    def _use(self, version: int) -> Future:
        """Let the rollout go over to a version; the future of its number, which fails if that did.

        So what goes wrong with a publication is an error of the generation that waits for it.
        """
        if self._committed is None or self._committed[0] != version:
            if version not in self._announced:
                raise RunError(
                    f"version {version} of the actor's weights was never announced; there are "
                    f"{', '.join(map(str, self._announced)) or 'none'}"
                )
            taken = self.rollout.receive_weights(self._announced[version], version)
            self._announced = {v: x for v, x in self._announced.items() if v > version}
            self._committed = version, self.rollout.commit(taken)
        return self._committed[1]

    def take_seconds(self) -> Future:
        """Seconds in which weights were on their way since last asked."""
        return self.rollout.take_seconds()

    def has(self, method: str) -> bool:
        """Whether the actor has a method that the controller can call."""
        return self.actor.has(method)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for by copy and pickle, before there is an actor
            raise AttributeError(name)
        found = getattr(self.actor, name)
        if name not in self._updates and name not in _REPLACED:
            return found

        def changing(*arguments: Any, **options: Any) -> Future:
            with self._lock:
                self._changed = True
                if name in _REPLACED:
                    self._announced, self._committed = {}, None
            return found(*arguments, **options)

        return changing
