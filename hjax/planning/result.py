"""Search results as data (`plan --json`, plan.json), and as a config file that runs the plan."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.models.cost_inputs import MASTERS, Numerics, Workload
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import Candidate, RoleOption
from hjax.planning.role_options import batches_divide, prompts_divide, rollout_slots
from hjax.planning.search import PlanProblem, RoleFronts, SearchResult
from hjax.planning.strategies import STRATEGIES, only_compiles
from hjax.roles import STAGES, Role
from hjax.settings.config_checks import complete_config
from hjax.settings.keys import OWNED_SECTIONS
from hjax.show.format import size


def describe_candidate(candidate: Candidate, problem: PlanProblem) -> dict[str, Any]:
    """A candidate as data: placement, allocation, layouts, seconds and memory."""
    generation, preparation, learning = candidate.stages
    transition = max(o.transition for s in candidate.sets for o in s.options)
    roles = [(r, s, o) for s in candidate.sets for r, o in zip(s.roles, s.options)]
    return {
        "placement": [list(s.roles) for s in candidate.sets],
        "allocation": [s.devices for s in candidate.sets],
        "pools": [s.pool.name for s in candidate.sets],
        "kinds": [s.pool.device.name for s in candidate.sets],
        "only_compiles": only_compiles(candidate),
        "parallelism": {r: _triples(o.mesh) for r, _, o in roles},
        "layouts": {r: _axes(o.mesh) for r, _, o in roles},
        "settings": {r: role_settings(r, o, problem) for r, _, o in roles},
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
        "usable_bytes": [problem.place(s.pool, s.devices).capacity for s in candidate.sets],
        "tokens_per_second": problem.work.tokens / candidate.total,
    }


def role_settings(role: str, option: RoleOption, problem: PlanProblem) -> dict[str, Any]:
    """Settings of a role that a candidate chose (``hjax.run.placement.SETTINGS``): ``micro_batch``
    (rows over all replicas), ``remat`` of trained roles, ``offload``, and ``slots`` of the
    generating role. Settings that a run's config had fixed are left out."""
    found: dict[str, Any] = {}
    if option.micro_rows and role not in problem.space.micro_batches:
        found["micro_batch"] = option.micro_rows * option.mesh.replicas
    if problem.dataflow.calls_of(role, "update"):
        found["remat"] = option.remat
    found["offload"] = option.offload
    if option.waves and problem.numerics.hjax_programs and len(problem.space.waves) > 1:
        found["slots"] = rollout_slots(option, problem.work)
    return found


def describe_result(result: SearchResult, problem: PlanProblem, strategy: str) -> dict[str, Any]:
    """The best plan, the runners-up with the reason each lost, and the origins of the numbers.

    Args:
      result: of the search.
      problem: the original one, before the strategy changed it.

    Raises:
      ConfigError: nothing fits; the message has the bytes missing.
    """
    if not result.candidates:
        raise ConfigError(no_fit_message(problem, strategy))
    best = result.fastest
    candidates = [
        {
            "placement": [list(s.roles) for s in candidate.sets],
            "allocation": [s.devices for s in candidate.sets],
            "pools": [s.pool.name for s in candidate.sets],
            "seconds": candidate.total,
            "reason": loss_reason(candidate, best),
        }
        for candidate in result.candidates
    ]
    measured = sorted(problem.constants.measured)
    return {
        **describe_candidate(best, result.problem),
        "algorithm": problem.dataflow.name,
        "cluster": problem.cluster.name,
        "strategy": strategy,
        "models": {role: model.name for role, model in result.problem.models.items()},
        "candidates": candidates,
        "needs": unsupported(best, result.problem, strategy),
        "slower": len(result.slower),
        "impossible": [[list(s) for s in p] for p in result.impossible],
        "origins": {
            "seconds": f"measured: {', '.join(measured)}" if measured else "assumed",
            "memory_bytes": "assumed",
            "hardware": sorted({p.device.source for p in problem.cluster.pools}),
        },
        "search_seconds": result.seconds,
    }


def unsupported(candidate: Candidate, problem: PlanProblem, strategy: str) -> list[str]:
    """Features that a plan needs and hjax does not have, in words; empty: a run can follow it."""
    found = [f"the programs of {strategy}"] if STRATEGIES[strategy].other_system else []
    roles = [(r, o) for s in candidate.sets for r, o in zip(s.roles, s.options)]
    waves = max(o.waves for _, o in roles)
    if waves > 1 and not problem.numerics.hjax_programs:
        found.append(f"decoding in {waves} waves")
    if problem.numerics.weights < MASTERS.weights:
        found.append(f"{8 * problem.numerics.weights:g}-bit weights")
    for role, option in roles:
        calls = [c for kind in ("forward", "update") for c in problem.dataflow.calls_of(role, kind)]
        even = batches_divide(calls, option.mesh, problem.work)
        if not even or (option.waves and not prompts_divide(option.mesh, problem.work)):
            found.append(f"batches that do not divide over the replicas of the {role}")
    return found


def loss_reason(candidate: Candidate, best: Candidate) -> str:
    """Why a candidate lost to the best one: the stages in which it is slower."""
    if candidate is best:
        return "chosen"
    compiled = only_compiles(candidate) and not only_compiles(best)
    if candidate.total < best.total:
        faster = 100 * (1 - candidate.total / best.total)
        if compiled:
            return f"{faster:.1f} % faster, but hjax only compiles it"
        but = f"{len(candidate.sets)} sets"
        if len(candidate.sets) == len(best.sets):
            but = f"on {candidate.devices} of {best.devices} devices"
        return f"{faster:.1f} % faster, within the model's error, but {but}"
    parts = []
    for name, mine, its in zip(STAGES, candidate.stages, best.stages):
        if abs(mine - its) > 5e-3 * best.total:
            parts.append(f"{name} {mine - its:+.1f} s")
    slower = f"{100 * (candidate.total / best.total - 1):.1f} % slower"
    slower += ", and hjax only compiles it" if compiled else ""
    return f"{slower}: {', '.join(parts)}" if parts else f"{slower} over all stages"


