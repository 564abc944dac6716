"""A step compiled for a topology: every program's memory, collectives and FLOPs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import get_algorithm
from hjax.dryrun.compilation import axis_rings, compile_program, limits_of, placed_of, speeds
from hjax.dryrun.minimum import minimum
from hjax.dryrun.programs import (
    Rehearsal,
    add_held,
    any_offloaded,
    cache_records,
    offload_savings,
    rehearse,
    resident_bytes,
    step_programs,
    transition_formula,
)
from hjax.dryrun.shape_inputs import read_shape, shape_inputs
from hjax.dryrun.topologies import find_topology
from hjax.run.roles import describe_roles, placed
from hjax.show.format import duration, size
from hjax.show.memory_table import largest, verdict


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """What is to be compiled for which devices.

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


def compile_step(asked: CompileRequest, console: Any) -> dict[str, Any]:
    """Compile every program of a step, a line of progress each; returns what ``--json`` prints."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # see hjax/dryrun/compilation.py
    if asked.level:
        jax.config.update("jax_optimization_level", asked.level)
    config = asked.config
    algorithm = get_algorithm(config.algorithm.name)
    inputs = shape_inputs(config, algorithm.source)
    topology = find_topology(asked.topology)
    devices, limits = topology.devices, limits_of(topology)
    plan = placed(config, algorithm, len(devices))
    memory, platform = topology.memory_bytes, topology.platform
    roles = describe_roles(config, algorithm, inputs, plan, platform, read_shape, memory)
    rehearsal = rehearse(roles, devices)
    records = []
    programs, remark = step_programs(config, algorithm, rehearsal, inputs.prompt_length)
    if remark:
        console.print(remark)
    for role, chosen in roles.remat.items():
        console.print(f"{role}: model.remat=auto is {chosen.why}")
    if roles.slots is not None:
        console.print(f"rollout.slots=-1: {roles.slots.why}")
    for number, program in enumerate(programs, 1):
        name = f"{program.role}.{program.name}"
        with console.status(f"compiling {name} ({number} of {len(programs)})"):
            count = plan.allocation[program.set_number]
            order = placed_of(rehearsal, program.role)
            record = compile_program(program, topology, count, asked.level, asked.cache, order)
        if record.get("roofline") and limits is not None:
            within = limits_of(topology, order) or limits
            least = minimum(program, rehearsal.workers[program.role], inputs.prompt_length, within)
            record |= {"minimum": least} | speeds(record, program, rehearsal, least, limits)
        records.append(add_held(record, program, rehearsal))
        console.print(f"{number:>3}/{len(programs)} {name:<28} {_how(record)}")
    resident = resident_bytes(rehearsal)
    moved = _transition(records, rehearsal)
    most = largest(records)
    return {
        "config": asked.name,
        "topology": {
            "name": topology.name,
            "platform": topology.platform,
            "device_kind": topology.device_kind,
            "devices": len(topology.devices),
            "memory_bytes": memory,
        },
        "versions": topology.versions,
        "optimization": asked.level or "default",
        "placement": [list(members) for members in plan.placement],
        **({"remat": {r: c.record() for r, c in roles.remat.items()}} if roles.remat else {}),
        **({"unroll_layers": roles.unrolled} if roles.unrolled else {}),
        **({"cache": cache} if (cache := cache_records(rehearsal)) else {}),
        **({"slots": roles.slots.record()} if roles.slots is not None else {}),
        "resident_bytes": resident,
        "rings": axis_rings(rehearsal),
        "programs": records,
        **moved,
        **({"offload": offload_savings(records)} if any_offloaded(records) else {}),
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
            **_predicted(records),
        },
        "fits": most["sum_bytes"] <= memory,
    }


def _predicted(records: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a step by data sheet, its programs one after another; none if one was refused."""
    found = [record.get("roofline") for record in records]
    if not all(found):
        return {}
    seconds = sum(r["roofline"]["seconds"] * r["runs"] for r in records)
    return {"predicted_seconds": seconds}


def _transition(records: list[dict[str, Any]], rehearsal: Rehearsal) -> dict[str, Any]:
    """What the actor's parameters receive on their way to the generate layout, and the formula."""
    ways = [r for r in records if r["role"] == "actor" and r["program"].startswith("transition")]
    if not ways or any("refused_bytes" in record for record in ways):
        return {}
    received = sum(record["received_bytes"] for record in ways)
    formula = transition_formula(rehearsal.workers["actor"])
    return {"transition": {"received_bytes": received, "formula_bytes": formula}}


def _how(record: dict[str, Any]) -> str:
    taken = duration(record["seconds"])
    done = f"kept from before ({taken} then)" if record["kept"] else taken
    if "refused_bytes" in record:
        return f"{done}, refused: it needs {size(record['refused_bytes'])} per device"
    return done
