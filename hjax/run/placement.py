"""Placement of roles on devices: plans, their files, and the resource pools they make."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.controller import ResourcePool, ThreadExecutor, Timeline, check_disjoint
from hjax.controller.executors import ExecutorFactory
from hjax.controller.hosts import KIND_LABEL
from hjax.errors import ConfigError
from hjax.models.peft_files import is_adapter
from hjax.models.remat import POLICIES
from hjax.roles import ROLES, ROLLOUT, Role
from hjax.rules import Rule, at_least, one_of
from hjax.sharding.interconnect import partition_devices
from hjax.user_input import read_object, user_path

HOST_POOL = "host"
# Settings of a role that a plan may fix, with their rules. They are named as in the role's config
# section; ``remat`` and ``slots`` override ``model.remat`` and ``rollout.slots`` for the role.
SETTINGS: dict[str, Rule] = {
    "micro_batch": at_least(0),
    "remat": one_of(*POLICIES),
    "offload": one_of("none", "optimizer", "all"),
    "slots": at_least(0),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which roles share devices, how many devices, each set has, devices optionally layouts.

    Attributes:
      placement: sets of roles; the roles of a set take turns on its devices.
      allocation: number of devices of each set.
      layouts: by role, mesh axis sizes under ``train`` and ``generate``; other roles use the
        config's.
      predicted: a planner's predictions of a step (``seconds``, ``memory_bytes``, ...).
      where: by set, labels that its cluster hosts must have; empty: any hosts.
      settings: by role, some of ``SETTINGS``; the config decides the rest.
    """

    placement: tuple[tuple[str, ...], ...]
    allocation: tuple[int, ...]
    layouts: Mapping[str, Mapping[str, Mapping[str, int]]] = dataclasses.field(default_factory=dict)
    predicted: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    where: tuple[Mapping[str, str], ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.where:
            object.__setattr__(self, "where", ({},) * len(self.placement))

    @property
    def devices_of_roles(self) -> dict[str, int]:
        """By role the number of devices of its set."""
        sets = zip(self.placement, self.allocation, strict=True)
        return {role: devices for roles, devices in sets for role in roles}


def make_plan(placement: str, roles: Mapping[str, Role] | Sequence[str], devices: int) -> Plan:
    """Make the plan of a named placement, or read a plan.json.

    Args:
      placement: ``colocate``, ``split``, ``standalone``, ``disaggregate`` or a path.
      roles: the algorithm's roles that need devices; names mean the built-in roles.
      devices: number of devices.

    Raises:
      ConfigError: too few devices, or a plan that does not fit the roles or devices.
    """
    table = roles if isinstance(roles, Mapping) else {name: ROLES[name] for name in roles}
    if placement.endswith(".json"):
        return _read_plan(user_path(placement, "placement="), list(table), devices)
    sets: list[tuple[str, ...]]
    if placement == "colocate":
        sets = [tuple(table)]
    elif placement == "split":
        # Scoring models (scalar heads) get a pool of their own.
        second = tuple(name for name, role in table.items() if role.scalar)
        first = tuple(name for name, role in table.items() if not role.scalar)
        sets = [s for s in (first, second) if s]
    elif placement == "standalone":
        sets = [(name,) for name in table]
    elif placement == "disaggregate":
        # Generation gets a pool of its own.
        sets = [tuple(table), (ROLLOUT,)]
    elif placement == "auto":
        raise ConfigError(
            "placement=auto is searched for outside of a Trainer: give it "
            "plan=hjax.plan(config), as the command does"
        )
    else:
        raise ConfigError(
            f"placement={placement!r}; allowed: colocate, split, standalone, disaggregate, or a "
            "plan.json"
        )
    if len(sets) > devices:
        raise ConfigError(
            f"placement={placement}: {len(sets)} sets of roles need a device each, there are "
            f"{devices}; use placement=colocate, or more devices (cluster.devices_per_process)"
        )
    return Plan(tuple(sets), _allocate_devices(sets, devices))


def _allocate_devices(sets: Sequence[Sequence[str]], devices: int) -> tuple[int, ...]:
    """Devices per set: equal shares, else powers of two, with the actor's set (without one, the
    first) as large as fits."""
    if devices % len(sets) == 0:
        return (devices // len(sets),) * len(sets)
    shares = [1 << ((devices // len(sets)).bit_length() - 1)] * len(sets)
    actor = next((i for i, s in enumerate(sets) if "actor" in s), 0)
    while sum(shares) + shares[actor] <= devices:
        shares[actor] *= 2
    return tuple(shares)


def _role(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no role's name")
    return name


def _read_plan(path: Path, roles: Sequence[str], devices: int) -> Plan:
    try:
        content = read_object(path)
        sets = tuple(tuple(_role(r) for r in s) for s in content["placement"])
        allocation = tuple(int(n) for n in content["allocation"])
        layouts = {
            role: {stage: _axes(stage, value) for stage, value in stages.items()}
            for role, stages in (content.get("layouts") or content.get("parallelism", {})).items()
        }
        known = {k: content[k] for k in ("seconds", "set_memory_bytes") if k in content}
        settings = {r: _settings(r, s) for r, s in content.get("settings", {}).items()}
        predicted = dict(content.get("predicted", known))
        where = tuple(_labels(labels) for labels in content.get("where", [{}] * len(sets)))
        kinds = sorted(set(map(str, content.get("kinds", ()))))
    except ConfigError as error:
        raise ConfigError(f"placement: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"placement={path}: not a plan: it needs `placement` (lists of roles), `allocation` "
            "(devices per set), and where it fixes layouts `parallelism` by role, `train`: "
            "[pipe, tensor, data] and `generate`: [pipe, tensor]; where it fixes hosts `where`, a "
            "dict of labels per set; where it fixes more of a role `settings` "
            f"({type(error).__name__}: {error})"
        ) from error
    if len(kinds) > 1 and not any(where):
        raise ConfigError(
            f"placement={path}: its sets stand on different devices, {' and '.join(kinds)}; say in "
            "`where` which labels each set's hosts have, such as "
            f'{{"{KIND_LABEL}": "H100"}} for each of `placement`, or take placement=auto'
        )
    plan = Plan(sets, allocation, layouts, predicted, where, settings)
    return _fit_to_run(plan, path, roles, devices)


def _fit_to_run(plan: Plan, path: Path, roles: Sequence[str], devices: int) -> Plan:
    """Check a file's plan against a run's roles and devices, and drop roles that it lacks."""
    sets, allocation, where = plan.placement, plan.allocation, plan.where
    # A separate rollout counts as a role; reward functions, on the host, need no place in a plan.
    apart = [role for s in sets for role in s if role in ROLES and ROLES[role].apart]
    roles = [*roles, *dict.fromkeys(apart)]
    entries = [
        (tuple(r for r in s if r in roles), n, labels)
        for s, n, labels in zip(sets, allocation, where, strict=False)
    ]
    entries = [(s, n, labels) for s, n, labels in entries if s]
    placed = [role for s, _, _ in entries for role in s]
    if sorted(placed) != sorted(roles) or not len(sets) == len(allocation) == len(where):
        raise ConfigError(
            f"placement={path}: it places {', '.join(placed) or 'nothing'}, this run has "
            f"{', '.join(roles)}; each role once, one allocation (and, if there are any, one entry "
            "of where) per set"
        )
    if any({"actor", ROLLOUT} <= set(s) for s, _, _ in entries):
        raise ConfigError(
            f"placement={path}: {ROLLOUT} shares the actor's devices; give it a set of its own, or "
            "leave it out: then the actor generates itself"
        )
    if "generate" in plan.layouts.get(ROLLOUT, {}):
        raise ConfigError(
            f"placement={path}: {ROLLOUT} only generates, its layout is `train`; leave `generate` "
            "out"
        )
    total = sum(n for _, n, _ in entries)
    if total > devices or min(n for _, n, _ in entries) < 1:
        raise ConfigError(
            f"placement={path}: it needs {total} devices (at least 1 a set), there are {devices}"
        )
    return dataclasses.replace(
        plan,
        placement=tuple(s for s, _, _ in entries),
        allocation=tuple(n for _, n, _ in entries),
        where=tuple(labels for _, _, labels in entries),
    )


def _settings(role: str, value: Any) -> dict[str, Any]:
    """Check a plan's settings of a role against ``SETTINGS``."""
    for name, setting in value.items():
        if name not in SETTINGS:
            raise ValueError(f"settings.{role}: no {name!r}; known: {', '.join(SETTINGS)}")
        if not SETTINGS[name].holds(setting):
            raise ValueError(f"settings.{role}.{name}={setting!r}: {SETTINGS[name].text}")
    return dict(value)


def _labels(value: Any) -> dict[str, str]:
    """Check a plan's host labels."""
    if not all(isinstance(part, str) for item in value.items() for part in item):
        raise TypeError(f"where: {value} are no labels, name and value both strings")
    return dict(value)


def _axes(stage: str, value: Any) -> dict[str, int]:
    """Mesh axis sizes of a plan's entry: a dict, or [p, t, d] (generate: [p_g, t_g])."""
    if isinstance(value, Mapping):
        sizes = {axis: int(n) for axis, n in value.items()}
        if stage == "generate":
            sizes.pop("data", None)  # follows from the training sizes
        return sizes
    pipe, tensor, *data = (int(n) for n in value)
    if stage == "generate":
        return {"pipe": pipe, "tensor": tensor}
    return {"data": data[0] if data else -1, "pipe": pipe, "tensor": tensor}


def pool_name(plan: Plan, number: int) -> str:
    """Name of the resource pool of a plan's set of roles."""
    return "+".join(plan.placement[number]) if len(plan.placement) > 1 else "all"


def make_pools(
    plan: Plan, devices: Sequence[jax.Device], executor: ExecutorFactory = ThreadExecutor
) -> dict[str, ResourcePool]:
    """Make the resource pools, by role; the roles of a set share one, and all share a timeline."""
    timeline = Timeline()
    pools: list[ResourcePool] = []
    with contextlib.ExitStack() as undo:
        for number, here in enumerate(partition_devices(devices, plan.allocation)):
            pools.append(ResourcePool(pool_name(plan, number), here, timeline, executor))
            undo.callback(pools[-1].close)
        check_disjoint(pools)
        host = ResourcePool(HOST_POOL, (), timeline, executor)
        undo.pop_all()
    return {
        role: pool for roles, pool in zip(plan.placement, pools, strict=True) for role in roles
    } | {HOST_POOL: host}


def layout_sizes(plan: Plan, layouts: Any, role: str, stage: str) -> dict[str, int]:
    """Mesh axis sizes of a role's layout: the plan's if it fixes them, else the config's."""
    if role in plan.layouts and stage in plan.layouts[role]:
        return dict(plan.layouts[role][stage])
    section = layouts.get(role)
    return {"data": -1} if section is None or stage not in section else dict(section[stage])


def train_sizes(shape: Mapping[str, int]) -> dict[str, int]:
    """Mesh axis sizes of a train layout with micro axes folded in; rare axes only if above 1."""
    sizes = {axis: n for axis, n in shape.items() if not axis.endswith("_micro")}
    for axis in ("pipe", "tensor"):
        sizes[axis] *= shape[f"{axis}_micro"]
    usual = ("data", "fsdp", "tensor")
    return {axis: n for axis, n in sizes.items() if n > 1 or axis in usual}


def role_path(config: ConfigDict, role: Role) -> str:
    """Path of a role's model; empty if it starts from another role's weights or from scratch."""
    section = config.get(role.config_section)
    return section.get("path", "") if section is not None else ""


def shared_worker_roles(config: ConfigDict, algorithm: type[Algorithm]) -> dict[str, str]:
    """By role without a worker of its own, the role whose worker computes it.

    It is the reference of an actor with new LoRA adapters, which change nothing yet: the actor
    computes it with adapters off. An actor that starts from a PEFT directory differs from its
    base, so its reference has a worker of its own.
    """
    table = algorithm.role_table(config.algorithm)
    served = {}
    for name, role in table.items():
        if role == ROLES["reference"] and not role_path(config, role):
            start = config[role.starts_from]
            if start.lora.rank and not (start.path and is_adapter(start.path)):
                served[name] = role.starts_from
    return served


def roles_with_devices(config: ConfigDict, algorithm: type[Algorithm]) -> dict[str, Role]:
    """Roles with a model or a user's worker class; reward functions and roles that say so run on
    the host."""
    served = shared_worker_roles(config, algorithm)
    return {
        name: role
        for name, role in algorithm.role_table(config.algorithm).items()
        if (not role.function or role_path(config, role)) and not role.host and name not in served
    }


def plan_from_config(config: ConfigDict, algorithm: type[Algorithm], devices: int) -> Plan:
    """The plan of ``config.placement`` on so many devices; ``auto`` raises ConfigError."""
    return make_plan(config.placement, roles_with_devices(config, algorithm), devices)
