"""A search's result as data: what `plan --json` prints and what plan.json holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from hjax.errors import ConfigError
from hjax.planning import memory
from hjax.planning.options import batches_divide, prompts_divide
from hjax.planning.records import MASTERS, Candidate
from hjax.planning.search import Problem, RoleFronts, SearchResult
from hjax.planning.strategies import STRATEGIES
from hjax.roles import STAGES
from hjax.show.format import size


def describe_candidate(candidate: Candidate, problem: Problem) -> dict[str, Any]:
    """Placement, allocation, layouts, seconds and memory of a candidate."""
    generation, preparation, learning = candidate.stages
    transition = max(o.transition for s in candidate.sets for o in s.options)
    roles = [(r, s, o) for s in candidate.sets for r, o in zip(s.roles, s.options)]
    return {
        "placement": [list(s.roles) for s in candidate.sets],
        "allocation": [s.devices for s in candidate.sets],
        "pools": [s.pool.name for s in candidate.sets],
        "parallelism": {r: _triples(o.mesh) for r, _, o in roles},
        "layouts": {r: _axes(o.mesh) for r, _, o in roles},
        "micro_rows": {r: o.micro_rows for r, _, o in roles if o.micro_rows},
        "rematerialise": {r: o.rematerialise for r, _, o in roles if o.micro_rows},
        "waves": {r: o.waves for r, _, o in roles if o.waves},
        "seconds": {
            "generation": generation - transition,
            "preparation": preparation,
            "learning": learning,
            "transition": transition,
            "total": candidate.total,
        },
        "role_seconds": {r: dict(zip(STAGES, o.seconds)) for r, _, o in roles},
        "memory_bytes": {r: o.resident + o.transient for r, _, o in roles},
        "resident_bytes": {r: o.resident for r, _, o in roles},
        "set_memory_bytes": [s.peak_bytes for s in candidate.sets],
        "usable_bytes": [memory.capacity(problem.place(s.pool, s.devices)) for s in candidate.sets],
        "tokens_per_second": problem.work.tokens / candidate.total,
    }


def describe_result(result: SearchResult, problem: Problem, strategy: str) -> dict[str, Any]:
    """The best plan, the runners-up with the reason each lost, and where the numbers come from.

    Args:
      result: of the search.
      problem: what was asked, before the strategy posed it in its own way.

    Raises:
      ConfigError: nothing fits; the message has the bytes missing.
    """
    if not result.candidates:
        raise ConfigError(missing(problem, strategy))
    best = result.fastest
    candidates = [
        {
            "placement": [list(s.roles) for s in candidate.sets],
            "allocation": [s.devices for s in candidate.sets],
            "seconds": candidate.total,
            "reason": reason(candidate, best),
        }
        for candidate in result.candidates
    ]
    constants = problem.constants
    measured = sorted(constants.measured)
    return {
        **describe_candidate(best, result.problem),
        "algorithm": problem.dataflow.name,
        "cluster": problem.cluster.name,
        "strategy": strategy,
        "models": {role: model.name for role, model in result.problem.models.items()},
        "candidates": candidates,
        "needs": needs(best, result.problem, strategy),
        "slower": len(result.slower),
        "impossible": [[list(s) for s in p] for p in result.impossible],
        "origins": {
            "seconds": f"measured: {', '.join(measured)}" if measured else "assumed",
            "memory_bytes": "assumed",
            "hardware": sorted({p.device.source for p in problem.cluster.pools}),
        },
        "search_seconds": result.seconds,
    }


def needs(candidate: Candidate, problem: Problem, strategy: str) -> list[str]:
    """What a candidate needs that hjax's own programs do not do, in words; nothing where a run can
    do what was planned."""
    found = [f"the programs of {strategy}"] if STRATEGIES[strategy].other_system else []
    roles = [(r, o) for s in candidate.sets for r, o in zip(s.roles, s.options)]
    waves = max(o.waves for _, o in roles)
    if waves > 1:
        found.append(f"decoding in {waves} waves")
    if problem.numerics.weights < MASTERS.weights:
        found.append(f"{8 * problem.numerics.weights:g}-bit weights")
    for role, option in roles:
        calls = problem.dataflow.of(role, "forward") + problem.dataflow.of(role, "update")
        even = batches_divide(calls, option.mesh, problem.work)
        if not even or (option.waves and not prompts_divide(option.mesh, problem.work)):
            found.append(f"batches that do not divide over the replicas of the {role}")
    if len({o.rematerialise for _, o in roles if o.micro_rows}) > 1:
        found.append("rematerialisation of some of the trained models only")
    return found


def reason(candidate: Candidate, best: Candidate) -> str:
    """Why a plan lost to the best one: the stages in which it is slower."""
    if candidate is best:
        return "chosen"
    if candidate.total < best.total:
        faster = 100 * (1 - candidate.total / best.total)
        return f"{faster:.1f} % faster, within the model's error, but {len(candidate.sets)} sets"
    parts = []
    for name, mine, its in zip(STAGES, candidate.stages, best.stages):
        if abs(mine - its) > 5e-3 * best.total:
            parts.append(f"{name} {mine - its:+.1f} s")
    slower = f"{100 * (candidate.total / best.total - 1):.1f} % slower"
    return f"{slower}: {', '.join(parts)}" if parts else f"{slower} over all stages"


def missing(problem: Problem, strategy: str) -> str:
    """The one line for a cluster on which the models do not fit: bytes missing per device."""
    names = problem.dataflow.roles
    best = float("inf")
    for pool in problem.cluster.pools:
        # As if memory had no end: what would then be needed is what is missing.
        large = dataclasses.replace(pool, device=dataclasses.replace(pool.device, memory=2.0**60))
        needed = RoleFronts(problem).least_memory(names, large, pool.size)
        best = min(best, needed - memory.capacity(problem.place(pool, pool.size)))
    models = ", ".join(f"{r}={problem.models[r].name}" for r in names)
    where = f"{models} do not fit on {problem.cluster.name}"
    if best == float("inf"):
        fits = f"no layout of {strategy} divides these models and batches over its devices"
    elif best <= 0:
        fits = f"not with strategy {strategy}; --strategy=auto has a plan"
    else:
        fits = f"{size(best)} per device are missing even when shared by all"
    return f"{where}: {fits}; take more or larger devices, or smaller models or batches"


def _triples(mesh: Any) -> dict[str, list[int]]:
    replicas = mesh.replicas * mesh.context
    found = {"train": [mesh.pipe, mesh.tensor, replicas]}
    if mesh.generate_tensor:
        found["generate"] = [mesh.generate_pipe, mesh.generate_tensor]
    return found


def _axes(mesh: Any) -> dict[str, dict[str, int]]:
    found = {"train": mesh.train_axes()}
    if mesh.generate_tensor:
        found["generate"] = mesh.generate_axes()
    return found
