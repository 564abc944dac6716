"""From a config to worker groups: each role's model, layout, worker and resource pool."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.controller import BuildWorker, ResourcePool, Timeline, WorkerGroup
from hjax.controller.executors import ExecutorFactory
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.kernels.verdict import ALL_FORMS
from hjax.models.base_checkpoints import BaseCheckpoint
from hjax.models.model_config import ModelConfig
from hjax.models.weights import check_weights, read_config
from hjax.rewards.function import RewardFunction
from hjax.roles import ROLES, ROLLOUT, Role, calls_of
from hjax.run.config_validation import (
    can_generate,
    check_async_rollout,
    check_compatibility,
    check_scalar_heads,
    check_separate_rollout,
)
from hjax.run.inputs import Inputs, load_tokenizer
from hjax.run.memory_check import AUTO, AUTO_SLOTS, MemoryCheck, RematChoice, SlotBudget
from hjax.run.placement import (
    HOST_POOL,
    Plan,
    layout_sizes,
    make_pools,
    role_path,
    roles_with_devices,
    shared_worker_roles,
)
from hjax.run.rollout_policy import RolloutPolicy
from hjax.run.worker_builder import WorkerBuilder, with_compute, with_context, with_lora, with_plan
from hjax.sharding.layout import RoleLayouts, make_layouts


@dataclasses.dataclass
class RoleGroups:
    """The roles of a run: described first and, once started, as worker groups.

    Attributes:
      table: role name to ``Role``.
      builds: by role, the message that builds its worker.
      plan: placement and allocation.
      layouts: by role with devices; meshes and rules only, no arrays.
      models: model config by role with a model.
      starts_from: by role that is initialised with another role's weights, that role.
      shared_workers: by role without a worker of its own, the role whose worker computes it.
      remat: with ``model.remat=auto``, the choice for each trained role.
      unrolled: with ``model.unroll_layers=auto``, by role with a model whether layers are unrolled.
      slots: with ``rollout.slots=-1``, the number of slots.
      rollout_device_counts: on which a separate rollout can run, falling from the plan's.
      pools: resource pool by role, and the host's.
      groups: worker group by role; the actor's is a ``RolloutPolicy`` with a separate rollout.
    """

    table: Mapping[str, Role]
    builds: dict[str, BuildWorker]
    plan: Plan
    layouts: Mapping[str, RoleLayouts]
    models: dict[str, ModelConfig]
    starts_from: dict[str, str]
    shared_workers: dict[str, str] = dataclasses.field(default_factory=dict)
    remat: dict[str, RematChoice] = dataclasses.field(default_factory=dict)
    unrolled: dict[str, bool] = dataclasses.field(default_factory=dict)
    rollout_device_counts: tuple[int, ...] = ()
    slots: SlotBudget | None = None
    pools: dict[str, ResourcePool] = dataclasses.field(default_factory=dict)
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)

    def start(self, devices: Sequence[jax.Device], executor: ExecutorFactory) -> None:
        """Make the pools and the workers; waits until all workers are built.

        Raises:
          ConfigError: a layout that does not fit its model.
        """
        self.pools = make_pools(self.plan, devices, executor)
        try:
            for role, build in self.builds.items():
                pool = self.pools[role] if role in self.layouts else self.pools[HOST_POOL]
                arguments, options = build.arguments, build.options
                group = WorkerGroup(pool, build.worker, *arguments, role=role, **options)
                self.groups[role] = group
            for group in self.groups.values():
                group.built.result()  # errors of a worker's constructor surface here
            if ROLLOUT in self.groups:
                calls = calls_of(self.table["actor"].worker)
                updates = [name for name, phase in calls.items() if phase == "update"]
                actor, rollout = self.groups["actor"], self.groups[ROLLOUT]
                ask = functools.partial(self.landing, ROLLOUT)
                self.groups["actor"] = RolloutPolicy(actor, rollout, updates, ask)
        except BaseException:
            self.close()
            raise

    def landing(self, role: str, source: str = "actor") -> Any:
        """Layout in which a role receives ``source``'s weights from other processes, else None."""
        pool = self.pools[role]
        group = self.groups[role]
        if pool is self.pools[source] or not hasattr(pool.executor, "processes"):
            return None
        return group.target_regions().result() if group.has("target_regions") else None

    def sync_reference(self, share: float) -> None:
        """Move the reference, if there is one, by a share of the way to the actor's weights."""
        if "reference" in self.shared_workers:
            self.groups["actor"].sync_reference(share).result()
        elif "reference" in self.groups:
            weights = self.groups["actor"].weights(self.landing("reference"))
            self.groups["reference"].interpolate_weights(weights, share).result()

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block trained roles have the moving average of their weights, where one is
        kept (``actor.ema_decay``)."""
        contexts = {role: build.arguments[0] for role, build in self.builds.items()}
        optimizers = {role: getattr(x, "optimizer", None) for role, x in contexts.items()}
        averaged = [self.groups[role] for role, x in optimizers.items() if x and x.ema_decay]
        for group in averaged:
            group.use_average(True).result()
        try:
            yield
        except BaseException:
            with contextlib.suppress(RunError):  # which may be what ended the block
                for group in averaged:
                    group.use_average(False).result()
            raise
        for group in averaged:
            group.use_average(False).result()

    def restart(self, lost: Sequence[Any], fewer: bool = False) -> None:
        """Restart executors that lost processes, and rebuild their workers.

        Args:
          lost: those executors.
          fewer: whether a separate rollout may restart with fewer processes.
        """
        for executor in lost:
            smaller = fewer and executor is self.generating_executor
            executor.restart(self._process_counts() if smaller else ())
        groups = [group for group in self.groups.values() if group.pool.executor in lost]
        for group in groups:
            group.rebuild()
        for group in groups:
            group.built.result()

    @property
    def timeline(self) -> Timeline:
        """The timeline of all pools."""
        return next(iter(self.pools.values())).timeline

    @property
    def generating_executor(self) -> Any:
        """The executor of the pool that generates."""
        return self.pools[self.generating_role].executor

    def _process_counts(self) -> tuple[int, ...]:
        """Process counts that the rollout can run on, falling."""
        executor = self.generating_executor
        planned = range(executor.planned, 0, -1)
        return tuple(n for n in planned if n * executor.devices in self.rollout_device_counts)

    def can_grow(self) -> bool:
        """Whether the cluster has room for lost rollout processes, in a number it can use."""
        executor = self.generating_executor
        limit = getattr(executor, "room", 0)
        counts = self._process_counts() if limit else ()
        return any(executor.processes < n <= limit for n in counts)

    @property
    def base_checkpoints(self) -> dict[str, BaseCheckpoint]:
        """By path, the checkpoints of other runs that are the base of LoRA adapters."""
        contexts = (build.arguments[0] for build in self.builds.values())
        beside = (c for c in contexts if c.model is not None and c.model.lora is not None)
        return {context.path: context.base for context in beside if context.base is not None}

    @property
    def generating_role(self) -> str:
        """The role that generates: the separate rollout if there is one, else the actor."""
        return ROLLOUT if ROLLOUT in self.layouts else "actor"

    @property
    def reward_functions(self) -> dict[str, RewardFunction]:
        """Reward and cost functions, by role."""
        made = {role: build.options.get("function") for role, build in self.builds.items()}
        return {role: f for role, f in made.items() if isinstance(f, RewardFunction)}

    def set_index(self, role: str) -> int:
        """Index of a role's set in the plan's placement (roles that share devices)."""
        return next(i for i, roles in enumerate(self.plan.placement) if role in roles)

    def close(self) -> None:
        """Stop every pool."""
        with contextlib.ExitStack() as closing:  # runs every callback even if one fails
            for function in self.reward_functions.values():
                closing.callback(function.close)
            for pool in {id(p): p for p in self.pools.values()}.values():
                closing.callback(pool.close)


def default_dtype(platform: str) -> Any:
    """Compute dtype of ``model.dtype=auto``: bfloat16 on accelerators, float32 on a CPU."""
    return jnp.float32 if platform == "cpu" else jnp.bfloat16


def read_model(path: str) -> tuple[ModelConfig, Tokenizer | None]:
    """Model config and tokenizer of a path, after checking that its weights can be loaded.

    Raises:
      ConfigError: missing or damaged files, by name.
    """
    check_weights(path)
    return read_config(path), load_tokenizer(path)


def describe_roles(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    plan: Plan,
    platform: str,
    read: Callable[[str], tuple[ModelConfig, Tokenizer | None]] = read_model,
    memory: int = 0,
    bases: Mapping[str, BaseCheckpoint] = {},
    forms: frozenset[str] = ALL_FORMS,
) -> RoleGroups:
    """Check everything that needs no devices, and describe the workers.

    Args:
      config: of the run.
      algorithm: its class.
      inputs: what the run reads.
      plan: placement of the roles.
      platform: of the devices; it resolves ``model.dtype=auto``.
      read: returns the model config and tokenizer of a role's path.
      memory: bytes of a device that programs may use, for ``model.remat=auto``; 0: unknown.
      bases: by path, checkpoints of other runs that this run started from; for other paths the
        newest checkpoint is taken.
      forms: of kernels and collectives that may be taken, see ``hjax.kernels.verdict``.

    Raises:
      ConfigError: shapes, batches, layouts or paths that do not fit, by name.
    """
    table = _table(config, algorithm, inputs, plan)
    devices = plan.devices_of_roles
    sizes = {role: _sizes(config, plan, role, table[role]) for role in devices}
    layouts = {
        role: make_layouts(
            count, sizes[role]["train"], sizes[role].get("generate"), f"layout.{role}"
        )
        for role, count in devices.items()
    }
    check_compatibility(config, algorithm, inputs, table, layouts, plan)
    if ROLLOUT in layouts:
        # On fewer devices the rollout has fewer data-parallel parts.
        sizes[ROLLOUT]["train"] = sizes[ROLLOUT]["train"] | {"data": -1}
    counts = range(devices.get(ROLLOUT, 0), 0, -1)
    fewer = tuple(n for n in counts if can_generate(config, sizes[ROLLOUT], n))
    builder = WorkerBuilder(
        config,
        algorithm,
        inputs,
        table=table,
        sizes=sizes,
        layouts=layouts,
        platform=platform,
        auto_dtype=default_dtype(platform),
        read=read,
        bases=bases,
        forms=forms,
    )
    roles = _role_groups(builder, plan, rollout_device_counts=fewer)
    memory_check = MemoryCheck(config, algorithm, roles, inputs.prompt_length, platform, memory)
    _choose(roles, memory_check, config)
    return roles


def _role_groups(
    builder: WorkerBuilder, plan: Plan, rollout_device_counts: tuple[int, ...]
) -> RoleGroups:
    """The description of all workers that a builder makes."""
    config, table = builder.config, builder.table
    builds = {role: with_plan(builder.build(role), plan) for role in table}
    if builder.read is read_model:  # another reader may know shapes of models without weights
        check_scalar_heads(config, table)
    models = {role: b.arguments[0].model for role, b in builds.items() if b.arguments[0].model}
    unrolled = {role: builds[role].arguments[0].compute.unroll_layers for role in models}
    return RoleGroups(
        table=table,
        builds=builds,
        plan=plan,
        layouts=builder.layouts,
        models=models,
        starts_from=_starts_from(table, builds),
        shared_workers=shared_worker_roles(config, builder.algorithm),
        unrolled=unrolled if config.model.unroll_layers == AUTO else {},
        rollout_device_counts=rollout_device_counts,
    )


def _table(
    config: ConfigDict, algorithm: type[Algorithm], inputs: Inputs, plan: Plan
) -> dict[str, Role]:
    """The roles that have a worker, checked."""
    shared_workers = shared_worker_roles(config, algorithm)
    table = algorithm.role_table(config.algorithm)
    table = {name: role for name, role in table.items() if name not in shared_workers}
    if config.reference.sync_every and "reference" in table and config.actor.lora.rank:
        raise ConfigError(
            f"config.reference.sync_every={config.reference.sync_every}: the reference of an actor "
            "that goes on with adapters is a model of its own, which does not follow; give their "
            "merged export as actor.path"
        )
    if any(ROLLOUT in roles for roles in plan.placement):
        check_separate_rollout(table, algorithm)
        table[ROLLOUT] = ROLES[ROLLOUT]
        if config.actor.ema_decay and config.rollout.max_staleness:
            raise ConfigError(
                f"config.actor.ema_decay={config.actor.ema_decay:g} with config.rollout."
                f"max_staleness={config.rollout.max_staleness}: the rollout would have to answer "
                "evaluations with the average while it generates batches ahead of learning; use "
                "max_staleness=0 or ema_decay=0"
            )
    check_async_rollout(config, algorithm, plan)
    for name, entry in table.items():
        if entry.trained and config.get(entry.config_section) is None:
            raise ConfigError(
                f"role {name!r} is trained, but the config has no section "
                f"{entry.config_section!r} with its optimizer; say section='actor' or 'critic' in "
                "its Role"
            )
        if entry.starts_from and entry.starts_from not in table:
            raise ConfigError(
                f"role {name!r} starts from {entry.starts_from!r}, which this config has no use "
                f"for; it has {', '.join(table)}"
            )
    for name in set(table) - set(roles_with_devices(config, algorithm)) - {ROLLOUT}:
        if table[name].function and getattr(inputs, name) is None:
            raise ConfigError(
                f"nothing gives a {name}: set {name}.function=path.py:name or {name}.path"
            )
    return table


def _sizes(config: ConfigDict, plan: Plan, role: str, entry: Role) -> dict[str, dict[str, int]]:
    """Mesh axis sizes of a role's ``train`` layout and, if it generates, ``generate`` layout."""
    sizes = {"train": layout_sizes(plan, config.layout, role, "train")}
    if entry.apart:
        sizes["generate"] = {"tensor": -1, "pipe": -1}  # as its train layout
    elif entry.generates:
        sizes["generate"] = layout_sizes(plan, config.layout, role, "generate")
    return sizes


