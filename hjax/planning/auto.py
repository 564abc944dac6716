"""`placement=auto`: the plan of a run for the devices it has."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.errors import ConfigError
from hjax.machine import device_memory
from hjax.models.config import ModelConfig
from hjax.planning.calibration import Progress, calibrate
from hjax.planning.constants import Constants
from hjax.planning.counting import counts
from hjax.planning.dataflow import trace
from hjax.planning.hardware import DEVICES
from hjax.planning.options import SearchSpace, role_options
from hjax.planning.profile import Profile, profile_path, read_profile, write_profile
from hjax.planning.records import (
    FLOAT32,
    MASTERS,
    Candidate,
    Cluster,
    Mesh,
    PlannedSet,
    Pool,
    Workload,
)
from hjax.planning.result import describe_result
from hjax.planning.search import SHOWN, Problem, SearchResult
from hjax.planning.strategies import search_strategy
from hjax.roles import ROLES, Role
from hjax.run.inputs import load_inputs
from hjax.run.machines import local_devices
from hjax.run.placement import Plan, make_plan
from hjax.run.roles import (
    is_float32,
    planned_models,
    role_path,
    roles_with_devices,
)
from hjax.run.workdir import Workdir
from hjax.settings.checking import check_config, on_cluster
from hjax.show.parts_display import PartsDisplay

# Plans whose seconds differ by less than this share are equal to the model where simulated devices
# share cores: no placement has more of them than another, and what is left is their noise.
TIE = 0.1
EVERY = 1 << 10  # placements


def plan_run(
    config: ConfigDict, workdir: str | Path | None = None, progress: Progress | None = None
) -> Plan | None:
    """Where the roles of a run stand: ``hjax.plan``.

    None for a run on a cluster whose placement needs no search: the Trainer, which knows the
    cluster's devices, makes that plan itself.

    Args:
      config: the run's. ``placement=auto`` is searched for, with a stored profile of this process's
        devices or, on CPUs, one that is measured now; another placement is taken as it stands.
      workdir: of an earlier start of the run, whose plan is kept where nothing that decides it has
        changed.
      progress: told how far a calibration has come; None: shown on standard output, unless
        ``display.enabled`` is off.

    Raises:
      ConfigError: a run that cannot be planned or does not fit.
    """
    config = check_config(config)
    algorithm = get_algorithm(config.algorithm.name)
    away = on_cluster(config)
    if away and config.placement != "auto":
        return None
    devices = local_devices(config)
    inputs = load_inputs(config, supervised=not algorithm.generates)
    placed = roles_with_devices(config, algorithm)
    planned = Workdir(workdir).planned(config) if workdir is not None else None
    if planned is not None or config.placement != "auto":
        placement = config.placement if planned is None else str(planned)
        return make_plan(placement, placed, len(devices))
    models = planned_models(config, algorithm, inputs)
    float32 = is_float32(config, devices[0].platform)
    with PartsDisplay("calibrating", config.display.enabled) as shown:
        told = progress or shown
        hosts = config.cluster.processes if away else 1
        arguments = config, algorithm, models, inputs.prompt_length, devices, float32
        return auto_plan(*arguments, told, hosts)


def auto_plan(
    config: ConfigDict,
    algorithm: type[Algorithm],
    models: dict[str, ModelConfig],
    prompt_length: int,
    devices: Sequence[Any],
    float32: bool,
    progress: Progress | None = None,
    hosts: int = 1,
) -> Plan:
    """The fastest plan of the cost model on ``devices``, measured before or now.

    Where these share cores, the one of fewest sets among those within ``TIE`` of it.

    Args:
      models: shapes of the roles that need devices.
      float32: whether the run computes in float32.
      progress: told how far a calibration has come.
      hosts: processes that the devices are spread over; a set gets whole ones or a part of one.

    Raises:
      ConfigError: it would not fit, with the bytes missing; or a run that cannot be planned.
    """
    _check_generates(algorithm)  # before a calibration, which takes a minute
    measured = find_profile(devices, progress)
    cluster = Cluster((Pool(measured.device, hosts, len(devices) // hosts),))
    problem = run_problem(
        config, algorithm, models, prompt_length, cluster, measured.constants, float32
    )
    shared = cluster.pools[0].shares_cores
    found = search_strategy(problem, "auto", EVERY if shared or hosts > 1 else SHOWN)
    if hosts > 1:
        found = _of_whole_processes(found, len(devices) // hosts)
    if shared and found.candidates:
        found = _simplest_first(found)
    described = describe_result(found, problem, "auto")
    keys = ("seconds", "memory_bytes", "set_memory_bytes", "usable_bytes", "origins", "candidates")
    return Plan(
        tuple(tuple(s) for s in described["placement"]),
        tuple(described["allocation"]),
        described["layouts"],
        {key: described[key] for key in keys},
    )


def _check_generates(algorithm: type[Algorithm]) -> None:
    if not algorithm.generates:
        raise ConfigError(
            f"placement=auto: {algorithm.__name__} has one model and no rollouts; use colocate"
        )


def _of_whole_processes(found: SearchResult, each: int) -> SearchResult:
    """The candidates whose sets get whole processes of ``each`` devices, or a part of one.

    Raises:
      ConfigError: there are none.
    """
    fitting = tuple(
        c for c in found.candidates
        if all(s.devices <= each or s.devices % each == 0 for s in c.sets)
    )  # fmt: skip
    if found.candidates and not fitting:
        raise ConfigError(
            f"placement=auto: no plan gives its sets whole processes of {each} devices; use "
            "another cluster.devices_per_process"
        )
    return dataclasses.replace(found, candidates=fitting)


def _simplest_first(found: SearchResult) -> SearchResult:
    """The fastest of fewest sets among the candidates within ``TIE`` of the fastest comes first."""
    fastest = found.fastest.total
    equal = [c for c in found.candidates if c.total <= fastest * (1 + TIE)]
    simplest = min(equal, key=lambda candidate: len(candidate.sets))
    ordered = (simplest, *(c for c in found.candidates if c is not simplest))
    rest = tuple(tuple(s.roles for s in candidate.sets) for candidate in ordered[SHOWN:])
    return dataclasses.replace(found, candidates=ordered[:SHOWN], slower=found.slower + rest)


def find_profile(devices: Sequence[Any], progress: Progress | None = None) -> Profile:
    """For a plan on these devices: their stored profile, the catalogue's entry, or (CPUs) a
    calibration now, which is stored and tells ``progress`` how far it has come.

    Raises:
      ConfigError: a device that is neither calibrated nor in the catalogue.
    """
    path = profile_path(devices)
    if path.is_file():
        return read_profile(path)
    kind = re.sub(r"[^a-z0-9]", "", str(devices[0].device_kind).lower())
    for name, device in DEVICES.items():
        if name.replace("-", "").removesuffix("80g").removesuffix("40g") in kind:
            fits = dataclasses.replace(device, memory=device_memory(devices[0]) or device.memory)
            return Profile(fits, Constants(), {})
    if devices[0].platform == "cpu":
        profile = calibrate(devices, progress)
        write_profile(profile, path)
        return profile
    raise ConfigError(
        f"placement=auto knows no {devices[0].device_kind!r}; run python -m hjax.launch.plan "
        "--calibrate first"
    )


def run_problem(
    config: ConfigDict,
    algorithm: type[Algorithm],
    models: dict[str, ModelConfig],
    prompt_length: int,
    cluster: Cluster,
    constants: Constants,
    float32: bool,
) -> Problem:
    """A run as a problem for the search, on whatever cluster."""
    _check_generates(algorithm)
    table = algorithm.role_table(config.algorithm)
    rollout = config.rollout
    rows = rollout.prompts * rollout.samples
    minibatch = config.algorithm.get("minibatch", 0) or rows
    flow = trace(algorithm, config.algorithm, rows // minibatch, rollout.samples, models)
    batches = [rows, minibatch]
    if config.warm_start.steps and not config.actor.path:
        batches.append(config.warm_start.batch)
    micro = max(config.actor.micro_batch, config.critic.micro_batch)
    space = SearchSpace(
        even=True,
        batches=tuple(b for b in (*batches, micro) if b),
        micro_batch=micro,
        waves=(1,),
        rematerialise=(config.model.remat != "none",),
    )
    return Problem(
        flow,
        {r: counts(m, _name(config, table[r]), table[r].scalar) for r, m in models.items()},
        Workload(prompt_length, rollout.max_response_length, rows, rollout.samples),
        cluster,
        constants,
        dataclasses.replace(
            FLOAT32 if float32 else MASTERS, bucket=rollout.transition_bucket_bytes
        ),
        space,
        {role: _offload(config, table[role]) for role in models},
    )


def _offload(config: ConfigDict, role: Role) -> Any:
    section = config.get(role.config_section)
    return section.get("offload", "none") if section is not None else "none"


def _name(config: ConfigDict, role: Role) -> str:
    """How a plan calls a role's model: its path's last part, else the role itself."""
    source = ROLES.get(role.starts_from)
    path = role_path(config, role) or (role_path(config, source) if source else "")
    return Path(path).name or role.name


def predict(problem: Problem, roles: Any) -> Candidate:
    """What the cost model expects of a run as it is set up, whatever its placement.

    Args:
      problem: the run's (``run_problem``).
      roles: the run's worker groups with their plan and layouts (hjax.run.roles.Roles).
    """
    (pool,) = problem.cluster.pools
    sets = []
    for names, devices in zip(roles.plan.placement, roles.plan.allocation, strict=True):
        place = problem.place(pool, devices)
        options = []
        for role in names:
            mesh = _mesh(roles.layouts[role], generates=role == "actor")
            space = _only(problem.space, mesh)
            flow, work = problem.dataflow, problem.work
            offload = problem.offload.get(role, "none")
            found = role_options(place, problem.models[role], flow, role, work, space, offload)
            options.append(next(o for o in found if o.mesh == mesh))
        sets.append(PlannedSet(names, pool, devices, tuple(options)))
    return Candidate(tuple(sets))


def _mesh(layouts: Any, generates: bool) -> Mesh:
    shape = layouts.train.mesh.shape
    axes = {a: shape[a] for a in ("data", "fsdp", "expert", "context")}
    whole = {a: shape[a] * shape[f"{a}_micro"] for a in ("pipe", "tensor")}
    generate = {f"generate_{a}": shape[a] if generates else 0 for a in ("pipe", "tensor")}
    return Mesh(**axes, **whole, **generate)


def _only(space: SearchSpace, mesh: Mesh) -> SearchSpace:
    """The space cut down to one mesh."""
    sharding: Any = "fsdp" if mesh.fsdp > 1 and mesh.data == 1 else "data"
    return dataclasses.replace(
        space,
        pipes=tuple({mesh.pipe, mesh.generate_pipe or 1}),
        tensors=tuple({mesh.tensor, mesh.generate_tensor or 1}),
        contexts=(mesh.context,),
        shardings=(sharding,),
        fsdp=mesh.fsdp,
        even=False,
    )
