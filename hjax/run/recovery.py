"""What becomes of a run whose processes are lost: they are replaced, and steps taken again."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hjax.errors import RunError
from hjax.run.training_run import TrainingRun


class RecoveringRun(TrainingRun):
    """A run that goes on where processes of its machines are lost.

    A rollout that runs ahead of learning is replaced beside it; after any other loss the run goes
    back to its last checkpoint.
    """

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
            size = f"{now} of {planned} processes"
            self.reporter.message(f"{executor.name} goes on with {size}{until}")

    def _grow(self) -> None:
        """Take processes in that a rollout ahead of learning lost, where there is room again."""
        if self.ahead is not None and self.elastic and self.roles.could_grow():
            self._restart_rollout()
