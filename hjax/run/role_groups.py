"""From a config to worker groups: models, layouts, losses and optimizers of every role."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.controller import BuildWorker, ResourcePool, Timeline, WorkerGroup
from hjax.controller.executors import ExecutorFactory
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models.base_checkpoints import BaseCheckpoint
from hjax.models.model_config import ModelConfig
from hjax.models.weights import check_weights, read_config
from hjax.rewards.function import RewardFunction
from hjax.roles import ROLES, ROLLOUT, Role, calls_of
from hjax.run.config_validation import (
    can_generate,
    check_ahead,
    check_judges,
    check_rollout,
    check_together,
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
    served_roles,
)
from hjax.run.rollout_policy import RolloutPolicy
from hjax.run.worker_builder import WorkerBuilder, adapted, as_planned, changed, computing
from hjax.sharding.layout import RoleLayouts, make_layouts


@dataclasses.dataclass
class RoleGroups:
    """The roles of a run, described and, once started, as worker groups.

    Attributes:
      table: what each role is.
      builds: the message that makes each role's worker.
      plan: placement and allocation.
      layouts: by role with devices; they can be asked, but hold no arrays.
      models: shapes by role with a model.
      starts_from: by role that takes another's weights, whose.
      served: by role that another's worker answers for, whose.
      remat: with ``model.remat=auto`` what was chosen for each trained role, and why.
      unrolled: with ``model.unroll_layers=auto`` by role with a model whether its layers are.
      slots: with ``rollout.slots=-1`` how many sequences are generated at a time, and why.
      fewer: numbers of devices, falling, on which a rollout apart can do what it does; the first
        is that of the plan.
      pools: resource pool by role, and the host's.
      groups: worker group by role; the actor's is a ``RolloutPolicy`` where a rollout stands apart.
    """

    table: dict[str, Role]
    builds: dict[str, BuildWorker]
    plan: Plan
    layouts: dict[str, RoleLayouts]
    models: dict[str, ModelConfig]
    starts_from: dict[str, str]
    served: dict[str, str] = dataclasses.field(default_factory=dict)
    remat: dict[str, RematChoice] = dataclasses.field(default_factory=dict)
    unrolled: dict[str, bool] = dataclasses.field(default_factory=dict)
    fewer: tuple[int, ...] = ()
    slots: SlotBudget | None = None
    pools: dict[str, ResourcePool] = dataclasses.field(default_factory=dict)
    groups: dict[str, Any] = dataclasses.field(default_factory=dict)

    def start(self, devices: Sequence[jax.Device], executor: ExecutorFactory) -> None:
        """Make the pools and the workers; waits until these stand.

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
                group.built.result()  # what does not fit is an error of the set-up
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
        """How a role has another's weights arrive; None where no other processes send them."""
        pool = self.pools[role]
        group = self.groups[role]
        if pool is self.pools[source] or not hasattr(pool.executor, "processes"):
            return None
        return group.target_regions().result() if group.has("target_regions") else None

    def restart(self, lost: Sequence[Any], fewer: bool = False) -> None:
        """Start the executors that lost their processes again, and make their workers anew.

        Args:
          lost: those executors.
          fewer: whether a rollout may do with fewer processes, if there is room for no more.
        """
        for executor in lost:
            smaller = fewer and executor is self.generating
            executor.restart(self._counts() if smaller else ())
        groups = [group for group in self.groups.values() if group.pool.executor in lost]
        for group in groups:
            group.rebuild()
        for group in groups:
            group.built.result()

    @property
    def timeline(self) -> Timeline:
        """Of all pools."""
        return next(iter(self.pools.values())).timeline

    @property
    def generating(self) -> Any:
        """The executor of the pool that answers prompts; one of a cluster knows its processes."""
        return self.pools[self.generates].executor

    def _counts(self) -> tuple[int, ...]:
        """Processes with which the rollout can do what it does, falling."""
        executor = self.generating
        planned = range(executor.planned, 0, -1)
        return tuple(n for n in planned if n * executor.devices in self.fewer)

    def could_grow(self) -> bool:
        """Whether there is room for processes that the rollout lost, and it can use them."""
        executor = self.generating
        room = getattr(executor, "room", 0)
        return bool(room) and any(executor.processes < n <= room for n in self._counts())

    @property
    def bases(self) -> dict[str, BaseCheckpoint]:
        """The checkpoints of other runs beside which adapters learn, by path."""
        contexts = (build.arguments[0] for build in self.builds.values())
        beside = (c for c in contexts if c.model is not None and c.model.lora is not None)
        return {context.path: context.base for context in beside if context.base is not None}

    @property
    def generates(self) -> str:
        """The role that answers prompts: the rollout where it stands apart, else the actor."""
        return ROLLOUT if ROLLOUT in self.layouts else "actor"

    @property
    def judges(self) -> dict[str, RewardFunction]:
        """The functions that score, by role."""
        made = {role: build.options.get("function") for role, build in self.builds.items()}
        return {role: f for role, f in made.items() if isinstance(f, RewardFunction)}

    def set_of(self, role: str) -> int:
        """Number of the set of roles that a role with devices shares them with."""
        return next(i for i, roles in enumerate(self.plan.placement) if role in roles)

    def close(self) -> None:
        """Stop every pool."""
        with contextlib.ExitStack() as ends:  # all of them, whichever fails
            for function in self.judges.values():
                ends.callback(function.close)
            for pool in {id(p): p for p in self.pools.values()}.values():
                ends.callback(pool.close)


