"""The programs of one training step, and what a device holds while each of them runs.

Shared by ``--dry_run``, which compiles for the devices at hand, and ``hjax.launch.compile``, which
compiles for those of a topology. Nothing is allocated.
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
from hjax.run.placement import set_name
from hjax.run.role_groups import RoleGroups
from hjax.sharding.interconnect import cut
from hjax.sharding.layout import shard_bytes
from hjax.show.memory_table import largest
from hjax.workers.generating_worker import GeneratingWorker
from hjax.xla.abstract_program import AbstractProgram


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A program of a step.

    Attributes:
      role: whose it is.
      set_number: of the set of roles on whose devices it runs.
      rows: sequences of its batch.
      runs: times that a step runs it.
      program: as the role's worker has it.
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
    """The workers of a run that are made only to be asked about their programs.

    Attributes:
      roles: of the run.
      workers: by role with devices and programs; they hold no arrays.
    """

    roles: RoleGroups
    workers: dict[str, Any]


def rehearse(roles: RoleGroups, devices: Sequence[Any]) -> AbstractWorkers:
    """Make the workers of a run on devices that may be abstract.

    Raises:
      ConfigError: a layout that does not fit its model.
    """
    workers = {}
    plan = roles.plan
    for members, here in zip(plan.placement, cut(devices, plan.allocation), strict=True):
        for role in members:
            build = roles.builds[role]
            arguments = [a.on(here) if hasattr(a, "on") else a for a in build.arguments]
            if hasattr(build.worker, "programs"):
                workers[role] = build.worker(*arguments, **build.options)
    # In the order of the roles, however they are placed.
    return AbstractWorkers(roles, {role: workers[role] for role in roles.builds if role in workers})


def step_programs(
    config: ConfigDict, algorithm: type[Algorithm], rehearsal: AbstractWorkers, prompt_length: int
) -> tuple[list[StepProgram], str]:
    """Every program that a step of an algorithm runs on devices, in the order of its roles.

    Returns:
      the programs, and a remark: empty, or why all that the workers have are counted, because the
      calls of the step cannot be read off.
    """
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
            served=rehearsal.roles.served,
        )
        called = {}
        for each in calls:
            key = whose(each, rehearsal.roles), program_of(each)
            called[key] = max(called.get(key, 0.0), each.rows)
    except ConfigError as error:
        remark = f"{error}; so every program that the workers have is counted"
    found = []
    for role, worker in rehearsal.workers.items():
        number = rehearsal.roles.set_of(role)
        made = {rows: {each.name: each for each in worker.programs(rows, prompt_length)}}
        for name, program in made[rows].items():
            # Moving the parameters belongs to generation.
            call = "generate" if name.startswith("transition") else program.call
            if called is not None and (role, call) not in called:
                continue
            # A batch may have more rows than were drawn: a demonstration beside each.
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


def whose(call: StepCall, roles: RoleGroups) -> str:
    """The role whose worker a call reaches: a rollout that stands apart generates for the actor."""
    answers = call.role == "actor" and call.method == "generate_sequences"
    return roles.generates if answers else call.role


def program_of(call: StepCall) -> str:
    """What ``ModelWorker.programs`` names the program of a call."""
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
    """Of the keys and values of each role that generates their ``dtype``, and ``bytes_per_token``
    of one token in all layers and heads."""
    found = {}
    for role, worker in rehearsal.workers.items():
        if isinstance(worker, GeneratingWorker):
            kept = worker.generator.kept_dtype
            token = parameter_counts.cache_bytes(worker.network.config, worker.cache_element_bytes)
            name = INT8 if kept is None else np.dtype(kept).name
            found[role] = {"dtype": name, "bytes_per_token": round(token)}
    return found


def held_beside(
    program: StepProgram, rehearsal: AbstractWorkers
) -> tuple[dict[str, int], dict[str, int]]:
    """What else is kept while a program runs and is none of its arguments.

    Returns:
      bytes per device in its memory, and in the host's, by whose they are.
    """
    held: dict[str, int] = {}
    away: dict[str, int] = {}
    phase = phase_of(program.name)
    for role, kinds in resident_bytes(rehearsal).items():
        if rehearsal.roles.set_of(role) != program.set_number:
            continue
        worker = rehearsal.workers[role]
        if role == program.role:
            beside = worker.resident_state(program.name)
            kinds = {kind: shard_bytes(tree) for kind, tree in beside.items()}
        # Trained roles take turns in updates and stay until these end.
        called = role == program.role or (phase == "update" and "optimizer" in kinds)
        waiting = worker.offloaded_state(phase, called)
        if role == program.role:
            kinds |= {kind: shard_bytes(x) for kind, x in program.program.beside.items()}
        for kind, size in kinds.items():
            if size:
                (away if kind in waiting else held)[f"{role} {kind}"] = size
    return held, away


def phase_of(program: str) -> str:
    """The phase in which a program of ``ModelWorker.programs`` runs, as the controller names it."""
    if program.startswith(("generate", "transition")):
        return "generate"
    return "update" if program == "update" else "prepare"


def transition_formula(worker: Any) -> float:
    """Bytes that HybridFlow's transition receives per device, of all of an actor's parameters.

    M (1 / (p_g t_g) - 1 / (p t f)), with M in the dtype that generation reads (arXiv 2409.19256,
    table 2; f, the parts of FSDP, is not in it).
    """
    network, train, generate = worker.network, worker.layouts.train, worker.layouts.generate
    casts = jax.tree.leaves(network.read_dtypes(worker.context.compute.dtype))
    shapes = jax.tree.leaves(network.shapes)
    model = sum(math.prod(x.shape) * t.itemsize for x, t in zip(shapes, casts, strict=True))

    def parts(layout: Any) -> int:
        return layout.ways("layers") * layout.ways("heads") * layout.ways("embed")

    return model * (1 / parts(generate) - 1 / parts(train))


def memory_of(compiled: Any, by_peak: bool = False) -> dict[str, int]:
    """What a compiled program needs of each device, in bytes.

    ``total_bytes`` is arguments, outputs that are not written over arguments, temporaries and code
    together.

    Args:
      by_peak: it is the compiler's peak instead (arguments and outputs in it) and the code.
        Temporaries alone may be more: a TPU's compiler counts in them what takes another's place,
        and accepts programs by their peak.
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


