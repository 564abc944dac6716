"""The programs of one training step, and the memory of a device while each of them runs.

``--dry_run`` compiles them for the local devices, ``hjax.launch.compile`` for a topology. Nothing
is allocated.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import ConfigError
from hjax.kernels.int8_cache import INT8
from hjax.models import parameter_counts
from hjax.run.dataflow import StepCall, step_calls
from hjax.run.placement import pool_name
from hjax.run.role_groups import RoleGroups
from hjax.sharding.interconnect import partition_devices
from hjax.sharding.layout import shard_bytes
from hjax.show.memory_table import largest
from hjax.workers.generating_worker import GeneratingWorker
from hjax.xla.abstract_program import AbstractProgram


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A program of a step.

    Attributes:
      role: that runs it.
      set_number: number of the set of roles on whose devices it runs.
      rows: sequences of its batch.
      runs: times per step.
      program: from the role's worker.
    """

    role: str
    set_number: int
    rows: int
    runs: int
    program: AbstractProgram

    @property
    def name(self) -> str:
        """As ``ModelWorker.programs`` names it."""
        return self.program.name


@dataclasses.dataclass(frozen=True)
class AbstractWorkers:
    """Workers of a run without arrays, built only to describe their programs.

    Attributes:
      roles: of the run.
      workers: by role, of the roles with devices and programs.
    """

    roles: RoleGroups
    workers: dict[str, Any]


def abstract_workers(roles: RoleGroups, devices: Sequence[Any]) -> AbstractWorkers:
    """Build the workers of a run without arrays, on devices that may be abstract.

    Raises:
      ConfigError: a layout that does not fit its model.
    """
    workers = {}
    plan = roles.plan
    parts = partition_devices(devices, plan.allocation)
    for members, here in zip(plan.placement, parts, strict=True):
        for role in members:
            build = roles.builds[role]
            arguments = [a.on(here) if hasattr(a, "on") else a for a in build.arguments]
            if hasattr(build.worker, "programs"):
                workers[role] = build.worker(*arguments, **build.options)
    # In the order of the roles, not of the placement.
    return AbstractWorkers(roles, {role: workers[role] for role in roles.builds if role in workers})


