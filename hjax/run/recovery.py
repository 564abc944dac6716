"""What becomes of a run whose processes are lost: they are replaced, and steps taken again."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.controller import Timeline
from hjax.controller.executors import ExecutorFactory
from hjax.data.dataset import PromptSampler
from hjax.data.mixing import MixedSampler
from hjax.errors import LOG_FOLLOWS, ProcessLost, RunError
from hjax.files import METRICS
from hjax.models.checkpoint import Checkpoints
from hjax.run.ahead import Ahead
from hjax.run.machines import Machines
from hjax.run.policy import Policy
from hjax.run.roles import Roles
from hjax.run.workdir import Workdir


class Recovering(abc.ABC):
    """A run that goes on where processes of its machines are lost.

    A rollout that runs ahead of learning is replaced beside it; after any other loss the run goes
    back to its last checkpoint. The attributes are the run's own (``hjax.run.trainer.Trainer``).
    """

    config: ConfigDict
    machines: Machines
    roles: Roles
    prompts: PromptSampler | MixedSampler
    checkpoints: Checkpoints | None
    workdir: Workdir | None
    timeline: Timeline
    ahead: Ahead | None
    step_number: int
    restarts: int
    _ahead_state: dict[str, int] | None
    _prepared: bool
    _updated: bool  # weights, by a step whose row is not written
    _unfit: str  # why it refuses to go on; mostly empty
    _repair: bool  # set damaged checkpoints aside
    _said: str  # last

    @abc.abstractmethod
    def prepare(self) -> None:
        """Load or create the weights, resume or warm-start."""

    @abc.abstractmethod
    def _message(self, text: str) -> None:
        """Tell a person."""

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Refuse to go on from here if the block is broken off, with weights half updated.

        Raises:
          RunError: that has happened before.
        """
        if self._unfit:
            raise RunError(self._unfit)
        try:
            yield
        except BaseException as error:
            if self._updated or not isinstance(error, Exception):
                cause = "failed" if isinstance(error, Exception) else "was interrupted"
                where = f"step {self.timeline.step}" if self._prepared else "the start"
                again = "with the same workdir goes on from the last checkpoint"
                self._unfit = (
                    f"{where} {cause}, and weights may be half updated: close() this Trainer; a "
                    f"new one {'starts anew' if self.workdir is None else again}"
                )
            raise

    def _sound_checkpoint(self) -> int | None:
        """The step to go on from; None: there is no checkpoint.

        Raises:
          DataError: it is damaged, or is to be repaired and none is sound.
        """
        if self.checkpoints is None:
            return None
        if self._repair:
            for said in self.checkpoints.repair():
                self._message(said)
            self._repair = False
        latest = self.checkpoints.latest()
        if latest is not None and not self.checkpoints.verify(latest):
            self._message(f"checkpoint {latest} has no checksums (an earlier hjax wrote it)")
        return latest

    def _tell_gaps(self) -> None:
        """Tell of which steps metrics.jsonl has no row."""
        missing = self.workdir.missing(self.step_number) if self.workdir is not None else []
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            self._message(f"{METRICS} has no row of {len(missing)} steps: {shown}")

    def _stop_ahead(self) -> None:
        """Collect no more ahead of learning."""
        ahead, self.ahead = self.ahead, None
        if ahead is not None:
            ahead.close()

    def _start(self, devices: Sequence[Any], executor: ExecutorFactory) -> None:
        """Start the pools; where a process is lost while it starts, once more."""
        self.restarts = 0
        while True:
            try:
                return self.roles.start(devices, executor)
            except ProcessLost as error:
                self._count(error)

    def _count(self, cause: Exception) -> None:
        """Something lost is replaced, unless that was done too often."""
        most = self.config.cluster.max_restarts
        if self.restarts >= most:
            raise RunError(
                f"lost processes were replaced {most} times (cluster.max_restarts); now {cause}"
            ) from cause
        self.restarts += 1
        # Its log was shown when it was lost, unless other things came after.
        what = str(cause)
        what = what.partition(LOG_FOLLOWS)[0] if what == self._said else what
        self._message(f"{what}\nit is replaced ({self.restarts} of at most {most} times)")

    def _recover(self, error: Exception) -> None:
        """Replace the processes that an error came from, and go back to the last checkpoint.

        Raises:
          Exception: the error, if all processes are there.
          RunError: they were replaced too often.
        """
        while True:
            lost = self.machines.lost()
            if not lost:
                raise error
            self._count(lost[0].lost)
            try:
                # A step that has updated weights, and has no row yet, is not begun again.
                if self._only_generates(lost) and not self._updated:
                    self._restart_rollout()
                    return
                self._stop_ahead()
                self._ahead_state = None
                if self.checkpoints is not None:
                    with contextlib.suppress(RunError):  # of the lost process
                        self.checkpoints.wait()
                self.roles.restart(lost, fewer=self.elastic)
                if self.elastic and self.roles.generating in lost:
                    self._tell_size()
                self._prepared = self._updated = False
                self.prepare()
                return
            except Exception as again:
                error = again

    def _only_generates(self, lost: Sequence[Any]) -> bool:
        """Whether what was lost is a rollout that runs ahead: the weights that learn are there."""
        if not self._prepared or not self.elastic:
            return False
        return list(lost) == [self.roles.generating]

    @property
    def elastic(self) -> bool:
        """Whether generation goes on with fewer processes where some are lost."""
        settings = self.config.rollout
        return bool(settings.max_staleness) and not settings.deterministic

    def _restart_rollout(self) -> None:
        """Give the rollout the processes that there is room for; batches on their way are redone.

        Learning goes on from the weights as they are.
        """
        policy = self.policy
        assert policy is not None
        if self.ahead is not None:
            prompts, self._ahead_state = self.ahead.state(self.step_number)
            self._stop_ahead()
            self.prompts.restore(prompts)
        executor = self.roles.generating
        self.roles.restart([executor], fewer=True)
        policy.reset(self.step_number)
        self._tell_size()

    def _tell_size(self) -> None:
        executor = self.roles.generating
        now, planned = executor.processes, executor.planned
        if planned > 1:
            until = "" if now == planned else " until there is room for more"
            self._message(f"{executor.name} goes on with {now} of {planned} processes{until}")

    def _grow(self) -> None:
        """Take processes in that a rollout ahead of learning lost, where there is room again."""
        if self.ahead is not None and self.elastic and self.roles.could_grow():
            self._restart_rollout()

    @property
    def policy(self) -> Policy | None:
        """The actor as algorithms call it where a rollout stands apart, else None."""
        actor = self.roles.groups["actor"]
        return actor if isinstance(actor, Policy) else None
