"""Planning strategies by name: hjax's placements, and other systems as in HybridFlow's section 8.

Each strategy restricts a problem's search space and placements. So all are compared under the same
cost model, constants and workload, each with the best layouts and allocation it allows.

Plans that hjax can run come before plans that it only compiles. On TPUs a pool of processes takes
all hosts of one slice (``hjax.controller.hosts.placements``). So a set on part of a slice of
several hosts, or over several slices, only compiles.
"""

import dataclasses
from collections.abc import Callable

from hjax.errors import ConfigError
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import Candidate, Dataflow, DevicePool
from hjax.planning.search import MAX_SHOWN, Placement, PlanProblem, SearchResult, partitions, search
from hjax.roles import ROLES

# OpenRLHF's second copy of the actor, the one that generates.
ROLLOUT = "rollout"


def _unchanged(problem: PlanProblem) -> PlanProblem:
    return problem


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A planning strategy.

    Attributes:
      what: a description in a few words.
      placements: the placements of given roles that it allows.
      prepare: turns a problem into the one that this system solves.
    """

    name: str
    what: str
    placements: Callable[[tuple[str, ...]], list[Placement]]
    prepare: Callable[[PlanProblem], PlanProblem] = _unchanged

    @property
    def other_system(self) -> bool:
        """Whether it models another system."""
        return self.prepare is not _unchanged


def search_strategy(problem: PlanProblem, strategy: str, count: int = MAX_SHOWN) -> SearchResult:
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
    # Critics and reward models get a set of their own, apart from the language models.
    scalar = [name for name, role in ROLES.items() if role.scalar]
    sets = (tuple(r for r in roles if r not in scalar), tuple(r for r in roles if r in scalar))
    return [tuple(names for names in sets if names)]


def _standalone(roles: tuple[str, ...]) -> list[Placement]:
    return [tuple((role,) for role in roles)]


def _deepspeed_chat(problem: PlanProblem) -> PlanProblem:
    """ZeRO-3 over all devices. Generation is tensor-parallel inside a machine; for it the weights
    are gathered from all devices."""
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
    """ZeRO-3 training, and a second copy of the actor that generates on its own devices with tensor
    parallelism inside a machine; every step syncs the weights to it."""
    flow = problem.dataflow
    calls = tuple(
        dataclasses.replace(c, role=ROLLOUT) if c.kind == "generate" else c for c in flow.calls
    )
    space = dataclasses.replace(
        problem.space, pipes=(1,), shardings=("fsdp",), zero=True, generate="inside", gather="sent"
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
    """The same pipeline and tensor sizes in training and generation. Generation runs in the
    training framework, at the speed measured before it had an engine (``native_decode``)."""
    space = dataclasses.replace(
        problem.space, shardings=("data",), generate="same", native_decode=True
    )
    return dataclasses.replace(problem, space=space)


def _nemo_recompute(problem: PlanProblem) -> PlanProblem:
    """NeMo-Aligner's layouts without a KV cache: a forward over the whole sequence per token."""
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


MAX_COMPILE_ONLY = 2  # number of plans that only compile listed beside those that run


def only_compiles(candidate: Candidate) -> list[str]:
    """The sets of a plan that hjax compiles but cannot run, in words."""
    found = []
    for group in candidate.sets:
        pool, roles = group.pool, ", ".join(group.roles)
        if pool.shape and group.devices > pool.domain:
            found.append(f"{roles} on {group.devices // pool.domain} slices")
        elif pool.shape and group.devices < pool.domain and pool.hosts > pool.slices:
            part = f"{group.devices} of {pool.domain} devices of a slice of several hosts"
            found.append(f"{roles} on {part}")
    return found


def search_runnable(problem: PlanProblem, strategy: str, count: int = MAX_SHOWN) -> SearchResult:
    """``search_strategy`` with the plans that hjax can run first.

    After them come at most ``MAX_COMPILE_ONLY`` plans that only compile, if they are among the
    fastest. If no plan that fits can run, the plans that compile are returned."""
    found = search_strategy(problem, strategy, count)
    others = [c for c in found.candidates if only_compiles(c)]
    if not others:
        return found
    pools = tuple(map(_runnable_sizes, problem.cluster.pools))
    cluster = dataclasses.replace(problem.cluster, pools=pools)
    run = search_strategy(dataclasses.replace(problem, cluster=cluster), strategy, count)
    if not run.candidates:
        return found
    beside = others[: min(MAX_COMPILE_ONLY, count - 1)]
    candidates = (*run.candidates[: count - len(beside)], *beside)
    return dataclasses.replace(run, candidates=candidates, seconds=found.seconds + run.seconds)


def _runnable_sizes(pool: DevicePool) -> DevicePool:
    if not pool.shape:
        return pool
    least = pool.domain if pool.hosts > pool.slices else 1
    sizes = tuple(n for n in legal_counts(pool) if least <= n <= pool.domain)
    return dataclasses.replace(pool, counts=sizes) if sizes else pool
