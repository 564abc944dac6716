"""`plan --compile`: compile a plan's programs for its cluster and check that they fit."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from hjax.dryrun.programs import phase_of
from hjax.dryrun.step import CompileRequest, compile_step
from hjax.errors import ConfigError
from hjax.files import cache_folder, json_line
from hjax.planning.plan_types import Candidate, Cluster, PlannedSet
from hjax.planning.result import describe_candidate, describe_result
from hjax.planning.search import PlanProblem, SearchResult
from hjax.roles import STAGES
from hjax.show.format import duration, size
from hjax.temporary_folders import TemporaryFolder

# The planner's stage of a controller's phase.
STAGE = dict(zip(("generate", "prepare", "update"), STAGES, strict=True))


def compile_plan(
    found: SearchResult,
    problem: PlanProblem,
    strategy: str,
    config: ConfigDict,
    name: str,
    console: Any,
) -> dict[str, Any]:
    """Find the fastest plan whose compiled programs fit into memory.

    Args:
      found: candidates, fastest first.
      problem: that they solve.
      config: the run's, called ``name``, whose programs are compiled under each plan's placement
        and layouts until one fits.
      console: for a line of progress per program.

    Returns:
      as ``describe_result``, and ``compiled``: ``topology``, ``versions``, ``memory_bytes`` of a
      device, ``programs`` as of ``program_rows``.

    Raises:
      ConfigError: none fits, with the bytes missing; several kinds of devices.
    """
    topology = topology_name(problem.cluster)
    refused: dict[int, int] = {}
    for number, candidate in enumerate(found.candidates):
        compiled = _compile(candidate, problem, config, name, topology, console)
        missing = compiled["step"]["missing_bytes"]
        if missing:
            refused[number] = missing
            console.print(f"{_sets(candidate)}: {size(missing)} are missing, says the compiler")
            continue
        described = describe_result(_first(found, number), problem, strategy)
        for lost, short in refused.items():
            described["candidates"][lost + 1]["reason"] = f"does not fit: {size(short)} missing"
        described["origins"]["memory_bytes"] = "compiled"
        described["compiled"] = {
            "topology": topology,
            "versions": compiled["versions"],
            "memory_bytes": compiled["topology"]["memory_bytes"],
            "programs": program_rows(candidate, compiled["programs"]),
        }
        return described
    least = min(refused.values(), default=0)
    raise ConfigError(
        f"none of the {len(refused)} best plans, compiled for {topology}, fits into its memory: "
        f"{size(least)} per device are missing at least; take more devices, or lower "
        "rollout.prompts or micro_batch, or set model.remat=full"
    )


def topology_name(cluster: Cluster) -> str:
    """A cluster's name as a topology of `hjax.launch.compile`.

    Raises:
      ConfigError: several pools.
    """
    if len(cluster.pools) > 1:
        raise ConfigError(f"--compile takes one kind of devices, not {cluster.name}")
    (pool,) = cluster.pools
    return pool.name if pool.shape else f"{pool.device.name}:{pool.hosts}x{pool.per_host}"


def program_rows(candidate: Candidate, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Bytes predicted by the planner and compiled ones, for every program.

    Returns:
      rows of ``role``, ``program``, ``stage``, ``runs`` per step, ``predicted_bytes`` and
      ``compiled_bytes`` (all that a device holds while it runs; predictions are of a stage, so
      transitions have none), ``flops`` and ``received_bytes`` (per device and run, counted on the
      program).
    """
    rows = []
    for record in records:
        role, program = record["role"], record["program"]
        group = next(s for s in candidate.sets if role in s.roles)
        stage = STAGE[phase_of(program)]
        moves = program.startswith("transition")
        rows.append(
            {
                "role": role,
                "program": program,
                "stage": stage,
                "runs": record["runs"],
                "predicted_bytes": None if moves else stage_bytes(group, role, stage),
                "compiled_bytes": record["sum_bytes"],
                "flops": record["flops"],
                "received_bytes": record.get("received_bytes", 0),
            }
        )
    return rows


def stage_bytes(group: PlannedSet, role: str, stage: str) -> float:
    """Bytes per device while a role computes: those its set keeps, and its own transient ones."""
    option = group.options[group.roles.index(role)]
    held = sum(o.resident for o in group.options)
    if stage == STAGES[-1]:
        held += group.learning_bytes
    return held + option.transients[STAGES.index(stage)]


def _compile(
    candidate: Candidate,
    problem: PlanProblem,
    config: ConfigDict,
    name: str,
    topology: str,
    console: Any,
) -> dict[str, Any]:
    step = duration(candidate.total)
    console.print(f"{_sets(candidate)}: {step} a step by the formulas; compiling")
    with TemporaryFolder("hjax-plan-") as folder:
        file = folder / "plan.json"
        file.write_text(json_line(describe_candidate(candidate, problem)))
        placed = config.copy_and_resolve_references()
        with placed.unlocked():
            placed.placement = str(file)
        request = CompileRequest(name, placed, topology, "", cache_folder("compile"))
        return compile_step(request, console)


def _sets(candidate: Candidate) -> str:
    return ", ".join(f"{'+'.join(s.roles)} on {s.devices}" for s in candidate.sets)


def _first(found: SearchResult, number: int) -> SearchResult:
    """The candidates with one put first."""
    all_of_them = found.candidates
    ordered = (all_of_them[number], *all_of_them[:number], *all_of_them[number + 1 :])
    return dataclasses.replace(found, candidates=ordered)