def step_programs(
    config: ConfigDict, algorithm: type[Algorithm], rehearsal: AbstractWorkers, prompt_length: int
) -> tuple[list[StepProgram], str]:
    """Every program that a step of an algorithm runs on devices, in the order of its roles.

    Returns:
      the programs, and a remark: empty, or why all programs of the workers are counted (the calls
      of the step cannot be traced).
    """
    if not algorithm.sequences:
        remark = "the programs of networks of your own are compiled at their first call: here are "
        return [], remark + "parameters and optimizer states alone"
    rows = config.rollout.prompts * config.rollout.samples
    samples = config.rollout.samples
    if not algorithm.generates:
        rows, samples = config.warm_start.batch, 1
    minibatch = config.algorithm.get("minibatch", 0) or rows
    minibatch = minibatch if algorithm.generates else rows
    updates = config.algorithm.get("epochs", 1) * (rows // minibatch)
    called: dict[tuple[str, str], float] | None = None  # and rows, as a share of the step's
    remark = ""
    try:
        calls = step_calls(
            algorithm,
            config.algorithm,
            rows // minibatch,
            samples,
            shared_workers=rehearsal.roles.shared_workers,
        )
        called = {}
        for each in calls:
            key = answering_role(each, rehearsal.roles), program_name(each)
            called[key] = max(called.get(key, 0.0), each.rows)
    except ConfigError as error:
        remark = f"{error}; so every program that the workers have is counted"
    found = []
    for role, worker in rehearsal.workers.items():
        number = rehearsal.roles.set_index(role)
        made = {rows: {each.name: each for each in worker.programs(rows, prompt_length)}}
        for name, program in made[rows].items():
            # Moving the parameters belongs to generation.
            call = "generate" if name.startswith("transition") else program.call
            if called is not None and (role, call) not in called:
                continue
            # A batch may have more rows than were sampled, such as a demonstration for each.
            share = 0.0 if called is None else called[role, call]
            update = call == "update"
            own = max(minibatch if update else rows, round(share * rows))
            if own not in made:
                made[own] = {each.name: each for each in worker.programs(own, prompt_length)}
            program = made[own][name]
            found.append(
                StepProgram(role, number, own, updates if update else program.runs, program)
            )
    return found, remark


def answering_role(call: StepCall, roles: RoleGroups) -> str:
    """The role whose worker runs a call: a separate rollout worker generates for the actor."""
    answers = call.role == "actor" and call.method == "generate_sequences"
    return roles.generating_role if answers else call.role


def program_name(call: StepCall) -> str:
    """The name in ``ModelWorker.programs`` of a call's program."""
    if call.phase == "update":
        return "update"
    if call.phase == "generate":
        return "generate_greedy" if call.greedy else "generate"
    return call.method


def resident_bytes(rehearsal: AbstractWorkers) -> dict[str, dict[str, int]]:
    """Bytes per device that each role keeps between calls, by role and kind of state."""
    return {
        role: {kind: shard_bytes(tree) for kind, tree in worker.abstract_state().items()}
        for role, worker in rehearsal.workers.items()
    }


def cache_records(rehearsal: AbstractWorkers) -> dict[str, dict[str, Any]]:
    """KV cache of each generating role: its ``dtype``, and ``bytes_per_token`` over all layers and
    heads."""
    found = {}
    for role, worker in rehearsal.workers.items():
        if isinstance(worker, GeneratingWorker):
            kept = worker.generator.kv_dtype
            token = parameter_counts.cache_bytes(worker.network.config, worker.cache_element_bytes)
            name = INT8 if kept is None else np.dtype(kept).name
            found[role] = {"dtype": name, "bytes_per_token": round(token)}
    return found


def held_beside(
    program: StepProgram, rehearsal: AbstractWorkers
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes kept while a program runs that are not its arguments.

    Returns:
      bytes per device in device memory, and in host memory, by role and kind of state.
    """
    held: dict[str, int] = {}
    offloaded: dict[str, int] = {}
    phase = phase_of(program.name)
    for role, kinds in resident_bytes(rehearsal).items():
        if rehearsal.roles.set_index(role) != program.set_number:
            continue
        worker = rehearsal.workers[role]
        if role == program.role:
            beside = worker.resident_state(program.name)
            kinds = {kind: shard_bytes(tree) for kind, tree in beside.items()}
        # Trained roles update in turn, and their state stays until all updates are done.
        called = role == program.role or (phase == "update" and "optimizer" in kinds)
        waiting = worker.offloaded_state(phase, called)
        if role == program.role:
            kinds |= {kind: shard_bytes(x) for kind, x in program.program.resident.items()}
        for kind, size in kinds.items():
            if size:
                (offloaded if kind in waiting else held)[f"{role} {kind}"] = size
    return held, offloaded


def phase_of(program: str) -> str:
    """The controller's phase in which a program of ``ModelWorker.programs`` runs."""
    if program.startswith(("generate", "transition")):
        return "generate"
    return "update" if program == "update" else "prepare"


def transition_formula(worker: Any) -> float:
    """Bytes per device that HybridFlow's transition of an actor's parameters receives.

    M (1 / (p_g t_g) - 1 / (p t f)), with M in the dtype that generation reads (arXiv 2409.19256,
    table 2; f, the parts of FSDP, is not in it).
    """
    network, train, generate = worker.network, worker.layouts.train, worker.layouts.generate
    casts = jax.tree.leaves(network.compute_dtypes(worker.context.compute.dtype))
    shapes = jax.tree.leaves(network.shapes)
    model = sum(math.prod(x.shape) * t.itemsize for x, t in zip(shapes, casts, strict=True))

    def parts(layout: Any) -> int:
        return math.prod(layout.shard_count(name) for name in ("layers", "heads", "embed"))

    return model * (1 / parts(generate) - 1 / parts(train))


def memory_of(compiled: Any, by_peak: bool = False) -> dict[str, int]:
    """Memory of a compiled program per device, in bytes.

    ``total_bytes`` is the sum of arguments, outputs that are not aliased to arguments, temporaries
    and code.

    Args:
      by_peak: ``total_bytes`` is the compiler's peak (arguments and outputs included) and the code
        instead. The TPU compiler accepts programs by their peak; its temporaries may be more, for
        they count buffers that reuse the memory of others.
    """
    analysis = compiled.memory_analysis()
    parts = {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "code_bytes": analysis.generated_code_size_in_bytes,
    }
    peak = analysis.peak_memory_in_bytes
    total = peak + parts["code_bytes"] if by_peak and peak else sum(parts.values())
    return {**parts, "total_bytes": total, "peak_bytes": peak}


def add_held(row: dict[str, Any], program: StepProgram, workers: AbstractWorkers) -> dict[str, Any]:
    """The record of a program, with what else its devices hold.

    Adds ``pool``, ``held_bytes`` and (in host memory) ``offloaded_bytes``, both by role and kind of
    state, and ``sum_bytes``: held bytes and the program's own.
    """
    held, offloaded = held_beside(program, workers)
    pool = pool_name(workers.roles.plan, program.set_number)
    total = row["total_bytes"] + sum(held.values())
    beside = {"held_bytes": held, "offloaded_bytes": offloaded}
    return {**row, "pool": pool, **beside, "sum_bytes": total}


def settings_records(
    roles: RoleGroups, rehearsal: AbstractWorkers, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Automatic settings, empty ones left out: what ``model.remat=auto`` chose (``remat``), which
    models are unrolled (``unroll_layers``), ``cache`` (``cache_records``), what
    ``rollout.slots=-1`` chose (``slots``), and ``offload`` (``offload_savings``)."""
    offloads = any(record["offloaded_bytes"] for record in records)
    found = {
        "remat": {role: chosen.record() for role, chosen in roles.remat.items()},
        "unroll_layers": roles.unrolled,
        "cache": cache_records(rehearsal),
        "slots": roles.slots.record() if roles.slots is not None else {},
        "offload": offload_savings(records) if offloads else {},
    }
    return {name: value for name, value in found.items() if value}


def offload_savings(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What offloading saves: the largest sum of bytes with it, without it, and the difference."""
    peak = largest(records)["sum_bytes"]
    without = max(r["sum_bytes"] + sum(r["offloaded_bytes"].values()) for r in records)
    return {"peak_bytes": peak, "peak_without_bytes": without, "saved_bytes": without - peak}
