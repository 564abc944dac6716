"""`placement=auto`: plan a run for the devices it has."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.config import count_or_zero
from hjax.controller.hosts import Hosts
from hjax.devices import Device, device_of_kind
from hjax.errors import ConfigError
from hjax.kernels.int8_cache import INT8, element_bytes
from hjax.machine import device_memory
from hjax.models import parameter_counts
from hjax.models.cost_inputs import FLOAT32, MASTERS, MeshSizes, Numerics, Workload, model_counts
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network, scalar_network
from hjax.models.remat import NONE
from hjax.planning.calibration import Progress, calibrate
from hjax.planning.constants import Constants
from hjax.planning.host_pools import cluster_from_hosts, local_cluster
from hjax.planning.plan_types import Candidate, Cluster, PlannedSet
from hjax.planning.problems import trace_dataflow
from hjax.planning.profile import MeasuredOn, Profile, profile_path, read_profile, write_profile
from hjax.planning.result import describe_result
from hjax.planning.search import MAX_SHOWN, PlanProblem, SearchResult
from hjax.planning.search_space import SearchSpace
from hjax.planning.strategies import search_strategy
from hjax.roles import ROLES, STAGES, Role
from hjax.run.backends import discover_hosts, local_devices
from hjax.run.inputs import run_inputs
from hjax.run.memory_check import AUTO, AUTO_SLOTS
from hjax.run.placement import Plan, make_plan, role_path, roles_with_devices, shared_worker_roles
from hjax.run.role_groups import is_float32, planned_models
from hjax.run.workdir import Workdir
from hjax.settings.config_checks import check_config, on_cluster
from hjax.show.format import duration
from hjax.show.progress_bar import PartsDisplay
from hjax.workers.optimizer import OptimizerConfig, load_optimizer

# Simulated devices share cores, so plans whose seconds differ by less than this share are equal to
# the cost model: no placement has more cores than another, and the rest is noise.
TIE_TOLERANCE = 0.1
# The same tolerance where a plan leaves devices idle. Calibrations measure in updates how much
# faster a device is beside idle ones; rollouts and scores gain less (11 to 19 % of a step).
ALL_DEVICES_TOLERANCE = 0.2
ALL_PLACEMENTS = 1 << 10  # more candidates than there are placements


def plan_run(
    config: ConfigDict, workdir: str | Path | None = None, progress: Progress | None = None
) -> Plan | None:
    """Plan the placement and layouts of a run: ``hjax.plan``.

    Returns None for a run on a cluster whose placement needs no search: the Trainer, which knows
    the cluster's devices, makes that plan itself.

    Args:
      config: the run's. With ``placement=auto`` a plan is searched for, using the stored profile of
        this process's devices; CPUs without one are calibrated now. Any other placement is used
        unchanged. On a cluster the plan is for the cluster's hosts.
      workdir: of an earlier start of the run. Its plan is reused if nothing that decides it has
        changed.
      progress: callback for the progress of a calibration. None: shown on standard output, unless
        ``display.enabled`` is off.

    Raises:
      ConfigError: a run that cannot be planned or does not fit.
    """
    config = check_config(config)
    algorithm = get_algorithm(config.algorithm.name)
    away = on_cluster(config)
    if away and config.placement != "auto":
        return None
    inputs = run_inputs(config, algorithm)
    placed = roles_with_devices(config, algorithm)
    planned = Workdir(workdir).recorded_plan(config) if workdir is not None else None
    if planned is not None or config.placement != "auto":
        placement = config.placement if planned is None else str(planned)
        if away:
            every = config.cluster.processes * discover_hosts(config).devices_per_process
        else:
            every = len(local_devices(config))
        return make_plan(placement, placed, every)
    _check_generates(algorithm)  # before a calibration, which takes a minute
    models = planned_models(config, algorithm, inputs)
    with PartsDisplay("calibrating", config.display.enabled) as shown:
        cluster, constants, platform = _cluster_of_run(config, progress or shown)
    float32 = is_float32(config, platform)
    length = inputs.prompt_length
    plan = auto_plan(run_problem(config, algorithm, models, length, cluster, constants, float32))
    if config.display.enabled:
        print("\n".join(auto_lines(plan)), flush=True)
    return plan


def _cluster_of_run(config: ConfigDict, progress: Progress) -> tuple[Cluster, Constants, str]:
    """The devices of a run as pools, the cost model's constants for them, and their platform.

    Raises:
      ConfigError: too few hosts, or a device that is neither calibrated nor in the catalogue.
    """
    if not on_cluster(config):
        devices = local_devices(config)
        measured = find_profile(devices, progress)
        cluster = local_cluster(measured.device, devices)
        return cluster, measured.constants, devices[0].platform
    hosts = discover_hosts(config)
    if hosts.platform == "cpu":
        measured = find_profile(local_devices(config), progress)
        known, constants = [measured.device] * len(hosts.groups), measured.constants
    else:
        known, constants = known_devices(hosts)
    processes, each = config.cluster.processes, hosts.devices_per_process
    cluster = cluster_from_hosts(hosts.groups, known, processes, each)
    return cluster, constants, hosts.platform


def known_devices(hosts: Hosts) -> tuple[list[Device], Constants]:
    """The device and constants of each group of a cluster's hosts.

    If all hosts have the same devices and a profile of one host is stored here, the profile is
    used; its network figures come from the catalogue, since a profile does not measure the network
    between hosts. Otherwise the catalogue's figures are used.

    Raises:
      ConfigError: a device that is neither calibrated nor in the catalogue, or not in the catalogue
        where that is needed.
    """
    listed = [device_of_kind(found.device_kind, found.memory) for found in hosts.devices]
    host = [hosts.devices[0]] * (max(hosts.groups[0].processes) * hosts.devices_per_process)
    path = profile_path(host)
    if len(set(hosts.devices)) == 1 and path.is_file():
        measured = read_profile(path, MeasuredOn.here(host))
        if listed[0] is not None:
            of_list = ("network", "own_network", "per_host")
            wires = {name: getattr(listed[0], name) for name in of_list}
            device = dataclasses.replace(measured.device, **wires)
            return [device] * len(listed), measured.constants
        if sum(len(group.processes) for group in hosts.groups) == 1:
            return [measured.device], measured.constants
    known = [device for device in listed if device is not None]
    if len(known) < len(listed):
        name = hosts.devices[listed.index(None)].device_kind
        raise ConfigError(
            f"placement=auto knows no {name!r}, and no network between hosts with it; add it to "
            "hjax/devices.py (docs/auto_mapping.md#devices)"
        )
    return known, Constants()


def auto_plan(problem: PlanProblem) -> Plan:
    """The fastest plan of the cost model.

    Where devices share cores, a simpler plan is preferred: all models on all devices if within
    ``ALL_DEVICES_TOLERANCE`` of the fastest (data parallel if within ``TIE_TOLERANCE`` of other
    layouts), else the plan of fewest sets within ``TIE_TOLERANCE``.

    Raises:
      ConfigError: it would not fit, with the bytes missing.
    """
    shared = any(pool.shares_cores for pool in problem.cluster.pools)
    found = search_strategy(problem, "auto", ALL_PLACEMENTS if shared else MAX_SHOWN)
    if shared and found.candidates:
        found = _simplest_first(found, _data_parallel_on_all_devices(problem))
    described = describe_result(found, problem, "auto")
    described["idle"] = _idle_reason(found, problem)
    keys = (
        "seconds", "role_seconds", "memory_bytes", "set_memory_bytes", "usable_bytes", "origins",
        "candidates", "idle",
    )  # fmt: skip
    return Plan(
        tuple(tuple(s) for s in described["placement"]),
        tuple(described["allocation"]),
        described["layouts"],
        {key: described[key] for key in keys},
        tuple(dict(s.pool.where) for s in found.fastest.sets),
        described["settings"],
    )


def _idle_reason(found: SearchResult, problem: PlanProblem) -> str:
    """Why the plan leaves devices idle; empty if it uses all."""
    best, every = found.fastest, problem.cluster.size
    if best.devices == every:
        return ""
    left = f"{every - best.devices} of {every} devices are idle"
    if len(problem.cluster.pools) > 1:
        return f"{left}: a set of models stays within one kind of devices, one slice"
    all_of_them = _fastest_on_all_devices(problem)
    if all_of_them is None:
        return f"{left}: no layout of these models and batches divides over all of them"
    longer = all_of_them.total / best.total - 1
    return f"{left}: a step on all of them takes {100 * longer:.0f} % longer by the cost model"


def _fastest_on_all_devices(problem: PlanProblem) -> Candidate | None:
    """The fastest plan with all models on all devices of the only pool; None: there is none."""
    if len(problem.cluster.pools) > 1:
        return None
    pool = dataclasses.replace(problem.cluster.pools[0], counts=(problem.cluster.size,))
    whole = dataclasses.replace(problem, cluster=Cluster((pool,)))
    candidates = search_strategy(whole, "auto", 1).candidates
    return candidates[0] if candidates else None


def _data_parallel_on_all_devices(problem: PlanProblem) -> Candidate | None:
    """``_fastest_on_all_devices``, or pure data parallelism if it is within ``TIE_TOLERANCE``:
    which of nearly equal layouts is fastest differs between calibrations."""
    best = _fastest_on_all_devices(problem)
    space = dataclasses.replace(
        problem.space, pipes=(1,), tensors=(1,), contexts=(1,), experts=(1,), shardings=("data",)
    )
    plain = _fastest_on_all_devices(dataclasses.replace(problem, space=space))
    if best is None or plain is None or plain.total > best.total * (1 + TIE_TOLERANCE):
        return best
    return plain


def auto_lines(plan: Plan) -> list[str]:
    """Lines printed before a planned run: placement, predicted seconds, why devices are idle."""
    seconds = plan.predicted["seconds"]
    lines = []
    for roles, devices in zip(plan.placement, plan.allocation, strict=True):
        layouts = {role: _layout_text(plan.layouts[role]) for role in roles}
        same = len(set(layouts.values())) == 1
        text = next(iter(layouts.values())) if same else "; ".join(map(": ".join, layouts.items()))
        lines.append(f"placement=auto: {', '.join(roles)} on {devices} devices ({text})")
    stages = ", ".join(f"{stage} {duration(seconds[stage])}" for stage in STAGES)
    origin = plan.predicted["origins"]["seconds"].partition(":")[0]
    lines.append(
        f"placement=auto: a step takes {duration(seconds['total'])} by constants that are {origin} "
        f"({stages})"
    )
    if plan.predicted["idle"]:
        lines.append(f"placement=auto: {plan.predicted['idle']}")
    return lines


def _layout_text(layout: Mapping[str, Mapping[str, int]]) -> str:
    train = ", ".join(f"{axis} {n}" for axis, n in layout["train"].items())
    generate = [f"{axis} {n}" for axis, n in layout.get("generate", {}).items() if n > 1]
    return f"{train}, generation {', '.join(generate)}" if generate else train


def _check_generates(algorithm: type[Algorithm]) -> None:
    if not algorithm.generates:
        raise ConfigError(
            f"placement=auto: {algorithm.__name__} has one model and no rollouts; use colocate"
        )


def _placement_key(candidate: Candidate) -> tuple[Any, ...]:
    return tuple((s.roles, s.devices) for s in candidate.sets)


def _simplest_first(found: SearchResult, on_all: Candidate | None) -> SearchResult:
    """Reorder candidates: the one on all devices first if it is within ``ALL_DEVICES_TOLERANCE`` of
    the fastest, else the one of fewest sets within ``TIE_TOLERANCE`` of the fastest."""
    fastest = found.fastest.total
    near = [c for c in found.candidates if c.total <= fastest * (1 + TIE_TOLERANCE)]
    simplest = min(near, key=lambda candidate: len(candidate.sets))
    if on_all is not None and on_all.total <= fastest * (1 + ALL_DEVICES_TOLERANCE):
        simplest = on_all
    alike = {_placement_key(c): c for c in (*found.candidates, simplest)}  # the last of a placement
    ordered = (simplest, *(c for c in alike.values() if c is not simplest))
    rest = tuple(tuple(s.roles for s in candidate.sets) for candidate in ordered[MAX_SHOWN:])
    return dataclasses.replace(found, candidates=ordered[:MAX_SHOWN], slower=found.slower + rest)


def find_profile(devices: Sequence[Any], progress: Progress | None = None) -> Profile:
    """The profile of these devices: the stored one, the catalogue's entry, or (CPUs) a calibration,
    which is stored and reports to ``progress``. CPUs are measured again if the stored profile is
    from another machine or other versions.

    Raises:
      ConfigError: a device that is neither calibrated nor in the catalogue, or a profile that was
        measured elsewhere.
    """
    path, here, why = profile_path(devices), MeasuredOn.here(devices), ""
    if path.is_file():
        try:
            return read_profile(path, here)
        except ConfigError as error:
            if devices[0].platform != "cpu":
                raise
            why = str(error)
    known = device_of_kind(str(devices[0].device_kind), device_memory(devices[0]))
    if known is not None:
        return Profile(known, Constants(), {})
    if devices[0].platform == "cpu":
        if why and progress is not None:
            progress(0, 1, f"again: {why}")
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
) -> PlanProblem:
    """A run's config as a problem for the search, on any cluster."""
    _check_generates(algorithm)
    table = algorithm.role_table(config.algorithm)
    rollout = config.rollout
    rows = rollout.prompts * rollout.samples
    minibatch = config.algorithm.get("minibatch", 0) or rows
    flow = trace_dataflow(
        algorithm,
        config.algorithm,
        rows // minibatch,
        rollout.samples,
        models,
        shared_workers=shared_worker_roles(config, algorithm),
    )
    batches = [rows, minibatch]
    if config.warm_start.steps and not config.actor.path:
        batches.append(config.warm_start.batch)
    # Roles that are not trained cut their batches as the actor does.
    micro = {
        role: config[table[role].config_section if table[role].trained else "actor"].micro_batch
        for role in models
    }
    space = SearchSpace(
        even=True,
        batches=tuple(dict.fromkeys(b for b in (*batches, *micro.values()) if b)),
        micro_batches=micro,
        waves=_waves(rollout.slots, rows),
        remat=_remat(config, cluster),
    )
    if count_or_zero(
        config.data.packing
    ):  # packs go through no pipeline, nor is their length split
        space = dataclasses.replace(space, pipes=(1,), contexts=(1,))
    return PlanProblem(
        flow,
        {r: model_counts(m, _name(config, table[r]), table[r].scalar) for r, m in models.items()},
        Workload(prompt_length, rollout.max_response_length, rows, rollout.samples),
        cluster,
        constants,
        dataclasses.replace(
            _numerics(config, models, float32), optimizer=_optimizer_bytes(config, table, models)
        ),
        space,
        {role: _offload(config, table[role]) for role in models},
    )


