"""A search's result as data: what `plan --json` prints and what plan.json holds."""

from __future__ import annotations

import dataclasses
from typing import Any

from hjax.errors import ConfigError
from hjax.planning import memory
from hjax.planning.records import STAGES, Plan
from hjax.planning.search import Problem, Result, Roles
from hjax.show.format import size


def describe_plan(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Placement, allocation, layouts, seconds and memory of a plan."""
    generation, preparation, learning = plan.stages
    transition = max(o.transition for s in plan.sets for o in s.options)
    roles = [(r, s, o) for s in plan.sets for r, o in zip(s.roles, s.options)]
    return {
        "placement": [list(s.roles) for s in plan.sets],
        "allocation": [s.devices for s in plan.sets],
        "pools": [s.pool.name for s in plan.sets],
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
            "total": plan.total,
        },
        "role_seconds": {r: dict(zip(STAGES, o.seconds)) for r, _, o in roles},
        "memory_bytes": {r: o.resident + o.transient for r, _, o in roles},
        "resident_bytes": {r: o.resident for r, _, o in roles},
        "set_memory_bytes": [s.memory for s in plan.sets],
        "usable_bytes": [memory.capacity(problem.place(s.pool, s.devices)) for s in plan.sets],
        "tokens_per_second": problem.work.tokens / plan.total,
    }


def describe_result(result: Result, problem: Problem, strategy: str) -> dict[str, Any]:
    """The best plan, the runners-up with the reason each lost, and where the numbers come from.

    Raises:
      ConfigError: nothing fits; the message has the bytes missing.
    """
    if not result.plans:
        raise ConfigError(missing(problem, strategy))
    best = result.plans[0]
    candidates = [
        {
            "placement": [list(s.roles) for s in plan.sets],
            "allocation": [s.devices for s in plan.sets],
            "seconds": plan.total,
            "reason": reason(plan, best),
        }
        for plan in result.plans
    ]
    constants = problem.constants
    measured = sorted(constants.measured)
    return {
        **describe_plan(best, problem),
        "algorithm": problem.dataflow.name,
        "cluster": problem.cluster.name,
        "strategy": strategy,
        "models": {role: model.name for role, model in problem.models.items()},
        "candidates": candidates,
        "slower": len(result.slower),
        "impossible": [[list(s) for s in p] for p in result.impossible],
        "origins": {
            "seconds": f"measured: {', '.join(measured)}" if measured else "assumed",
            "memory_bytes": "assumed",
            "hardware": sorted({p.device.source for p in problem.cluster.pools}),
        },
        "search_seconds": result.seconds,
    }


def reason(plan: Plan, best: Plan) -> str:
    """Why a plan lost to the best one: the stages in which it is slower."""
    if plan is best:
        return "chosen"
    if plan.total < best.total:
        faster = 100 * (1 - plan.total / best.total)
        return f"{faster:.1f} % faster, within the model's error, but {len(plan.sets)} sets"
    parts = []
    for name, mine, its in zip(STAGES, plan.stages, best.stages):
        if abs(mine - its) > 5e-3 * best.total:
            parts.append(f"{name} {mine - its:+.1f} s")
    slower = f"{100 * (plan.total / best.total - 1):.1f} % slower"
    return f"{slower}: {', '.join(parts)}" if parts else f"{slower} over all stages"


def missing(problem: Problem, strategy: str) -> str:
    """The one line for a cluster on which the models do not fit: bytes missing per device."""
    names = problem.dataflow.roles
    best = float("inf")
    for pool in problem.cluster.pools:
        # As if memory had no end: what would then be needed is what is missing.
        large = dataclasses.replace(pool, device=dataclasses.replace(pool.device, memory=2.0**60))
        needed = Roles(problem).least_memory(names, large, pool.size)
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
