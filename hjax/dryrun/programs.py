"""The programs of one training step, and what a device holds while each of them runs.

Shared by ``--dry_run``, which compiles for the devices at hand, and ``hjax.launch.compile``, which
compiles for those of a topology. Nothing is allocated.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.run.resident import device_bytes, model_workers, resident_bytes
from hjax.run.roles import Roles
from hjax.show.memory_table import largest

# Programs that workers offer and only some algorithms call, and how the call is recognised.
ON_CALL = {
    "compute_log_prob": "actor.compute_log_prob",
    "generate_greedy": "actor.generate_sequences(greedy)",
}


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """A program of a step.

    Attributes:
      role: whose it is.
      name: as ``Worker.programs`` names it.
      pool: name of the resource pool it runs on.
      rows: sequences of its batch.
      runs: times that a step runs it.
      trace: returns its jax.stages.Traced of abstract arguments.
      loop_trips: trips of its loops whose number the program does not tell (decoding).
    """

    role: str
    name: str
    pool: str
    rows: int
    runs: int
    trace: Callable[[], Any]
    loop_trips: int | None = None


def step_programs(
    config: ConfigDict, algorithm: type[Algorithm], roles: Roles, prompt_length: int
) -> list[StepProgram]:
    """Every program that a step of an algorithm runs on devices, in the order of its roles."""
    rows = config.rollout.prompts * config.rollout.samples
    if not algorithm.generates:
        rows = config.warm_start.batch
    minibatch = config.algorithm.get("minibatch", 0) or rows
    minibatch = minibatch if algorithm.generates else rows
    updates = config.algorithm.get("epochs", 1) * (rows // minibatch)
    called = calls(algorithm)
    found = []
    for role, worker in model_workers(roles):
        pool = roles.pools[role].name
        learned = dict(worker.programs(minibatch, prompt_length))
        for name, trace in worker.programs(rows, prompt_length):
            if name == "update":
                found.append(StepProgram(role, name, pool, minibatch, updates, learned[name]))
            elif algorithm.generates and ON_CALL.get(name, name) in {name, *called}:
                # The first token is drawn from the prompt, before the loop.
                trips = config.rollout.max_response_length - 1
                loop = trips if name.startswith("generate") else None
                found.append(StepProgram(role, name, pool, rows, 1, trace, loop))
    return found


def calls(algorithm: type[Algorithm]) -> set[str]:
    """Calls that an algorithm's methods make on its roles, read off their source.

    Returns:
      ``role.method``, and ``role.method(greedy)`` where the argument ``greedy`` is given.
    """
    found = set()
    for _, method in inspect.getmembers(algorithm, inspect.isfunction):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError):  # made at run time: nothing to read
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            role = node.func.value
            if isinstance(role, ast.Attribute) and isinstance(role.value, ast.Name):
                if role.value.id == "self":
                    greedy = any(keyword.arg == "greedy" for keyword in node.keywords)
                    found.add(f"{role.attr}.{node.func.attr}" + "(greedy)" * greedy)
    return found


def held_beside(program: StepProgram, roles: Roles) -> tuple[dict[str, int], dict[str, int]]:
    """What else is kept while a program runs and is none of its arguments.

    Returns:
      bytes per device in its memory, and in the host's, by whose they are.
    """
    held: dict[str, int] = {}
    away: dict[str, int] = {}
    phase = phase_of(program.name)
    for role, kinds in resident_bytes(roles).items():
        if roles.pools[role].name != program.pool:
            continue
        worker = roles.groups[role].worker
        if role == program.role:
            beside = worker.beside(program.name)
            kinds = {kind: device_bytes(tree) for kind, tree in beside.items()}
        # Trained roles take turns in updates and stay until these end.
        called = role == program.role or (phase == "update" and "optimizer" in kinds)
        waiting = worker.away(phase, called)
        for kind, size in kinds.items():
            if size:
                (away if kind in waiting else held)[f"{role} {kind}"] = size
    return held, away


def phase_of(program: str) -> str:
    """The phase in which a program of ``Worker.programs`` runs, as the controller names it."""
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


def memory_of(compiled: Any) -> dict[str, int]:
    """What a compiled program needs of each device, in bytes.

    ``total_bytes`` counts arguments, outputs that are not written over arguments, temporaries and
    code. The compiler's own ``peak_bytes`` may be below it, where temporaries of different times
    share a place with outputs.
    """
    analysis = compiled.memory_analysis()
    parts = {
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "code_bytes": analysis.generated_code_size_in_bytes,
    }
    peak = analysis.peak_memory_in_bytes
    return {**parts, "total_bytes": sum(parts.values()), "peak_bytes": peak}


def add_held(record: dict[str, Any], program: StepProgram, roles: Roles) -> dict[str, Any]:
    """The record of a program with what else its devices hold.

    Adds ``pool``, ``held_bytes`` (by whose), ``offloaded_bytes`` (in the host's memory, by whose)
    and ``sum_bytes``: what is held and the program's own.
    """
    held, away = held_beside(program, roles)
    total = record["total_bytes"] + sum(held.values())
    beside = {"held_bytes": held, "offloaded_bytes": away}
    return {**record, "pool": program.pool, **beside, "sum_bytes": total}


def any_offloaded(records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some state waits in the host's memory during some program."""
    return any(record["offloaded_bytes"] for record in records)


def offload_savings(records: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What offloading takes off the peak: the largest sum with it, without it, and between."""
    peak = largest(records)["sum_bytes"]
    without = max(r["sum_bytes"] + sum(r["offloaded_bytes"].values()) for r in records)
    return {"peak_bytes": peak, "peak_without_bytes": without, "saved_bytes": without - peak}