def _numerics(config: ConfigDict, models: Mapping[str, ModelConfig], float32: bool) -> Numerics:
    """The dtypes of a run: of weights and compute, and of the KV cache."""
    rollout = config.rollout
    usual = dataclasses.replace(
        FLOAT32 if float32 else MASTERS, bucket=rollout.transition_bucket_bytes
    )
    if rollout.cache_dtype != INT8:
        return usual
    return dataclasses.replace(usual, cache=element_bytes(None, models["actor"].head_dim))


def _optimizer_bytes(
    config: ConfigDict, table: Mapping[str, Role], models: Mapping[str, ModelConfig]
) -> float:
    """Bytes of optimizer state per trainable parameter, of the role whose optimizer keeps most."""
    most = 0.0
    for role, model in models.items():
        entry = table[role]
        if entry.trained:
            section = entry.config_section
            chosen = load_optimizer(config[section].optimizer, f"{section}.optimizer")
            network = (scalar_network if entry.scalar else decoder_network)(model)
            ema_decay = config[section].get("ema_decay", 0.0)
            # The adapters of a reference that follows them.
            copies = int(role == "actor" and config.actor.lora.rank and config.reference.sync_every)
            settings = OptimizerConfig(0.0, optimizer=chosen, ema_decay=ema_decay)
            kept = settings.state_bytes(network, copies=copies)
            most = max(most, kept / parameter_counts.learned_parameters(model, entry.scalar))
    return most