def default_dtype(platform: str) -> Any:
    """Compute dtype of ``model.dtype=auto``: bfloat16 on accelerators, float32 on a CPU."""
    return jnp.float32 if platform == "cpu" else jnp.bfloat16


def read_model(path: str) -> tuple[ModelConfig, Tokenizer | None]:
    """Shapes and tokenizer of the model at a path, whose weights are there to be loaded.

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
) -> RoleGroups:
    """Check everything that can be checked without devices, and describe the workers.

    Args:
      config: the run's.
      algorithm: its class.
      inputs: what it reads.
      plan: where the roles stand.
      platform: of the devices; it decides what ``model.dtype=auto`` means.
      read: gives shapes and tokenizer of a role's path.
      memory: bytes of a device that programs may use, for ``model.remat=auto``; 0: not known.
      bases: checkpoints of other runs, by path, that this run has read before; of a path that it
        has not, the newest.

    Raises:
      ConfigError: shapes, batches, layouts or paths that do not fit, by name.
    """
    table = _table(config, algorithm, inputs, plan)
    placed = zip(plan.placement, plan.allocation, strict=True)
    devices = {role: count for roles, count in placed for role in roles}
    sizes = {role: _sizes(config, plan, role, table[role]) for role in devices}
    layouts = {
        role: make_layouts(count, **sizes[role], what=f"layout.{role}")
        for role, count in devices.items()
    }
    check_together(config, algorithm, inputs, table, layouts, plan)
    fewer: tuple[int, ...] = ()
    if ROLLOUT in layouts:
        # What stands on fewer devices has fewer data-parallel parts.
        sizes[ROLLOUT]["train"] = sizes[ROLLOUT]["train"] | {"data": -1}
        counts = range(devices[ROLLOUT], 0, -1)
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
    )
    builds = {role: as_planned(builder.build(role), plan) for role in table}
    if read is read_model:  # others know shapes, perhaps of no weights
        check_judges(config, table)
    models = {role: b.arguments[0].model for role, b in builds.items() if b.arguments[0].model}
    unrolled = {role: builds[role].arguments[0].compute.unroll_layers for role in models}
    roles = RoleGroups(
        table=table,
        builds=builds,
        plan=plan,
        layouts=layouts,
        models=models,
        starts_from=_starts_from(table, builds),
        served=served_roles(config, algorithm),
        unrolled=unrolled if config.model.unroll_layers == AUTO else {},
        fewer=fewer,
    )
    _choose(
        roles, MemoryCheck(config, algorithm, roles, inputs.prompt_length, platform, memory), config
    )
    return roles


def _table(
    config: ConfigDict, algorithm: type[Algorithm], inputs: Inputs, plan: Plan
) -> dict[str, Role]:
    """What each role is that has a worker."""
    served = served_roles(config, algorithm)
    table = algorithm.role_table(config.algorithm)
    table = {name: role for name, role in table.items() if name not in served}
    if any(ROLLOUT in roles for roles in plan.placement):
        check_rollout(table, algorithm)
        table[ROLLOUT] = ROLES[ROLLOUT]
    check_ahead(config, algorithm, plan)
    for name, entry in table.items():
        if entry.trained and config.get(entry.config_section) is None:
            raise ConfigError(
                f"role {name!r} is trained, but the config has no section "
                f"{entry.config_section!r} with its optimizer; say section='critic' in its Role"
            )
        if entry.starts_from and entry.starts_from not in table:
            raise ConfigError(
                f"role {name!r} starts from {entry.starts_from!r}, which this config has no use "
                f"for; it has {', '.join(table)}"
            )
    with_devices = roles_with_devices(config, algorithm)
    for name in set(table) - set(with_devices) - {ROLLOUT}:
        if table[name].function and getattr(inputs, name) is None:
            raise ConfigError(
                f"nothing gives a {name}: set {name}.function=path.py:name or {name}.path"
            )
    return table


def _sizes(config: ConfigDict, plan: Plan, role: str, entry: Role) -> dict[str, dict[str, int]]:
    """Of the mesh axes under ``train``, and under ``generate`` where the role has that."""
    sizes = {"train": layout_sizes(plan, config.layout, role, "train")}
    if entry.apart:
        sizes["generate"] = {"tensor": -1, "pipe": -1}  # as its mesh says
    elif entry.generates:
        sizes["generate"] = layout_sizes(plan, config.layout, role, "generate")
    return sizes


def _choose(roles: RoleGroups, room: MemoryCheck, config: ConfigDict) -> None:
    """Put what ``model.remat=auto`` and ``rollout.slots=-1`` are into the workers' contexts."""
    builds = roles.builds
    if config.model.remat == AUTO:
        roles.remat = room.remat()
        for role, chosen in roles.remat.items():
            builds[role] = computing(builds[role], remat=chosen.policy)
    fixed = any("slots" in settings for settings in roles.plan.settings.values())
    if config.rollout.slots == AUTO_SLOTS and not fixed:
        roles.slots = room.slots()
        for role in (r for r in builds if r in roles.layouts):
            builds[role] = changed(builds[role], slots=roles.slots.slots)


def _starts_from(table: Mapping[str, Role], builds: Mapping[str, BuildWorker]) -> dict[str, str]:
    """Whose weights roles take, every role after the one that it takes them from.

    Raises:
      ConfigError: roles that start from each other.
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
    """Shapes of the roles with devices, for a planner.

    Raises:
      ConfigError: a worker class of a user's own, whose model nobody here knows.
    """
    models = {}
    for name, role in roles_with_devices(config, algorithm).items():
        if not role.model:
            raise ConfigError(
                f"placement=auto: {name} has a worker class of its own, whose model the planner "
                "does not know; use colocate, split, standalone or a plan.json"
            )
        path = role_path(config, role)
        model = read(path)[0] if path else inputs.model
        models[name] = adapted(model, config, role)
    return models


def is_float32(config: ConfigDict, platform: str) -> bool:
    """Whether a run computes in float32."""
    dtype = config.model.dtype
    return dtype == "float32" or (dtype == "auto" and default_dtype(platform) == jnp.float32)