def no_fit_message(problem: PlanProblem, strategy: str) -> str:
    """One line for models that do not fit on a cluster: the bytes missing per device, or the
    numbers of devices over which nothing divides."""
    names = problem.dataflow.roles
    models = ", ".join(f"{r}={problem.models[r].name}" for r in names)
    where = f"{models} do not fit on {problem.cluster.name}"
    needed: dict[tuple[int, int], float] = {}
    for number, pool in enumerate(problem.cluster.pools):
        # With unlimited memory the search gives the bytes that would be needed.
        large = dataclasses.replace(pool, device=dataclasses.replace(pool.device, memory=2.0**60))
        fronts = RoleFronts(problem)
        for devices in legal_counts(pool):
            least = fronts.least_memory(names, large, devices)
            if least < math.inf:
                needed[number, devices] = least - problem.place(pool, devices).capacity
    if not needed:
        return f"{where}: {_divides(problem)} over any number of its devices that a set may take"
    (number, devices), least = min(needed.items(), key=lambda item: item[1])
    if least <= 0:
        return f"{where} with strategy {strategy}; --strategy=auto has a plan"
    pool = problem.cluster.pools[number]
    lacking = f"{size(least)} per device are missing even when shared by all"
    more = "take more or larger devices, or smaller models or batches"
    if pool.size in [n for pool_, n in needed if pool_ == number]:
        return f"{where}: {lacking}; {more}"
    others = [n for n in legal_counts(pool) if n > devices]
    return (
        f"{where}: {_divides(problem)} over {', '.join(map(str, others))} of its devices; on "
        f"{devices} of them {lacking}; take hosts of 2, 4 or 8 devices, or batches that divide"
    )


def _divides(problem: PlanProblem) -> str:
    """Beginning of an error message: the batches and model shapes that no layout divides."""
    work, sequences = problem.work, problem.work.sequences
    rows = {round(c.rows * sequences) for c in problem.dataflow.calls if c.kind != "generate"}
    rows.add(sequences // work.samples)
    batches = ", ".join(map(str, sorted(rows)))
    shapes = {(m.layers, m.heads, m.kv_heads) for m in problem.models.values()}
    said = " or ".join(f"{layers} layers and {heads} heads" for layers, heads, _ in sorted(shapes))
    return f"no layout divides batches of {batches} sequences and models of {said}"


def _triples(mesh: Any) -> dict[str, list[int]]:
    found = {"train": [mesh.pipe, mesh.tensor, mesh.replicas * mesh.context]}
    if mesh.generate_tensor:
        found["generate"] = [mesh.generate_pipe, mesh.generate_tensor]
    return found


def _axes(mesh: Any) -> dict[str, dict[str, int]]:
    found = {"train": mesh.train_axes()}
    if mesh.generate_tensor:
        found["generate"] = mesh.generate_axes()
    return found


# The config key that a planned config sets to its plan file.
PLACEMENT = "placement"


def keys_of_models(
    algorithm: str,
    table: Mapping[str, Role],
    models: Mapping[str, str],
    work: Workload,
    updates: int,
    numerics: Numerics,
) -> dict[str, Any]:
    """The dotted config keys of a plan whose models were given by name.

    Args:
      algorithm: as ``algorithm.name`` takes it.
      table: its roles.
      models: published name or directory by role.
      work: of a step.
      updates: mini-batches of a step.

    Raises:
      ConfigError: roles of one section with different models.
    """
    found: dict[str, Any] = {
        "algorithm.name": algorithm,
        "data.path": "prompts.jsonl",
        "model.dtype": numerics.dtype,
        "rollout.prompts": work.sequences // work.samples,
        "rollout.samples": work.samples,
        "rollout.max_prompt_length": work.prompt_length,
        "rollout.max_response_length": work.response_length,
        "algorithm.minibatch": work.sequences // updates,
    }
    for role, name in models.items():
        key = f"{table[role].config_section}.path"
        source = table[role].starts_from
        if found.get(key, name) != name:
            raise ConfigError(
                f"{role}={name}: its config is that of {key}={found[key]}; plan them alike"
            )
        if role == "actor" or not source or models.get(source) != name:
            found[key] = name
    return found


def keys_of_config(config: ConfigDict) -> dict[str, Any]:
    """The dotted keys of a config that are not at their defaults."""
    owners = {key: flatten(config)[key] for key in OWNED_SECTIONS.values()}
    usual = flatten(complete_config(owners))
    found = {key: value for key, value in flatten(config).items() if usual.get(key) != value}
    found.pop(PLACEMENT, None)
    return owners | found


def config_text(keys: Mapping[str, Any], title: str, plan: str = "plan.json") -> str:
    """The text of a config file to be stored beside a plan file.

    Args:
      keys: dotted.
      title: description in one line.
      plan: name of the plan's file.
    """
    lines = "\n".join(f"        {key!r}: {value!r}," for key, value in sorted(keys.items()))
    return f'''"""{title}

What each role gets of devices, its layout, rows per pass, rematerialisation, offload and slots
stand in {plan} beside this file. Paths that name a published shape are enough to
compile; to train, give directories with weights, and prompts (data.path).
"""

import pathlib


def get_config():
    """The run's config."""
    return {{
{lines}
        "{PLACEMENT}": str(pathlib.Path(__file__).resolve().parent / "{plan}"),
    }}
'''
