"""The trainer: builds a run from its config, takes steps, evaluates, saves and resumes."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.controller import Future, ThreadExecutor, Timeline, join
from hjax.controller.executors import ExecutorFactory
from hjax.errors import ConfigError, RunError
from hjax.files import CALIBRATION, HISTOGRAMS, METRICS, SAMPLES, STARTS, WARM_START
from hjax.machine import device_memory
from hjax.models.bases import Base
from hjax.models.checkpoint import Checkpoints, damaged
from hjax.models.export import check_output, export_adapters, export_weights
from hjax.models.parameters import decoder_network
from hjax.models.weights import base_of, base_path, model_directory
from hjax.progress import shown
from hjax.run.ahead import Ahead, Schedule
from hjax.run.dataflow import absent_roles
from hjax.run.evaluation import evaluate
from hjax.run.fitting import check_offloads
from hjax.run.histograms import histogram_row
from hjax.run.inputs import Demonstrations, load_inputs, prompt_batch, prompt_order
from hjax.run.loggers import make_loggers
from hjax.run.machines import Machines, OnCluster, ThisProcess
from hjax.run.metrics import StepRecorder
from hjax.run.origin import start_record
from hjax.run.placement import Plan, set_name
from hjax.run.predictions import evaluate_predictions
from hjax.run.records import (
    keep_for_inspection,
    offloaded_bytes,
    plan_record,
    record_bases,
    write_model_files,
)
from hjax.run.recovery import Recovering
from hjax.run.reward_check import first_calls
from hjax.run.roles import describe_roles, is_float32, placed
from hjax.run.room import check_room
from hjax.run.rows import sample_row, spread_rows
from hjax.run.throughput import Throughput, token_seconds
from hjax.run.warnings import SamplerWatch, TruncationWarning
from hjax.run.watches import Watches, held_out_remark, idle_remark
from hjax.run.workdir import Workdir
from hjax.settings.checking import check_config, on_cluster

Metrics = dict[str, float]
KEPT_SAMPLES = 8  # rows of each training batch and evaluation that are kept for the report


class Trainer(Recovering):
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

    def __init__(
        self,
        config: ConfigDict,
        workdir: str | Path | None = None,
        display: Any = None,
        plan: Plan | None = None,
        executor: ExecutorFactory | None = None,
        debug: str = "",
        overwrite: bool = False,
        repair: bool = False,
    ):
        self.config = check_config(config)
        if workdir is not None:
            self.config = Workdir(workdir, overwrite=overwrite).kept(self.config)
        self.display = display
        self._said = ""  # last
        self._unfit = ""
        self._repair = repair
        self.algorithm_class = get_algorithm(self.config.algorithm.name)
        self.inputs = load_inputs(self.config, self.algorithm_class.source)
        config = self.config
        self.machines: Machines
        if on_cluster(config) and executor is None:
            self.machines = OnCluster(config, workdir, self._message)
        else:
            self.machines = ThisProcess(config, executor or ThreadExecutor, self._compiling)
        with contextlib.ExitStack() as undo:
            undo.callback(self.machines.close)
            devices, platform = self.machines.devices, self.machines.platform
            if plan is None:
                plan = placed(config, self.algorithm_class, len(devices))
            recorded: dict[str, Base] = {}
            if workdir is not None:
                recorded = Workdir(workdir, overwrite=overwrite).bases(config)
            self.roles = describe_roles(
                config,
                self.algorithm_class,
                self.inputs,
                plan,
                platform,
                memory=min(map(device_memory, devices)),
                bases=recorded,
            )
            if workdir is not None:  # else there may be nothing to run but a description
                self._check_room()
            self.machines.place(plan)
            self._start(devices, self._executors(debug))
            undo.callback(self.roles.close)
            check_offloads(config, self.algorithm_class, devices, plan)
            self._set_up(workdir, overwrite)
            undo.pop_all()

    def _check_room(self) -> None:
        of = self.config, self.algorithm_class, self.roles, self.inputs.prompt_length
        check_room(*of, self.machines.devices)

    def _executors(self, debug: str) -> ExecutorFactory:
        """What makes the pools' executors; that of a role to debug is in this process."""
        if not debug:
            return self.machines.executor
        table, plan = self.roles.table, self.roles.plan
        if debug not in table:
            raise ConfigError(f"debug={debug}: no role of this run, which has {', '.join(table)}")
        names = {set_name(plan, i): members for i, members in enumerate(plan.placement)}
        on_host = [role for role in table if role not in self.roles.layouts]
        from hjax.controller.executors import debugging

        return debugging(debug, self.machines.executor, lambda name: names.get(name, on_host))

    def _set_up(self, workdir: str | Path | None, overwrite: bool) -> None:
        config = self.config
        self._offloaded: int | None = None
        devices, platform = self.machines.devices, self.machines.platform
        float32 = is_float32(config, platform)
        of = config, self.algorithm_class, self.roles, devices, float32
        self._throughput = Throughput(*of)
        self.timeline: Timeline = next(iter(self.roles.pools.values())).timeline
        lengths = self.inputs.prompt_length, config.rollout.max_response_length
        self.prompts = prompt_order(config, self.inputs.train)
        # What collects ahead of learning, once steps are taken.
        self.ahead: Ahead | None = None
        self._ahead_state: dict[str, int] | None = None
        self._demonstrations = None
        self._warm_start_data = None
        if self.inputs.demonstrations:
            batch = shown_batch = config.warm_start.batch
            if self.algorithm_class.generates and self.algorithm_class.source != "prompts":
                batch = config.rollout.prompts  # each of which is answered
            examples, labels = self.inputs.demonstrations, self.inputs.labels
            seed, marks = config.seed + 1, self.inputs.marks
            self._demonstrations = Demonstrations(examples, batch, *lengths, seed, marks, labels)
            shown = [example[:2] for example in examples]  # of a pair the chosen one
            if labels is not None:  # of verdicts the right ones
                shown = [example for example, right in zip(shown, labels, strict=True) if right]
            if shown:
                self._warm_start_data = Demonstrations(
                    shown, shown_batch, *lengths, config.seed + 2
                )
        if config.warm_start.steps and not config.actor.path and self._warm_start_data is None:
            raise ConfigError(
                f"warm_start.steps={config.warm_start.steps} needs demonstrations; this data has "
                "none: set it to 0, or give the data a `response` column"
            )
        groups = self.roles.groups
        groups = groups | {role: groups[by] for role, by in self.roles.served.items()}
        self.algorithm = self.algorithm_class(
            config.algorithm,
            {**groups, **absent_roles(self.algorithm_class, groups)},
            seed=config.seed,
            samples=config.rollout.samples if self.algorithm_class.generates else 1,
            demonstrations=self._demonstrations,
            max_response_length=config.rollout.max_response_length,
            more_prompts=None if config.rollout.max_staleness else self._more_prompts,
        )
        self.recorder = StepRecorder(self.algorithm, config.algorithm.max_skipped)
        task = self.inputs.task
        self._sampler = SamplerWatch(config)
        generates = self.algorithm_class.generates
        reads = token_seconds(self.roles, devices, float32) if generates else 0.0
        self._watches = Watches(config, reads)
        self._truncation = TruncationWarning(lengths[1], task.response_length if task else None)
        self.step_number = 0
        self.batch: dict[str, Any] = {}
        self.history: list[Metrics] = []
        self.stop_requested: int = 0
        self._prepared = False
        self._updated = False  # weights, by a step whose row is not written
        self._at_start = copy.deepcopy(self._controller_state())
        self.workdir: Workdir | None = None
        self.checkpoints: Checkpoints | None = None
        if workdir is not None:
            self.workdir = Workdir(workdir, make_loggers(config), overwrite)
            self.workdir.open(self.config)

    # The run

    def run(self, steps: int | None = None) -> list[Metrics]:
        """Take steps until ``config.steps`` (or so many more); returns their metrics.

        A set ``stop_requested`` ends it early, after a checkpoint. In a notebook, without a display
        of the caller's, a table and curves are drawn as it goes.
        """
        own = self._own_display(self.config.steps if steps is None else self.step_number + steps)
        with self._unbroken():
            rows = self._run(steps)
        self._write_report()
        if own is not None:
            own.close()
            self.display = None
        return rows

    def _run(self, steps: int | None) -> list[Metrics]:
        last = self.config.steps if steps is None else None
        rows: dict[int, Metrics] = {}
        saved = False
        while not saved:
            try:
                self.prepare()
                if last is None:
                    last = self.step_number + (steps or 0)
                while self._prepared and self.step_number < last and not self.stop_requested:
                    metrics = self._step()
                    rows[int(metrics["step"])] = metrics
                self._finish_saving()
                saved = True
            except Exception as error:
                self._recover(error)  # to a step that is saved, from which the rest is taken again
                rows = {step: row for step, row in rows.items() if step <= self.step_number}
        return list(rows.values())

    def _own_display(self, total: int) -> Any:
        """A notebook's, where this is one and nobody gave another; else None."""
        if self.display is not None or not self.config.display.enabled:
            return None
        from hjax.show.live import Display
        from hjax.show.notebook import in_notebook

        if not in_notebook():
            return None
        self.display = Display(self.config, total)
        where = "" if self.workdir is None else f"  {self.workdir.path}"
        self.display.start(f"{self.config.algorithm.name}{where}")
        return self.display

    def _finish_saving(self) -> None:
        if not self._prepared:
            return
        self.save()
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def step(self) -> Metrics:
        """Take one step; returns its metrics (the row of metrics.jsonl).

        Where a process of a cluster is lost it is replaced, and what came after the last checkpoint
        is done again. After one that was interrupted, or failed with weights updated, it refuses.
        """
        with self._unbroken():
            return self._next_step()

    def _next_step(self) -> Metrics:
        step = None
        while True:
            try:
                self.prepare()
                if not self._prepared:
                    raise RunError("stopped before the first step")
                step = self.step_number + 1 if step is None else step
                while True:
                    metrics = self._step()
                    if self.step_number == step:
                        return metrics
            except Exception as error:
                self._recover(error)

    def _step(self) -> Metrics:
        self._grow()
        step = self.step_number + 1
        before = self.evaluate(step) if step == 1 and self.config.eval.every else {}
        self.timeline.step = step
        # An evaluation's transitions are not this step's.
        self.roles.groups["actor"].take_seconds()
        start = time.perf_counter()
        try:
            with self._phase("step"):
                self.batch, metrics = self._take_step(step)
                if warning := self._sampler.message(metrics):
                    self._message(f"step {step}: {warning}")
        except RunError:
            self.batch = self.recorder.batch  # empty if the failure came before it was whole
            self._keep_batch(step)
            raise
        seconds = time.perf_counter() - start
        metrics = {"step": step, **metrics, **self._machine_metrics(step, seconds)}
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

    def _draw(self, indices: np.ndarray, number: int) -> dict[str, Any]:
        """The prompt batch of a number, from 1, with which its tokens are drawn."""
        return prompt_batch(self.inputs.train.rows(indices), self.inputs.prompt_length, number)

    def _more_prompts(self, first: int) -> dict[str, Any]:
        """Further prompts of the step in progress, after so many sequences."""
        return self._draw(self.prompts.next(), self.step_number + 1) | {"first": first}

    def _started_ahead(self) -> Ahead:
        if self.ahead is None:
            policy, schedule = self.policy, Schedule.of(self.config)
            assert policy is not None  # or the config would have been refused
            arguments = self.algorithm, policy, self.prompts, self._draw, schedule
            self.ahead = Ahead(*arguments, self.step_number, self._ahead_state)
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
        lengths = inputs.prompt_length, config.rollout.max_response_length
        of = inputs.held_out_examples, config.warm_start.batch, *lengths, 0, inputs.held_out_marks
        with self._phase("evaluate"):
            metrics, rows = evaluate_predictions(config, self.algorithm, Demonstrations(*of), step)
        if self.workdir is not None:
            self.workdir.append(CALIBRATION, rows)
        return metrics

    def _answer(self, step: int) -> Metrics:
        while True:
            try:
                if self.ahead is not None:
                    self.ahead.settle(self.step_number)
                with self._phase("evaluate"):
                    metrics, shown = evaluate(self.config, self.inputs, self.roles)
                break
            except Exception:
                # Else the step before it would have to be taken again.
                if not self._only_generates(lost := self.machines.lost()):
                    raise
                self._count(lost[0].lost)
                self._restart_rollout()
        self._keep_samples(shown, step, "eval", KEPT_SAMPLES)
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the last step, if a workdir is kept and it is not there yet."""
        if self._unfit:
            raise RunError(self._unfit)
        if self.checkpoints is None or self.checkpoints.latest() == self.step_number:
            return
        with self._phase("checkpoint"):
            self.checkpoints.save(self.step_number, self._save_states, self._controller_state())

    def _save_states(self, folder: Path) -> list[Future]:
        return [
            group.save_state(str(folder))
            for role, group in self.roles.groups.items()
            if group.has("save_state") and not self.roles.table[role].apart  # it has none
        ]

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
        actor, path = self.roles.groups["actor"], self.config.actor.path
        source = model_directory(path) if path else None
        beside = source, self.inputs.tokenizer
        if not adapter:
            params = actor.weights().result()
            return export_weights(directory, self.inputs.model, params, *beside)
        if self.roles.table["actor"].scalar:
            raise ConfigError(
                "export(adapter=True): adapters of a model with a scalar head are exported with "
                "its weights; leave adapter out"
            )
        network = decoder_network(self.roles.models["actor"])
        if path:
            began = self.roles.bases.get(path)
            step = None if began is None else began.check(path)
            base, own = base_of(base_path(path), step)
        else:
            base, own = "", actor.base_weights().result()
        learned = actor.learned_weights().result()
        return export_adapters(directory, network, learned, base, own, *beside)

    def close(self) -> None:
        """Finish writing and stop the pools. The trainer cannot be used after."""
        with contextlib.ExitStack() as ends:  # all of them, whichever fails
            ends.callback(self.machines.close)
            ends.callback(self.roles.close)
            ends.callback(self._stop_ahead)
            if self.workdir is not None:
                ends.callback(self.workdir.close)
            if self.checkpoints is not None:
                ends.callback(self.checkpoints.close)
                self.checkpoints = None

    # Starting

    def prepare(self) -> None:
        """Load or create the weights, resume or warm-start; done by the first step otherwise."""
        if self._prepared:
            return
        if self.workdir is None:
            self._check_room()
        elif self.checkpoints is None:
            self.checkpoints = Checkpoints(self.workdir.checkpoints, self.config.checkpoint.keep)
            scalar = self.roles.table["actor"].scalar
            with self.workdir.writing("model"):
                write_model_files(self.workdir.path, self.inputs, scalar)
            self.workdir.write_json("plan.json", self.plan_record())
            for remark in record_bases(self.workdir, self.roles.bases):
                self._message(remark)
        for remark in (*self.inputs.remarks, *self._first_remarks()):
            self._message(remark)
        for role, chosen in self.roles.remat.items():
            if chosen.estimated_bytes:
                self._message(f"{role}: model.remat=auto is {chosen.why}")
        if self.roles.slots is not None and self.roles.slots.cache_bytes:
            self._message(f"rollout.slots=-1: {self.roles.slots.why}")
        if (latest := self._sound_checkpoint()) is not None:
            with self._phase("restore"):
                self._restore(latest)
            self._tell_gaps()
            if latest and not self.restarts:
                folder = self.checkpoints.folder(latest) if self.checkpoints else ""
                self._message(f"going on after step {latest}, from {folder}")
        else:
            try:
                if not self.restarts:
                    self._try_rewards()
                with self._phase("initialise"), shown(self._loading):
                    self._initialize()
            except ConfigError as error:  # nothing stays of a run that cannot begin
                if self.workdir is not None:
                    self.workdir.forget()
                self._unfit = str(error)
                raise
        if self.workdir is not None and not self.restarts:
            start = start_record(self.machines.devices, self.step_number)
            self.workdir.append(STARTS, [start])
        if self._offloaded is None:
            self._offloaded = offloaded_bytes(self.roles)
        self._prepared = not (self.stop_requested and latest is None)

    def _first_remarks(self) -> list[str]:
        """What is probably not meant, as far as it is known before the first step."""
        allocation, held_out = self.roles.plan.allocation, self.inputs.held_out
        devices = len(self.machines.devices)
        shares = sum(allocation), self.config.placement, allocation
        remarks = [idle_remark(devices, *shares)]
        if self.config.eval.every:
            remarks.append(held_out_remark(None if held_out is None else len(held_out)))
        return [remark for remark in remarks if remark]

    def _try_rewards(self) -> None:
        """Call functions of the user's once, so that one that fails does so before the training.

        On a cluster they run elsewhere, with files and modules that are not here.
        """
        own = [role for role in ("reward", "cost") if self.config[role].function]
        if self.algorithm_class.generates and not on_cluster(self.config):
            judges = self.roles.judges
            chosen = {role: judges[role] for role in own if role in judges}
            for call in first_calls(self.config, self.inputs, chosen):
                call.check(self.algorithm_class, self.config)

    def _initialize(self) -> None:
        if self.restarts:
            self._restore_controller(self._at_start)
            if self.policy is not None:
                self.policy.reset(0)
        groups, starts_from = self.roles.groups, self.roles.starts_from
        for role, group in groups.items():
            if role not in starts_from and group.has("initialize"):
                group.initialize().result()
        if self.workdir is not None:
            self.workdir.keep()
            self.workdir.truncate(WARM_START, 0)
            self.workdir.truncate_after(0)
        warmed = self.config.warm_start.steps and not self.config.actor.path
        # What only imitates needs none before.
        imitates = not self.algorithm_class.generates
        warmed = warmed and not (imitates and self.algorithm_class.source == "demonstrations")
        if warmed:
            self._warm_start()
        for role, source in starts_from.items():
            landing = self.roles.landing(role, source)
            weights = groups[source].weights(*(() if landing is None else (landing,)))
            groups[role].take_weights(weights).result()
        saves = warmed and self.config.checkpoint.every
        if saves and not self.stop_requested:
            self._prepared = True
            self.save()

    def _warm_start(self) -> None:
        assert self._warm_start_data is not None
        actor, total = self.roles.groups["actor"], self.config.warm_start.steps
        self._warm_start_data.sampler.position = 0
        with self._phase("warm start"):
            actor.begin("warm_start").result()
            pending = []
            for step in range(1, total + 1):
                if self.stop_requested:
                    return
                pending.append((step, actor.update_actor(self._warm_start_data())))
                if len(pending) > 8 or step == total:
                    self._report_warm_start(pending, total)
                    pending = []
            actor.begin("main").result()

    def _report_warm_start(self, pending: list[tuple[int, Any]], total: int) -> None:
        rows = [
            {"step": step, "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"])}
            for step, metrics in ((step, join(future)) for step, future in pending)
        ]
        if self.workdir is not None:
            self.workdir.append(WARM_START, rows)
        if self.display is not None:
            self.display.warm_start(rows[-1]["step"], total, rows[-1]["loss"])

    def _restore(self, step: int) -> None:
        assert self.checkpoints is not None and self.workdir is not None
        self._stop_ahead()
        controller, folder = self.checkpoints.controller(step), self.checkpoints.folder(step)
        for group in self.roles.groups.values():
            if group.has("load_state"):
                group.load_state(str(folder)).result()
        try:
            self._restore_controller(controller)
        except ConfigError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise damaged(folder, error) from error  # JSON, but not what a run writes
        self._ahead_state = controller.get("ahead")
        if self.policy is not None:
            self.policy.reset(step)
        self.workdir.truncate_after(step)

    def _restore_controller(self, state: Mapping[str, Any]) -> None:
        self.algorithm.restore(state["algorithm"])
        self.recorder.restore(state["updates"])
        self.prompts.restore(state["prompts"])
        if self._demonstrations is not None:
            self._demonstrations.sampler.restore(state["demonstrations"])
        self.step_number = state["step"]
        self.history = [row for row in self.history if row["step"] <= self.step_number]

    def _controller_state(self) -> dict[str, Any]:
        state = {
            "step": self.step_number,
            "algorithm": self.algorithm.state(),
            "updates": self.recorder.state(),
            "prompts": self.prompts.state(),
        }
        if self._ahead_state:
            state["ahead"] = self._ahead_state
        if self.ahead is not None:
            state["prompts"], state["ahead"] = self.ahead.state()
        if self._demonstrations is not None:
            state["demonstrations"] = self._demonstrations.sampler.state()
        return state

    # Reporting

    def _machine_metrics(self, step: int, seconds: float) -> Metrics:
        phases = self.timeline.phase_seconds(step)
        # Generation that runs ahead is not waited for to be asked.
        spent = {} if self.ahead else self.roles.groups["actor"].take_seconds().result()
        machine = self.machines.read()
        names = machine["names"]
        if len(self.history) >= 2 and names:  # the first two of a start are those that compile
            self._message(f"step {step} compiled {', '.join(sorted(set(names)))}")
        metrics = {"time/step": seconds}
        if not self.ahead:
            metrics["time/transition"] = spent.get("transition", 0.0)
        metrics |= {f"time/{phase}": taken for phase, taken in phases.items()}
        if self.algorithm_class.generates and "response_mask" in self.batch:
            tokens = int(self.batch["response_mask"].sum() + self.batch["prompt_mask"].sum())
            metrics["throughput/tokens_per_second"] = tokens / seconds
            metrics |= self._throughput.metrics(self.batch, seconds)
        metrics["memory/peak_bytes"] = machine["peak_bytes"]
        if self._offloaded:
            metrics["memory/offloaded_bytes"] = self._offloaded
        metrics["compile/count"] = machine["compiles"]
        return metrics

    def _report(self, metrics: Metrics) -> None:
        step = self.step_number
        self.history.append(metrics)
        if self.workdir is not None:
            self.workdir.append(METRICS, [metrics])
        self._updated = False
        if self.display is not None:
            self.display.step(metrics)
        if warning := self._truncation.message(metrics):
            self._message(warning)
        for warning in self._watches.messages(metrics, self.batch):
            self._message(warning)
        self._keep_samples(self.batch, step, "train", KEPT_SAMPLES)
        if self.workdir is not None and self.algorithm_class.generates:
            self.workdir.append(HISTOGRAMS, [histogram_row(self.batch, step)])
        if self.recorder.skipped_this_step:
            self._keep_batch(step)
        every = self.config.checkpoint.every
        if every and step % every == 0:
            self.save()
        elif self.checkpoints is not None:
            self.checkpoints.check()

    def _keep_batch(self, step: int) -> None:
        if self.workdir is not None and self.batch:
            with self.workdir.writing("skipped"):
                keep_for_inspection(self.workdir.path, step, self.batch)

    def _keep_samples(self, batch: Mapping[str, Any], step: int, kind: str, count: int) -> None:
        if "responses" not in batch or not self.algorithm_class.generates:
            return
        samples = self.algorithm.samples if kind == "train" else 1
        chosen = spread_rows(len(batch["responses"]), samples, count)
        rows = [sample_row(batch, i, step, kind) for i in chosen]
        if self.workdir is not None:
            self.workdir.append(SAMPLES, rows)
        every = self.config.display.samples_every
        if self.display is not None and (kind == "train" and (step == 1 or step % every == 0)):
            self.display.samples(rows)

    def plan_record(self) -> dict[str, Any]:
        """Where the roles stand, see ``hjax.run.records.plan_record``."""
        return plan_record(self.roles)

    def _write_report(self) -> None:
        if self.workdir is None:
            return
        self.workdir.write_json("timeline.json", self.timeline.chrome_trace())
        if self.config.display.report:
            from hjax.show.report import write_report

            with self.workdir.writing("report.html"):
                write_report(self.workdir.path)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        if self.display is None:
            yield
        else:
            with self.display.phase(name):
                yield

    def _compiling(self, name: str, seconds: float | None) -> None:
        # A display of a user's own need not show these.
        if show := getattr(self.display, "compiling", None):
            show(name, seconds)

    def _loading(self, what: str, done: int, total: int) -> None:
        if show := getattr(self.display, "loading", None):
            show(what, done, total)

    def _message(self, text: str) -> None:
        self._said = text
        if self.display is not None:
            self.display.message(text)