def add_held(
    record: dict[str, Any], program: StepProgram, rehearsal: AbstractWorkers
) -> dict[str, Any]:
    """The record of a program with what else its devices hold.

    Adds ``pool``, ``held_bytes`` (by whose), ``offloaded_bytes`` (in the host's memory, by whose)
    and ``sum_bytes``: what is held and the program's own.
    """
    held, away = held_beside(program, rehearsal)
    pool = set_name(rehearsal.roles.plan, program.set_number)
    total = record["total_bytes"] + sum(held.values())
    beside = {"held_bytes": held, "offloaded_bytes": away}
    return {**record, "pool": pool, **beside, "sum_bytes": total}


def settings_records(
    roles: RoleGroups, rehearsal: AbstractWorkers, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Where there is something to say: what ``model.remat=auto`` chose (``remat``), which models
    are unrolled (``unroll_layers``), ``cache`` (``cache_records``), what ``rollout.slots=-1`` is
    (``slots``), and ``offload`` (``offload_savings``)."""
    away = any(record["offloaded_bytes"] for record in records)
    found = {
        "remat": {role: chosen.record() for role, chosen in roles.remat.items()},
        "unroll_layers": roles.unrolled,
        "cache": cache_records(rehearsal),
        "slots": roles.slots.record() if roles.slots is not None else {},
        "offload": offload_savings(records) if away else {},
    }
    return {name: value for name, value in found.items() if value}


def offload_savings(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What offloading takes off the peak: the largest sum with it, without it, and between."""
    peak = largest(records)["sum_bytes"]
    without = max(r["sum_bytes"] + sum(r["offloaded_bytes"].values()) for r in records)
    return {"peak_bytes": peak, "peak_without_bytes": without, "saved_bytes": without - peak}
