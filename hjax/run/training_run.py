"""Life cycle of a run: set up from a config, started or resumed, checkpointed, closed."""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.controller import Future, ThreadExecutor
from hjax.controller.executors import ExecutorFactory
from hjax.errors import LOG_FOLLOWS, ConfigError, ProcessLost, RunError
from hjax.files import KERNELS, LEFT_OUT, METRICS, STARTS, WARM_START
from hjax.kernels.verdict import choose_forms, forms_of
from hjax.machine import device_memory
from hjax.models.base_checkpoints import BaseCheckpoint
from hjax.models.checkpoint import Checkpoints, damaged_error
from hjax.progress import progress_listener
from hjax.run.async_rollout import AsyncRollout
from hjax.run.backends import Backend, ClusterBackend, LocalBackend
from hjax.run.best_checkpoint import best_checkpoint_selector, check_has_metric
from hjax.run.config_validation import check_offloads
from hjax.run.dataflow import absent_roles
from hjax.run.device_trace import DeviceTrace
from hjax.run.episode_rollout import EpisodeRollout, environment_of
from hjax.run.examples import make_example_sources
from hjax.run.health_checks import schedule_remarks, setup_warnings
from hjax.run.inputs import make_prompt_sampler, run_inputs
from hjax.run.loggers import make_loggers
from hjax.run.memory_check import MemoryCheck
from hjax.run.metrics import StepRecorder
from hjax.run.placement import Plan, plan_from_config, pool_name
from hjax.run.prompt_order import PromptOrder
from hjax.run.reporter import Reporter
from hjax.run.reward_check import sandbox_remark, try_rewards
from hjax.run.role_groups import describe_roles
from hjax.run.rollout_policy import RolloutPolicy
from hjax.run.run_metadata import (
    plan_record,
    record_bases,
    recorded_forms,
    start_record,
    write_model_files,
)
from hjax.run.throughput import StepCosts
from hjax.run.workdir import Workdir
from hjax.settings.config_checks import check_config, on_cluster

Metrics = dict[str, float]