def _waves(slots: int, rows: int) -> tuple[int, ...]:
    """Numbers of waves in which a replica may decode its sequences, one wave after another."""
    if slots == AUTO_SLOTS:
        return SearchSpace().waves
    return (math.ceil(rows / slots) if 0 < slots < rows else 1,)


def _remat(config: ConfigDict, cluster: Cluster) -> tuple[str, ...]:
    """Rematerialisation policies to search; ``auto`` tries several only where devices report their
    memory, which simulated ones do not."""
    if config.model.remat != AUTO:
        return (config.model.remat,)
    return (NONE,) if any(pool.shares_cores for pool in cluster.pools) else SearchSpace().remat


def _offload(config: ConfigDict, role: Role) -> Any:
    section = config.get(role.config_section)
    return section.get("offload", "none") if section is not None else "none"


def _name(config: ConfigDict, role: Role) -> str:
    """A model's name in a plan: the last part of its path, or the role."""
    source = ROLES.get(role.starts_from)
    path = role_path(config, role) or (role_path(config, source) if source else "")
    return Path(path).name or role.name


def predict_run(problem: PlanProblem, roles: Any) -> Candidate:
    """The cost model's prediction for a run in its actual placement and layouts.

    Args:
      problem: the run's (``run_problem``).
      roles: the run's worker groups with their plan and layouts (hjax.run.role_groups.RoleGroups).
    """
    pool = problem.cluster.pools[0]  # of several slices each is like the others
    sets = []
    for names, devices in zip(roles.plan.placement, roles.plan.allocation, strict=True):
        place = problem.place(pool, devices)
        options = []
        for role in names:
            mesh = MeshSizes.of(roles.layouts[role].train, generates=role == "actor")
            space = _restricted_to(problem.space, mesh)
            found = problem.options(role, place, space=space, every=True)
            option = next((o for o in found if o.mesh == mesh), None)
            if option is None:
                raise ConfigError(f"the cost model has no account of the {role}'s layout {mesh}")
            options.append(option)
        sets.append(PlannedSet(names, pool, devices, tuple(options)))
    return Candidate(tuple(sets))


def _restricted_to(space: SearchSpace, mesh: MeshSizes) -> SearchSpace:
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
