"""The trainer: builds a run from its config, takes steps, evaluates, saves and resumes."""

import functools
import os
import time
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, RunError
from hjax.files import CALIBRATION
from hjax.models.export import check_output
from hjax.run.async_rollout import AsyncRollout, StalenessSchedule
from hjax.run.evaluation import evaluate, evaluate_predictions
from hjax.run.examples import Demonstrations
from hjax.run.recovery import RecoveringRun
from hjax.run.run_metadata import export_actor, plan_record

Metrics = dict[str, float]


class Trainer(RecoveringRun):
    """A run: the same object that the command builds.

    Args:
      config: what to do, see docs/config.md.
      workdir: where the run is written and resumed from; None writes nothing.
      display: shows progress; None shows nothing.
      plan: where the roles stand (``hjax.plan(config)``); None: as ``config.placement`` says,
        which may not be ``auto`` then.
      executor: makes what carries out a pool's calls; by default threads of this process, or
        where ``config.cluster`` asks for them processes of a cluster.
      debug: a role whose calls stop in a debugger, in this process; empty: none.
      overwrite: start anew where ``workdir`` has a run.
      repair: set checkpoints that are damaged aside, and go on from the last sound one.

    Attributes:
      batch: the last step's batch, to look inside.
      history: the metrics of the steps taken by this object.
      restarts: times that lost processes were replaced.
      stop_requested: set it to a signal number (or any true value) and ``run`` saves and returns
        after the step in progress.

    Raises:
      ConfigError: anything wrong with the config or the files it names, before anything is
        written.
    """

    # The run

    def run(self, steps: int | None = None) -> list[Metrics]:
        """Take steps until ``config.steps`` (or so many more); returns their metrics.

        A set ``stop_requested`` ends it early, after a checkpoint. In a notebook, without a display
        of the caller's, a table and curves are drawn as it goes.
        """
        total = self.config.steps if steps is None else self.step_number + steps
        with self.reporter.in_notebook(total):
            with self._unbroken():
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
                self._recover(error)  # to a step that is saved, from which the rest is taken again
                rows = {step: row for step, row in rows.items() if step <= self.step_number}

    def step(self) -> Metrics:
        """Take one step; returns its metrics (the row of metrics.jsonl).

        Where a process of a cluster is lost it is replaced, and what came after the last checkpoint
        is done again. After one that was interrupted, or failed with weights updated, it refuses.
        """
        with self._unbroken():
            rows = self._run(None, steps=1, saves=False)
            if not rows:
                raise RunError("stopped before the first step")
            return rows[-1]

    def _step(self) -> Metrics:
        self._grow()
        step = self.step_number + 1
        before = self.evaluate(step) if step == 1 and self.config.eval.every else {}
        self.timeline.step = step
        # An evaluation's transitions are not this step's.
        self.roles.groups["actor"].take_seconds()
        start = time.perf_counter()
        try:
            with self.reporter.phase("step"):
                self.batch, metrics = self._take_step(step)
                self.reporter.sampled(metrics, step)
        except RunError:
            self.batch = self.recorder.batch  # empty if the failure came before it was whole
            self.reporter.keep_batch(self.batch, step)
            raise
        seconds = time.perf_counter() - start
        costs = self.costs.metrics(step, seconds, self.batch, waits=self.ahead is None)
        if len(self.history) >= 2 and self.costs.compiled:  # the first two of a start compile
            self.reporter.message(f"step {step} compiled {', '.join(self.costs.compiled)}")
        metrics = {"step": step, **metrics, **costs}
        self.step_number = step
        every = self.config.eval.every
        if before:
            metrics |= before
        elif every and (step % every == 0 or step == self.config.steps):
            metrics |= self.evaluate(step)
        self._report(metrics)
        return metrics

    def _take_step(self, step: int) -> tuple[dict[str, Any], Metrics]:
        """Collect and learn, one after the other or the one ahead of the other."""
        ahead = None
        if self.config.rollout.max_staleness:
            ahead = self._started_ahead()
            learn = functools.partial(self.algorithm.learn, ahead.next(step - 1))
            take = functools.partial(self.recorder.record, learn, step)
        else:
            prompts = self._draw(self.prompts.next(), step)
            take = functools.partial(self.recorder.run, prompts, step)
        try:
            batch, metrics = take()
        except Exception:
            policy = self.policy
            changed = policy is not None and policy.changed
            self._updated = changed or bool(self.algorithm.logged)
            raise
        self._updated = True
        return batch, metrics | ({} if ahead is None else ahead.metrics(batch))

    def _started_ahead(self) -> AsyncRollout:
        if self.ahead is None:
            policy, schedule = self.policy, StalenessSchedule.of(self.config)
            assert policy is not None  # or the config would have been refused
            self.ahead = AsyncRollout(
                self.algorithm,
                policy,
                self.prompts,
                draw=self._draw,
                schedule=schedule,
                version=self.step_number,
                state=self._ahead_state,
            )
        return self.ahead

    def evaluate(self, step: int | None = None) -> Metrics:
        """Greedy answers to the held-out prompts: ``eval/reward`` and, with a verifier of right
        and wrong, ``eval/accuracy``; what is said of held-out pairs or steps, where these are
        learned from; empty without held-out rows."""
        self.prepare()
        number = step or self.step_number
        answers = self.inputs.held_out is not None and self.roles.table["actor"].generates
        return (self._answer(number) if answers else {}) | self._predict(number)

    def _predict(self, step: int) -> Metrics:
        if not self.inputs.held_out_examples:
            return {}
        config, inputs = self.config, self.inputs
        examples = Demonstrations(
            inputs.held_out_examples,
            config.warm_start.batch,
            prompt_length=inputs.prompt_length,
            response_length=config.rollout.max_response_length,
            seed=0,
            marks=inputs.held_out_marks,
        )
        with self.reporter.phase("evaluate"):
            metrics, rows = evaluate_predictions(config, self.algorithm, examples, step)
        if self.workdir is not None:
            self.workdir.append(CALIBRATION, rows)
        return metrics

    def _answer(self, step: int) -> Metrics:
        while True:
            try:
                if self.ahead is not None:
                    self.ahead.settle(self.step_number)
                with self.reporter.phase("evaluate"):
                    metrics, shown = evaluate(self.config, self.inputs, self.roles)
                break
            except Exception:
                # Else the step before it would have to be taken again.
                if not self._only_generates(lost := self.machines.lost()):
                    raise
                self._count(lost[0].lost)
                self._restart_rollout()
        self.reporter.samples(shown, step, "eval", 1)
        return metrics

    def export(self, directory: str | os.PathLike, adapter: bool = False) -> Path:
        """Write the actor as it is now as a Hugging Face directory, its tokenizer beside it.

        Args:
          directory: new or empty.
          adapter: write the adapters that it trains alone, as a PEFT directory; else they are added
            to the weights.

        Raises:
          ConfigError: it is not, or the run trains no adapters.
        """
        check_output(directory)
        if adapter and not self.config.actor.lora.rank:
            raise ConfigError(
                "export(adapter=True): this run trains all weights; set actor.lora.rank, or leave "
                "adapter out"
            )
        self.prepare()
        return export_actor(directory, self.config, self.inputs, self.roles, adapter)

    def _report(self, metrics: Metrics) -> None:
        step, reporter = self.step_number, self.reporter
        self.history.append(metrics)
        reporter.row(metrics)
        self._updated = False
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
        """Where the roles stand, see ``hjax.run.run_metadata.plan_record``."""
        return plan_record(self.roles)
