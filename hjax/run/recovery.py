"""Recovery from lost processes: they are restarted, and steps since the checkpoint are redone."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hjax.errors import RunError
from hjax.run.training_run import TrainingRun


class RecoveringRun(TrainingRun):
    """A run that survives the loss of cluster processes.

    An asynchronous rollout is replaced while learning keeps its weights. After any other loss the
    run returns to its last checkpoint.
    """

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Make the Trainer unusable if the block fails with weights half updated.

        Raises:
          RunError: the Trainer is unusable already.
        """
        if self._unusable:
            raise RunError(self._unusable)
        try:
            yield
        except BaseException as error:
            if self._weights_updated or not isinstance(error, Exception):
                cause = "failed" if isinstance(error, Exception) else "was interrupted"
                where = f"step {self.timeline.step}" if self._prepared else "the start"
                again = "with the same workdir goes on from the last checkpoint"
                self._unusable = (
                    f"{where} {cause}, and weights may be half updated: close() this Trainer; a "
                    f"new one {'starts anew' if self.workdir is None else again}"
                )
            raise

    def _recover(self, error: Exception) -> None:
        """Restart lost processes after an error, and return to the last checkpoint.

        Raises:
          Exception: the error itself, if no process is lost.
          RunError: processes were restarted too often.
        """
        while True:
            lost = self.backend.lost_executors()
            if not lost:
                raise error
            self._count_restart(lost[0].lost)
            try:
                # A step that has updated weights but has no row yet must not be repeated.
                if self._only_rollout_lost(lost) and not self._weights_updated:
                    self._restart_rollout()
                    return
                self._stop_async_rollout()
                self._async_state = None
                if self.checkpoints is not None:
                    with contextlib.suppress(RunError):  # of the lost process
                        self.checkpoints.wait()
                self.roles.restart(lost, fewer=self.elastic)
                if self.elastic and self.roles.generating_executor in lost:
                    self._report_rollout_size()
                self._prepared = self._weights_updated = False
                self.prepare()
                return
            except Exception as again:
                error = again

    def _only_rollout_lost(self, lost: Sequence[Any]) -> bool:
        """Whether only an asynchronous rollout was lost, so the learning weights are intact."""
        if not self._prepared or not self.elastic:
            return False
        return list(lost) == [self.roles.generating_executor]

    @property
    def elastic(self) -> bool:
        """Whether generation may continue with fewer processes after a loss."""
        settings = self.config.rollout
        return bool(settings.max_staleness) and not settings.deterministic

    def _restart_rollout(self) -> None:
        """Restart the rollout on the processes that fit; batches in flight are generated again.

        Learning continues from its current weights.
        """
        policy = self.policy
        assert policy is not None
        if self.async_rollout is not None:
            prompts, self._async_state = self.async_rollout.state(self.step_number)
            self._stop_async_rollout()
            self.prompts.restore(prompts)
        self.roles.restart([self.roles.generating_executor], fewer=True)
        policy.reset(self.step_number)
        self._report_rollout_size()

    def _report_rollout_size(self) -> None:
        executor = self.roles.generating_executor
        now, planned = executor.processes, executor.planned
        if planned > 1:
            until = "" if now == planned else " until there is room for more"
            size = f"{now} of {planned} processes"
            self.reporter.message(f"{executor.name} goes on with {size}{until}")

    def _regrow_rollout(self) -> None:
        """Give an asynchronous rollout its lost processes back once there is room for them."""
        if self.async_rollout is not None and self.elastic and self.roles.can_grow():
            self._restart_rollout()