class TrainingRun:
    """Base of ``hjax.run.trainer.Trainer`` (which documents the arguments): all but the steps.

    Attributes:
      config, inputs, roles, algorithm_class, algorithm: of the run.
      step_number: of the last step.
      async_rollout: the asynchronous rollout, once steps are taken with one; else None.
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
        profile: range | None = None,
    ):
        self.config = check_config(config)
        if workdir is not None:
            self.config = Workdir(workdir, overwrite=overwrite).with_recorded_packing(self.config)
        self.reporter = Reporter(self.config, display)
        self._unusable = ""
        self._repair = repair
        self.trace = self._make_trace(profile, workdir)
        self.algorithm_class = get_algorithm(self.config.algorithm.name)
        self.inputs = run_inputs(self.config, self.algorithm_class)
        config = self.config
        self.backend: Backend
        if on_cluster(config) and executor is None:
            self.backend = ClusterBackend(config, workdir, self.reporter.message)
        else:
            self.backend = LocalBackend(config, executor or ThreadExecutor, self.reporter.compiling)
        with contextlib.ExitStack() as undo:
            undo.callback(self.backend.close)
            devices, platform = self.backend.devices, self.backend.platform
            if plan is None:
                plan = plan_from_config(config, self.algorithm_class, len(devices))
            bases: dict[str, BaseCheckpoint] = {}
            recorded: Any = None
            if workdir is not None:
                earlier = Workdir(workdir, overwrite=overwrite)
                bases, recorded = earlier.recorded_bases(config), recorded_forms(earlier, config)
            # Chosen once, here; workers on any host get them with their build message.
            self.forms = choose_forms(platform, self.backend.device_kind, recorded)
            self.roles = describe_roles(
                config,
                self.algorithm_class,
                self.inputs,
                plan,
                platform,
                memory=min(map(device_memory, devices)),
                bases=bases,
                forms=self.forms.forms,
            )
            played = environment_of(config, self.inputs.task)
            self._sandbox_remark = sandbox_remark(config, self.roles.reward_functions, played)
            if workdir is not None:  # without one it may be only a dry run
                self._check_memory()
            self.backend.place(plan)
            self._start(devices, self._executors(debug))
            undo.callback(self.roles.close)
            check_offloads(config, self.algorithm_class, devices, plan)
            self._set_up(workdir, overwrite)
            undo.pop_all()

    def _make_trace(self, steps: range | None, workdir: str | Path | None) -> DeviceTrace | None:
        if steps is None:
            return None
        if workdir is None or on_cluster(self.config):
            wanted = "a workdir" if workdir is None else "cluster.processes=1, no cluster.address"
            raise ConfigError(f"profile: the devices of this process are traced; it needs {wanted}")
        return DeviceTrace(steps, Path(workdir))

    def _check_memory(self) -> None:
        backend, length = self.backend, self.inputs.prompt_length
        room = MemoryCheck(self.config, self.algorithm_class, self.roles, length, backend.platform)
        room.check(backend.devices)

    def _executors(self, debug: str) -> ExecutorFactory:
        """The executor factory; the pool of a role to debug runs in this process."""
        if not debug:
            return self.backend.executor
        table, plan = self.roles.table, self.roles.plan
        if debug not in table:
            raise ConfigError(f"debug={debug}: no role of this run, which has {', '.join(table)}")
        names = {pool_name(plan, i): members for i, members in enumerate(plan.placement)}
        on_host = [role for role in table if role not in self.roles.layouts]
        from hjax.controller.executors import debugging_executors

        return debugging_executors(
            debug, self.backend.executor, lambda name: names.get(name, on_host)
        )

    def _set_up(self, workdir: str | Path | None, overwrite: bool) -> None:
        config, inputs = self.config, self.inputs
        self.timeline = self.roles.timeline
        self.prompts: Any = make_prompt_sampler(config, inputs)
        self.async_rollout: AsyncRollout | None = None
        self._async_state: dict[str, int] | None = None
        self._example_sources = make_example_sources(config, self.algorithm_class, inputs)
        groups = self.roles.groups
        groups = groups | {role: groups[by] for role, by in self.roles.shared_workers.items()}
        self._environment = self._make_environment()
        self.algorithm = self.algorithm_class(
            config.algorithm,
            {**groups, **absent_roles(self.algorithm_class, groups)},
            seed=config.seed,
            samples=config.rollout.samples if self.algorithm_class.generates else 1,
            demonstrations=self._example_sources.learned,
            max_response_length=config.rollout.max_response_length,
            more_prompts=None if config.rollout.max_staleness else self._choose,
            environment=self._environment,
            tokenizer=inputs.tokenizer,
        )
        self.recorder = StepRecorder(self.algorithm, config.algorithm.max_skipped)
        self.costs = StepCosts(config, self.algorithm_class, self.roles, self.backend)
        longest = inputs.task.response_length if inputs.task else None
        self.reporter.start_health_checks(self.costs.token_seconds, longest)
        self.step_number = 0
        self.batch: dict[str, Any] = {}
        self.history: list[Metrics] = []
        self.stop_requested: int = 0
        self._step_began: float | None = None  # when the step in progress did
        self._prepared = False
        self._weights_updated = False  # whether a step without a row yet has updated weights
        self._initial_state = copy.deepcopy(self._controller_state())
        self.workdir: Workdir | None = None
        self.checkpoints: Checkpoints | None = None
        if workdir is not None:
            self.workdir = Workdir(workdir, make_loggers(config), overwrite)
            self.workdir.open(self.config)
            self.reporter.workdir = self.workdir

    def _make_environment(self) -> EpisodeRollout | None:
        """What plays the run's episodes; None: it has no environment."""
        config, inputs = self.config, self.inputs
        if not self.algorithm_class.generates or not environment_of(config, inputs.task):
            return None
        ahead = config.rollout.max_staleness > 0 and not config.rollout.deterministic
        return EpisodeRollout(
            config, inputs.task, inputs.tokenizer, inputs.prompt_length,
            as_ready=ahead, timeline=self.timeline, watch=self.reporter.sessions,
        )  # fmt: skip

    def _order(self, number: int, version: Callable[[], int], first: int = 0) -> PromptOrder:
        """The prompts still to be drawn, for the batch of this number."""
        return PromptOrder(self.inputs, self.prompts, number, version, first)

    def _choose(self, first: int = 0) -> dict[str, Any]:
        """Prompts for the next step; further ones if it has ``first`` sequences already."""
        number = self.step_number + 1
        if not self.algorithm_class.sequences:
            return {"step": number}
        order = self._order(number, lambda: self.step_number, first)
        return self.algorithm.choose(order, self.prompts.per_step)

    @property
    def display(self) -> Any:
        """Shows progress; None shows nothing."""
        return self.reporter.display

    @display.setter
    def display(self, display: Any) -> None:
        self.reporter.display = display

    @property
    def policy(self) -> RolloutPolicy | None:
        """The actor's handle if a separate rollout generates, else None."""
        actor = self.roles.groups.get("actor")
        return actor if isinstance(actor, RolloutPolicy) else None

    def _start(self, devices: Sequence[Any], executor: ExecutorFactory) -> None:
        """Start the pools; retried if a process is lost while starting."""
        self.restarts = 0
        while True:
            try:
                return self.roles.start(devices, executor)
            except ProcessLost as error:
                self._count_restart(error)

    def _count_restart(self, cause: Exception) -> None:
        """Count and report a restart of lost processes; RunError above ``cluster.max_restarts``."""
        most = self.config.cluster.max_restarts
        if self.restarts >= most:
            raise RunError(
                f"lost processes were replaced {most} times (cluster.max_restarts); now {cause}"
            ) from cause
        self.restarts += 1
        # Leaves out the process's log if that was the last message.
        what = str(cause)
        what = what.partition(LOG_FOLLOWS)[0] if what == self.reporter.last_message else what
        self.reporter.message(f"{what}\nit is replaced ({self.restarts} of at most {most} times)")

    def prepare(self) -> None:
        """Initialise, resume or warm-start the run; the first step does it otherwise."""
        if self._prepared:
            return
        if self.workdir is None:
            self._check_memory()
        elif self.checkpoints is None:
            self.checkpoints = Checkpoints(
                self.workdir.checkpoints,
                self.config.checkpoint.keep,
                best_checkpoint_selector(self.config, self.workdir.path),
            )
            if self.algorithm_class.sequences:
                scalar, start = self.roles.table["actor"].scalar, self.config.actor.path
                with self.workdir.writing("model"):
                    write_model_files(self.workdir.path, self.inputs, scalar, start)
            self.workdir.write_json("plan.json", plan_record(self.roles))
            if forms_of(self.backend.platform):
                self.workdir.write_json(KERNELS, self.forms.record(self.backend.device_kind))
            if self.inputs.left_out:
                self.workdir.write_json(LEFT_OUT, self.inputs.left_out)
            for remark in record_bases(self.workdir, self.roles.base_checkpoints):
                self.reporter.message(remark)
        devices = len(self.backend.devices)
        remarks = setup_warnings(self.config, devices, self.roles, self.inputs.held_out)
        remarks = [self._sandbox_remark, self.forms.remark, *self.inputs.remarks, *remarks]
        for remark in filter(None, remarks):
            self.reporter.message(remark)
        for role, chosen in self.roles.remat.items():
            if chosen.estimated_bytes:
                self.reporter.message(f"{role}: model.remat=auto is {chosen.why}")
        if self.roles.slots is not None and self.roles.slots.cache_bytes:
            self.reporter.message(f"rollout.slots=-1: {self.roles.slots.why}")
        if (latest := self._latest_checkpoint()) is not None:
            with self.reporter.phase("restore"):
                self._restore(latest)
            self._report_missing_rows()
            if latest and not self.restarts:
                folder = self.checkpoints.folder(latest) if self.checkpoints else ""
                self.reporter.message(f"going on after step {latest}, from {folder}")
                earlier = self.workdir.earlier_steps if self.workdir is not None else None
                for remark in schedule_remarks(self.config, self.roles.builds, earlier, latest):
                    self.reporter.message(remark)
        else:
            try:
                if not self.restarts:
                    functions = self.roles.reward_functions
                    try_rewards(self.config, self.algorithm_class, self.inputs, functions)
                with self.reporter.phase("initialise"), progress_listener(self.reporter.loading):
                    self._initialize()
            except (ConfigError, RunError) as error:  # a run that cannot start leaves no files
                if not isinstance(error, ProcessLost):
                    if self.workdir is not None:
                        self.workdir.discard()
                    self._unusable = str(error)
                raise
        if self.workdir is not None and not self.restarts:
            self.workdir.append(STARTS, [start_record(self.backend.devices, self.step_number)])
        self.costs.measure_offload()
        self._prepared = not (self.stop_requested and latest is None)

    def _initialize(self) -> None:
        if self.restarts:
            self._restore_controller(self._initial_state)
            if self.policy is not None:
                self.policy.reset(0)
        groups, starts_from = self.roles.groups, self.roles.starts_from
        for role, group in groups.items():
            if role not in starts_from and group.has("initialize"):
                group.initialize().result()
        if self.workdir is not None:
            self.workdir.mark_started()
            self.workdir.truncate(WARM_START, 0)
            self.workdir.truncate_after(0)
        warmed = self.config.warm_start.steps and not self.config.actor.path
        # Supervised training needs no supervised warm start.
        imitates = not self.algorithm_class.generates
        warmed = warmed and not (imitates and self.algorithm_class.source == "demonstrations")
        if warmed:
            self._warm_start()
        for role, source in starts_from.items():
            landing = self.roles.landing(role, source)
            weights = groups[source].weights(landing)
            groups[role].take_weights(weights).result()
        if self.config.reference.sync_every and self.roles.shared_workers:
            self.roles.sync_reference(1.0)  # the adapters as they are now
        saves = warmed and self.config.checkpoint.every
        if saves and not self.stop_requested:
            self._prepared = True
            self.save()

    def _warm_start(self) -> None:
        shown, total = self._example_sources.warm_start, self.config.warm_start.steps
        assert shown is not None
        actor = self.roles.groups["actor"]
        shown.sampler.restart()
        with self.reporter.phase("warm start"):
            actor.begin_stage("warm_start").result()
            pending: list[tuple[int, Any]] = []
            for step in range(1, total + 1):
                if self.stop_requested:
                    return
                pending.append((step, actor.update_actor(shown())))
                if len(pending) > 8 or step == total:
                    self.reporter.warm_start(pending, total)
                    pending = []
            actor.begin_stage("main").result()

    def _restore(self, step: int) -> None:
        assert self.checkpoints is not None and self.workdir is not None
        self._stop_async_rollout()
        controller, folder = self.checkpoints.controller(step), self.checkpoints.folder(step)
        for group in self.roles.groups.values():
            if group.has("load_state"):
                group.load_state(str(folder)).result()
        try:
            self._restore_controller(controller)
        except ConfigError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise damaged_error(folder, error) from error  # JSON, but not what a run writes
        self._async_state = controller.get("ahead")
        if self.policy is not None:
            self.policy.reset(step)
        self.workdir.truncate_after(step)

    def _restore_controller(self, state: Mapping[str, Any]) -> None:
        self.algorithm.restore(state["algorithm"])
        self.recorder.restore(state["updates"])
        self.prompts.restore(state["prompts"])
        if self._example_sources.learned is not None:
            self._example_sources.learned.sampler.restore(state["demonstrations"])
        if self._environment is not None:
            self._environment.batch_rows = state["episode_rows"]
        self.step_number = state["step"]
        self.history = [row for row in self.history if row["step"] <= self.step_number]

    def _controller_state(self) -> dict[str, Any]:
        state = {
            "step": self.step_number,
            "algorithm": self.algorithm.state(),
            "updates": self.recorder.state(),
            "prompts": self.prompts.state(),
        }
        if self._environment is not None:
            ahead = self.async_rollout is not None and "episode" in self.batch
            rows = len(self.batch["episode"]) if ahead else self._environment.batch_rows
            state["episode_rows"] = rows
        if self._async_state:
            state["ahead"] = self._async_state
        if self.async_rollout is not None:
            state["prompts"], state["ahead"] = self.async_rollout.state()
        if self._example_sources.learned is not None:
            state["demonstrations"] = self._example_sources.learned.sampler.state()
        return state

    def _latest_checkpoint(self) -> int | None:
        """The checkpoint to resume from, as a step; None if there is none.

        Raises:
          DataError: it is damaged; with ``repair``, none is sound.
        """
        if self.checkpoints is None:
            return None
        if self._repair:
            for said in self.checkpoints.repair():
                self.reporter.message(said)
            self._repair = False
        latest = self.checkpoints.latest()
        if latest is not None and not self.checkpoints.verify(latest):
            text = f"checkpoint {latest} has no checksums (an earlier hjax wrote it)"
            self.reporter.message(text)
        return latest

    def _report_missing_rows(self) -> None:
        """Report the steps of which metrics.jsonl has no row; check the metric of the best one."""
        if self.workdir is not None:
            check_has_metric(self.config.checkpoint.best, self.workdir.rows(METRICS))
        missing = self.workdir.missing_steps(self.step_number) if self.workdir is not None else []
        if missing:
            shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            self.reporter.message(f"{METRICS} has no row of {len(missing)} steps: {shown}")

    def _stop_async_rollout(self) -> None:
        """Stop the asynchronous rollout, if there is one."""
        ahead, self.async_rollout = self.async_rollout, None
        if ahead is not None:
            ahead.close()

    def save(self) -> None:
        """Write a checkpoint of the last step, if there is a workdir and it has none of it yet."""
        if self._unusable:
            raise RunError(self._unusable)
        if self.checkpoints is None or self.checkpoints.latest() == self.step_number:
            return
        with self.reporter.phase("checkpoint"):
            self.checkpoints.save(self.step_number, self._save_states, self._controller_state())

    def _save_states(self, folder: Path) -> list[Future]:
        return [
            group.save_state(str(folder))
            for role, group in self.roles.groups.items()
            if group.has("save_state") and not self.roles.table[role].apart  # rollouts have none
        ]

    def _close_trace(self, trace: DeviceTrace) -> None:
        if said := trace.close():
            self.reporter.message(said)

    def close(self) -> None:
        """Finish writing and stop the pools. The Trainer cannot be used afterwards."""
        with contextlib.ExitStack() as ends:  # runs every callback even if one fails
            if self.trace is not None:
                ends.callback(self._close_trace, self.trace)
            ends.callback(self.backend.close)
            ends.callback(self.roles.close)
            ends.callback(self._stop_async_rollout)
            if self._environment is not None:
                ends.callback(self._environment.close)
            if self.workdir is not None:
                ends.callback(self.workdir.close)
            if self.checkpoints is not None:
                ends.callback(self.checkpoints.close)
                self.checkpoints = None
