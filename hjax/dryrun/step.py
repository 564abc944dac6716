"""A step compiled for a topology: every program's memory, collectives and FLOPs."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.dryrun.compilation import ProgramReader, axis_rings, compile_program, mesh_devices
from hjax.dryrun.programs import (
    AbstractWorkers,
    StepProgram,
    abstract_workers,
    add_held,
    resident_bytes,
    settings_records,
    step_programs,
    transition_formula,
)
from hjax.dryrun.shape_inputs import read_shape, shape_inputs
from hjax.dryrun.topologies import Topology, find_topology
from hjax.kernels.verdict import known_or_assumed
from hjax.run.placement import Plan, plan_from_config
from hjax.run.role_groups import RoleGroups, describe_roles
from hjax.show.format import duration, size
from hjax.show.memory_table import largest, verdict


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What to compile, and for which devices.

    Attributes:
      name: of the config.
      config: the run's.
      topology: such as ``v5p:4x4x4``.
      level: ``O0`` to ``O3``, or empty for the compiler's own.
      cache: folder of earlier results, or None.
    """

    name: str
    config: ConfigDict
    topology: str
    level: str
    cache: Path | None


@dataclasses.dataclass(frozen=True)
class PreparedStep:
    """A step whose programs can be compiled.

    Attributes:
      request: config and topology.
      topology: devices and their compiler.
      plan: placement of the roles.
      roles: as in a run.
      rehearsal: their workers, with shapes in place of arrays.
      programs: in the order of a step.
      remark: why the programs may not be those of a step; empty: they are.
      prompt_length: tokens.
      forms: one line that says which kernels and collectives are assumed right.
    """

    request: CompileRequest
    topology: Topology
    plan: Plan
    roles: RoleGroups
    rehearsal: AbstractWorkers
    programs: list[StepProgram]
    remark: str
    prompt_length: int
    forms: str = ""


def prepare_step(request: CompileRequest) -> PreparedStep:
    """Build the workers of a step on a topology's devices.

    Raises:
      ConfigError: a topology that is not known, or a config that does not fit it.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # see hjax/dryrun/compilation.py
    if request.level:
        jax.config.update("jax_optimization_level", request.level)
    config = request.config
    algorithm = get_algorithm(config.algorithm.name)
    inputs = shape_inputs(config, algorithm.source)
    topology = find_topology(request.topology)
    plan = plan_from_config(config, algorithm, len(topology.devices))
    memory, platform = topology.memory_bytes, topology.platform
    assumed = known_or_assumed(platform, topology.device_kind)
    roles = describe_roles(
        config, algorithm, inputs, plan, platform, read_shape, memory, forms=assumed.forms
    )
    rehearsal = abstract_workers(roles, topology.devices)
    programs, remark = step_programs(config, algorithm, rehearsal, inputs.prompt_length)
    return PreparedStep(
        request,
        topology,
        plan,
        roles,
        rehearsal,
        programs,
        remark,
        inputs.prompt_length,
        assumed.remark,
    )


def compile_step(request: CompileRequest, console: Any) -> dict[str, Any]:
    """Compile every program of a step, printing a line for each; returns what ``--json`` prints."""
    return compile_prepared(prepare_step(request), console)


def compile_prepared(
    step: PreparedStep, console: Any, reader: ProgramReader | None = None
) -> dict[str, Any]:
    """``compile_step`` for a prepared step; ``reader`` as of ``compile_program``."""
    request, topology, roles = step.request, step.topology, step.roles
    for line in filter(None, (step.forms, step.remark)):
        console.print(line, markup=False)
    for role, chosen in roles.remat.items():
        console.print(f"{role}: model.remat=auto is {chosen.why}")
    if roles.slots is not None:
        console.print(f"rollout.slots=-1: {roles.slots.why}")
    records = []
    for number, program in enumerate(step.programs, 1):
        name = f"{program.role}.{program.name}"
        with console.status(f"compiling {name} ({number} of {len(step.programs)})"):
            record = compile_program(
                program,
                topology,
                devices=step.plan.allocation[program.set_number],
                level=request.level,
                cache=request.cache,
                placed=mesh_devices(step.rehearsal, program.role),
                reader=reader,
            )
        records.append(add_held(record, program, step.rehearsal))
        console.print(f"{number:>3}/{len(step.programs)} {name:<28} {_how(record)}")
    return _description(step, records)


def _description(step: PreparedStep, records: list[dict[str, Any]]) -> dict[str, Any]:
    """The step as data, including its programs' records."""
    roles, rehearsal, topology = step.roles, step.rehearsal, step.topology
    most, memory = largest(records), topology.memory_bytes
    return {
        "config": step.request.name,
        "topology": {
            "name": topology.name,
            "platform": topology.platform,
            "device_kind": topology.device_kind,
            "devices": len(topology.devices),
            "memory_bytes": memory,
        },
        "versions": topology.versions,
        **({"forms": step.forms} if step.forms else {}),
        "optimization": step.request.level or "default",
        "placement": [list(members) for members in step.plan.placement],
        **settings_records(roles, rehearsal, records),
        "resident_bytes": resident_bytes(rehearsal),
        "rings": axis_rings(rehearsal),
        "programs": records,
        **_transition(records, rehearsal),
        "step": {
            "flops": sum(record["flops"] * record["runs"] for record in records),
            **{
                key: sum(r.get(key, 0) * r["runs"] for r in records)
                for key in ("received_bytes", "hop_bytes", "listed_hop_bytes", "network_bytes")
                if key == "received_bytes" or any(key in r for r in records)
            },
            "largest": f"{most['role']}.{most['program']}",
            "sum_bytes": most["sum_bytes"],
            "missing_bytes": max(0, most["sum_bytes"] - memory),
            "verdict": verdict(records, memory),
        },
        "fits": most["sum_bytes"] <= memory,
    }


def _transition(records: list[dict[str, Any]], rehearsal: AbstractWorkers) -> dict[str, Any]:
    """Bytes received by the actor's transition (reshard to the generate layout), and by formula."""
    moves = [r for r in records if r["role"] == "actor" and r["program"].startswith("transition")]
    if not moves or any("refused_bytes" in record for record in moves):
        return {}
    received = sum(record["received_bytes"] for record in moves)
    formula = transition_formula(rehearsal.workers["actor"])
    return {"transition": {"received_bytes": received, "formula_bytes": formula}}


def _how(record: dict[str, Any]) -> str:
    taken = duration(record["seconds"])
    done = f"kept from before ({taken} then)" if record["kept"] else taken
    if "refused_bytes" in record:
        return f"{done}, refused: it needs {size(record['refused_bytes'])} per device"
    return done