def _choose(roles: RoleGroups, memory_check: MemoryCheck, config: ConfigDict) -> None:
    """Resolve ``model.remat=auto`` and ``rollout.slots=-1`` in the workers' contexts."""
    builds = roles.builds
    if config.model.remat == AUTO:
        roles.remat = memory_check.remat()
        for role, chosen in roles.remat.items():
            builds[role] = with_compute(builds[role], remat=chosen.policy)
    fixed = any("slots" in settings for settings in roles.plan.settings.values())
    if config.rollout.slots == AUTO_SLOTS and not fixed:
        roles.slots = memory_check.slots()
        for role in (r for r in builds if r in roles.layouts):
            builds[role] = with_context(builds[role], slots=roles.slots.slots)


def _starts_from(table: Mapping[str, Role], builds: Mapping[str, BuildWorker]) -> dict[str, str]:
    """By role the role whose weights it starts from, in an order in which sources come first.

    Raises:
      ConfigError: roles that start from each other in a circle.
    """
    starts_from = {
        role: entry.starts_from
        for role, entry in table.items()
        if entry.starts_from
        and not builds[role].arguments[0].path
        and hasattr(builds[role].worker, "take_weights")
    }
    ordered: dict[str, str] = {}
    while len(ordered) < len(starts_from):
        ready = {
            role: source
            for role, source in starts_from.items()
            if role not in ordered and (source in ordered or source not in starts_from)
        }
        if not ready:
            circle = sorted(set(starts_from) - set(ordered))
            raise ConfigError(f"roles start from each other in a circle: {', '.join(circle)}")
        ordered |= ready
    return ordered


def planned_models(
    config: ConfigDict,
    algorithm: type[Algorithm],
    inputs: Inputs,
    read: Callable[[str], tuple[ModelConfig, Tokenizer | None]] = read_model,
) -> dict[str, ModelConfig]:
    """Model configs of the roles with devices, for the planner.

    Raises:
      ConfigError: a user's worker class, whose model is unknown.
    """
    models = {}
    for name, role in roles_with_devices(config, algorithm).items():
        if not role.model:
            raise ConfigError(
                f"placement=auto: {name} has a worker class of its own, whose model the planner "
                "does not know; use colocate, split, standalone or a plan.json"
            )
        path = role_path(config, role)
        models[name] = with_lora(read(path)[0] if path else inputs.model, config, role)
    return models


def is_float32(config: ConfigDict, platform: str) -> bool:
    """Whether a run computes in float32."""
    dtype = config.model.dtype
    return dtype == "float32" or (dtype == "auto" and default_dtype(platform) == jnp.float32)
