"""Ways to plan by name: hjax's placements, and other systems as in HybridFlow's section 8.

Each turns a problem into the problems and placements to search, so that all are compared under
the same cost model, constants and workload, each with the best layouts and allocation it allows.

Of the plans found those come first that hjax runs, not only compiles. A pool of processes on TPUs
is all hosts of one slice (``hjax.controller.hosts.placements``): a set on a part of a slice of
several hosts, or over several slices, compiles and does not run.
"""

import dataclasses
from collections.abc import Callable

from hjax.errors import ConfigError
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import Candidate, Dataflow, DevicePool
from hjax.planning.search import (
    SHOWN,
    Placement,
    PlanProblem,
    SearchResult,
    partitions,
    search,
)
from hjax.roles import ROLES

# OpenRLHF's second copy of the actor, the one that generates.
ROLLOUT = "rollout"


def _as_posed(problem: PlanProblem) -> PlanProblem:
    return problem


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to plan.

    Attributes:
      what: in a sentence.
      placements: those it allows, of a problem's roles.
      prepare: the problem as this system poses it.
    """

    name: str
    what: str
    placements: Callable[[tuple[str, ...]], list[Placement]]
    prepare: Callable[[PlanProblem], PlanProblem] = _as_posed

    @property
    def other_system(self) -> bool:
        """Whether it is another system's way."""
        return self.prepare is not _as_posed


def search_strategy(problem: PlanProblem, strategy: str, count: int = SHOWN) -> SearchResult:
    """The fastest candidates under a strategy, one per placement, at most ``count``.

    Raises:
      ConfigError: an unknown name.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"--strategy={strategy}: one of {', '.join(STRATEGIES)}")
    chosen = STRATEGIES[strategy]
    posed = chosen.prepare(problem)
    return search(posed, chosen.placements(posed.dataflow.roles), count)


def _colocate(roles: tuple[str, ...]) -> list[Placement]:
    return [(roles,)]


def _split(roles: tuple[str, ...]) -> list[Placement]:
    # Those that judge stand apart from those that write.
    judges = [name for name, role in ROLES.items() if role.scalar]
    halves = (
        tuple(r for r in roles if r not in judges),
        tuple(r for r in roles if r in judges),
    )
    return [tuple(half for half in halves if half)]


def _standalone(roles: tuple[str, ...]) -> list[Placement]:
    return [tuple((role,) for role in roles)]


def _deepspeed_chat(problem: PlanProblem) -> PlanProblem:
    """ZeRO-3 over all devices; generation by tensor parallelism inside a machine, for which the
    weights are gathered from all devices."""
    space = dataclasses.replace(
        problem.space, pipes=(1,), shardings=("fsdp",), zero=True, generate="inside", gather="all"
    )
    constants = problem.constants
    eager = {
        "matmul": min(constants.matmul, constants.eager_matmul),
        "decode_layer": constants.eager_layer,
        "decode_row": 0.0,
    }
    return dataclasses.replace(problem, space=space, constants=constants.with_values(eager))


def _openrlhf(problem: PlanProblem) -> PlanProblem:
    """ZeRO-3 training, and a second copy of the actor that generates on devices of its own, by
    tensor parallelism inside a machine; it is sent the weights in every step."""
    flow = problem.dataflow
    calls = tuple(
        dataclasses.replace(c, role=ROLLOUT) if c.kind == "generate" else c for c in flow.calls
    )
    space = dataclasses.replace(
        problem.space,
        pipes=(1,),
        shardings=("fsdp",),
        zero=True,
        generate="inside",
        gather="sent",
    )
    return dataclasses.replace(
        problem,
        dataflow=Dataflow(flow.name, (*flow.roles, ROLLOUT), calls),
        models={**problem.models, ROLLOUT: problem.models["actor"]},
        space=space,
        constants=problem.constants.with_values(
            {"matmul": min(problem.constants.matmul, problem.constants.eager_matmul)}
        ),
    )


def _nemo_aligner(problem: PlanProblem) -> PlanProblem:
    """The same pipeline and tensor sizes in training and generation, which runs in the training
    framework, at the speed its makers measured before they had an engine (``native_decode``)."""
    space = dataclasses.replace(
        problem.space, shardings=("data",), generate="same", native_decode=True
    )
    return dataclasses.replace(problem, space=space)


def _nemo_recompute(problem: PlanProblem) -> PlanProblem:
    """NeMo-Aligner's layouts, a forward over the whole sequence for every token."""
    space = dataclasses.replace(problem.space, shardings=("data",), generate="same", kv_cache=False)
    return dataclasses.replace(problem, space=space)


STRATEGIES: dict[str, Strategy] = {
    s.name: s
    for s in (
        Strategy("auto", "every placement", lambda roles: list(partitions(roles))),
        Strategy("colocate", "all models on all devices", _colocate),
        Strategy("split", "actor and reference on some, the others on the rest", _split),
        Strategy("standalone", "each model on devices of its own", _standalone),
        Strategy("deepspeed_chat", "colocated, ZeRO-3", _colocate, _deepspeed_chat),
        Strategy("openrlhf", "each model alone, two actors, ZeRO-3", _standalone, _openrlhf),
        Strategy("nemo_aligner", "split, one 3D layout, no engine", _split, _nemo_aligner),
        Strategy("nemo_recompute", "the same, recomputing for each token", _split, _nemo_recompute),
    )
}


BESIDE = 2  # of the plans that only compile, so many stand beside those that run


def only_compiles(candidate: Candidate) -> list[str]:
    """Sets that hjax compiles and does not run, in words."""
    found = []
    for group in candidate.sets:
        pool, roles = group.pool, ", ".join(group.roles)
        if pool.shape and group.devices > pool.domain:
            found.append(f"{roles} on {group.devices // pool.domain} slices")
        elif pool.shape and group.devices < pool.domain and pool.hosts > pool.slices:
            part = f"{group.devices} of {pool.domain} devices of a slice of several hosts"
            found.append(f"{roles} on {part}")
    return found


def search_runnable(problem: PlanProblem, strategy: str, count: int = SHOWN) -> SearchResult:
    """``search_strategy``, the plans that run first; after them ``BESIDE`` of those that only
    compile, if they are among the fastest. Where nothing that fits runs, those that compile."""
    found = search_strategy(problem, strategy, count)
    others = [c for c in found.candidates if only_compiles(c)]
    if not others:
        return found
    pools = tuple(map(_as_run, problem.cluster.pools))
    cluster = dataclasses.replace(problem.cluster, pools=pools)
    run = search_strategy(dataclasses.replace(problem, cluster=cluster), strategy, count)
    if not run.candidates:
        return found
    beside = others[: min(BESIDE, count - 1)]
    candidates = (*run.candidates[: count - len(beside)], *beside)
    return dataclasses.replace(run, candidates=candidates, seconds=found.seconds + run.seconds)


def _as_run(pool: DevicePool) -> DevicePool:
    if not pool.shape:
        return pool
    least = pool.domain if pool.hosts > pool.slices else 1
    sizes = tuple(n for n in legal_counts(pool) if least <= n <= pool.domain)
    return dataclasses.replace(pool, counts=sizes) if sizes else pool
