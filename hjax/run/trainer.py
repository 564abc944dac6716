"""The Trainer: builds a run from its config, trains, evaluates, saves and resumes."""

import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.files import CALIBRATION, StrPath
from hjax.models.export import check_output
from hjax.run.async_rollout import AsyncRollout, StalenessSchedule
from hjax.run.best_checkpoint import check_has_metric
from hjax.run.evaluation import evaluate, evaluate_examples
from hjax.run.recovery import RecoveringRun
from hjax.run.run_metadata import export_actor, plan_record

Metrics = dict[str, float]


class Trainer(RecoveringRun):
    """A training run; the command builds the same object.

    Args:
      config: what to do, see docs/config.md.
      workdir: directory that the run is written to and resumed from; None writes nothing.
      display: shows progress; None shows nothing.
      plan: placement of the roles (``hjax.plan(config)``); None: as ``config.placement`` says,
        which may not be ``auto`` then.
      executor: makes a pool's executor; by default threads of this process or, if
        ``config.cluster`` asks for it, processes of a cluster.
      debug: a role whose calls stop in a debugger, in this process; empty: none.
      overwrite: start anew if ``workdir`` holds a run.
      repair: set damaged checkpoints aside, and resume from the last sound one.
      profile: steps in which the devices are traced (``hjax.run.device_trace``), into ``workdir``.

    Attributes:
      batch: the last step's batch, for inspection.
      history: the metrics of the steps taken by this object.
      restarts: how often lost processes were restarted.
      stop_requested: set it to a signal number (or any true value) and ``run`` saves and returns
        after the step in progress.

    Raises:
      ConfigError: anything wrong with the config or the files it names, before anything is
        written.
    """

    def run(self, steps: int | None = None) -> list[Metrics]:
        """Take steps until ``config.steps`` (or so many more); returns their metrics.

        ``stop_requested`` ends it early, after a checkpoint. In a notebook without a display of the
        caller's, a table and curves are drawn as it goes.
        """
        total = self.config.steps if steps is None else self.step_number + steps
        with self.reporter.in_notebook(total):
            with self._guarded():
                rows = self._run(self.config.steps if steps is None else None, steps or 0)
            self.reporter.end(self.timeline)
        return rows

    def _run(self, last: int | None, steps: int = 0, saves: bool = True) -> list[Metrics]:
        """Take steps up to the ``last``, or ``steps`` more if that is None.

        Args:
          saves: write a checkpoint at the end, and end early where that is requested.
        """
        rows: dict[int, Metrics] = {}
        while True:
            try:
                self.prepare()
                last = self.step_number + steps if last is None else last
                while self._prepared and self.step_number < last:
                    if saves and self.stop_requested:
                        break
                    metrics = self._step()
                    rows[int(metrics["step"])] = metrics
                if saves and self._prepared:
                    self.save()
                    if self.checkpoints is not None:
                        self.checkpoints.wait()
                return list(rows.values())
            except Exception as error:
                self._recover(error)  # to the last checkpoint; the steps after it are redone
                rows = {step: row for step, row in rows.items() if step <= self.step_number}

    def step(self) -> Metrics:
        """Take one step; returns its metrics (the row of metrics.jsonl).

        A lost cluster process is restarted, and the steps since the last checkpoint are redone. It
        raises RunError after a step that was interrupted, or that failed after an update.
        """
        with self._guarded():
            rows = self._run(None, steps=1, saves=False)
            if not rows:
                raise RunError("stopped before the first step")
            return rows[-1]

    def _step(self) -> Metrics:
        self._regrow_rollout()
        step = self.step_number + 1
        before = self.evaluate(step) if step == 1 and self.config.eval.every else {}
        self.timeline.step = step
        if self.trace is not None:
            self.trace.begin(step)
        # Resets the counter: an evaluation's transitions do not count for this step.
        if (actor := self.roles.groups.get("actor")) is not None:
            actor.take_seconds()
        start = self._step_began = time.perf_counter()
        try:
            with self.reporter.phase("step"):
                self.batch, metrics = self._take_step(step)
                self.reporter.check_sampler(metrics, step)
        except RunError:
            self.batch = self.recorder.batch  # empty if it failed before the batch was complete
            self.reporter.keep_batch(self.batch, step)
            raise
        self._step_began, seconds = None, time.perf_counter() - start
        synchronous = self.async_rollout is None
        costs = self.costs.metrics(step, seconds, self.batch, synchronous=synchronous)
        if len(self.history) >= 2 and self.costs.compiled:  # the first two steps always compile
            self.reporter.message(f"step {step} compiled {', '.join(self.costs.compiled)}")
        metrics = {"step": step, **metrics, **costs}
        self.step_number = step
        every = self.config.eval.every
        if before:
            metrics |= before
        elif every and (step % every == 0 or step == self.config.steps):
            metrics |= self.evaluate(step)
        if self.trace is not None and (traced := self.trace.end(step)):
            self.reporter.message(traced)
        if step == 1:
            check_has_metric(self.config.checkpoint.best, [metrics])
        self._report(metrics)
        return metrics

    def seconds_left(self) -> float | None:
        """Seconds until the step in progress ends, by the times of the last three; infinite for the
        first. None between steps, and once weights are updated: then the step is worth its end."""
        began = self._step_began
        if began is None or self.algorithm.logged:
            return None
        times = [row["time/step"] for row in self.history[-3:]]
        if not times:
            return math.inf
        return max(statistics.median(times) - (time.perf_counter() - began), 0.0)

    def _take_step(self, step: int) -> tuple[dict[str, Any], Metrics]:
        """Collect and learn, in sequence or with an asynchronous rollout."""
        ahead = None
        if self.config.rollout.max_staleness:
            ahead = self._start_async_rollout()
            learn = functools.partial(self.algorithm.learn, ahead.next(step - 1))
            take = functools.partial(self.recorder.record, learn, step)
        else:
            take = functools.partial(self.recorder.run, self._choose(), step)
        try:
            batch, metrics = take()
        except Exception:
            policy = self.policy
            changed = policy is not None and policy.changed
            self._weights_updated = changed or bool(self.algorithm.logged)
            raise
        self._weights_updated = True
        reference = self.config.reference
        if reference.sync_every and step % reference.sync_every == 0:
            self.roles.sync_reference(reference.sync_share)
        return batch, metrics | ({} if ahead is None else ahead.metrics(batch))

    def _start_async_rollout(self) -> AsyncRollout:
        if self.async_rollout is None:
            policy, schedule = self.policy, StalenessSchedule.from_config(self.config)
            assert policy is not None  # `check_async_rollout` requires a separate rollout
            self.async_rollout = AsyncRollout(
                self.algorithm,
                policy,
                self.prompts,
                order=self._order,
                schedule=schedule,
                version=self.step_number,
                state=self._async_state,
            )
        return self.async_rollout

    def evaluate(self, step: int | None = None) -> Metrics:
        """Evaluate on held-out data: greedy responses to prompts give ``eval/reward`` and, with a
        verifier of right and wrong, ``eval/accuracy``; of held-out examples of what the algorithm
        learns from (demonstrations, pairs, ...) loss or predictions. Empty without held-out
        rows. The algorithm's ``evaluate`` adds its own. With ``actor.ema_decay`` all this of the
        weights' moving average."""
        self.prepare()
        number = step or self.step_number
        held_out = self.inputs.held_out
        answers = held_out is not None and self.roles.table["actor"].generates
        with self.roles.averaged_weights():
            metrics = self._evaluate_responses(number) if answers else {}
            metrics |= self._evaluate_examples(number)
            own = self.algorithm.evaluate(held_out)
        return metrics | {f"eval/{name}": float(value) for name, value in own.items()}

    def _evaluate_examples(self, step: int) -> Metrics:
        if not self.inputs.held_out_examples.examples:
            return {}
        with self.reporter.phase("evaluate"):
            metrics, rows = evaluate_examples(self.config, self.algorithm, self.inputs, step)
        if self.workdir is not None:
            self.workdir.append(CALIBRATION, rows)
        return metrics

    def _evaluate_responses(self, step: int) -> Metrics:
        while True:
            try:
                if self.async_rollout is not None:
                    self.async_rollout.drain(self.step_number)
                with self.reporter.phase("evaluate"):
                    metrics, shown = evaluate(
                        self.config, self.inputs, self.roles, self.algorithm, step
                    )
                break
            except Exception:
                # Otherwise the step before this evaluation would have to be redone.
                if not self._only_rollout_lost(lost := self.backend.lost_executors()):
                    raise
                self._count_restart(lost[0].lost)
                self._restart_rollout()
        self.reporter.samples(shown, step, "eval", 1)
        return metrics

    def export(self, directory: StrPath, adapter: bool = False) -> Path:
        """Write the current actor, with ``actor.ema_decay`` its moving average, and its tokenizer
        as a Hugging Face directory.

        Args:
          directory: new or empty.
          adapter: write only the LoRA adapters, as a PEFT directory; otherwise they are merged into
            the weights.

        Raises:
          ConfigError: the directory is not empty, or the run trains no adapters.
        """
        check_output(directory)
        if adapter and not self.config.actor.lora.rank:
            raise ConfigError(
                "export(adapter=True): this run trains all weights; set actor.lora.rank, or leave "
                "adapter out"
            )
        if not self.algorithm_class.sequences:
            raise ConfigError(
                f"export: {self.config.algorithm.name} trains no language model; "
                "hjax.load_worker(workdir, role) reads its networks"
            )
        self.prepare()
        with self.roles.averaged_weights():
            return export_actor(directory, self.config, self.inputs, self.roles, adapter)

    def _report(self, metrics: Metrics) -> None:
        step, reporter = self.step_number, self.reporter
        self.history.append(metrics)
        reporter.row(metrics)
        self._weights_updated = False
        generates = self.algorithm_class.generates
        reporter.step(metrics, self.batch, self.algorithm.samples if generates else 0)
        if self.recorder.skipped_this_step:
            reporter.keep_batch(self.batch, step)
        every = self.config.checkpoint.every
        if every and step % every == 0:
            self.save()
        elif self.checkpoints is not None:
            self.checkpoints.check()

    def plan_record(self) -> dict[str, Any]:
        """The run's placement, see ``hjax.run.run_metadata.plan_record``."""
        return plan_record(self.roles)
