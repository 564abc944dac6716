"""HybridFlow's experiments (arXiv 2409.19256, section 8) as problems for the auto-mapping.

Every experiment runs on machines of 8 A100-80GB, with prompts and responses of 1024 tokens, 1024
sequences and 8 updates a step. What the paper reports stands here as constants, next to the
function that gives this cost model's answer to the same question.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from hjax.models.cost_inputs import MeshSizes, Workload
from hjax.planning import cost, generation_cost
from hjax.planning.constants import Constants
from hjax.planning.hardware import parse_cluster
from hjax.planning.plan_types import Candidate
from hjax.planning.problems import PAPER_SPACE, build_problem, find_algorithm
from hjax.planning.role_options import role_options
from hjax.planning.search import Placement, PlanProblem, search
from hjax.planning.strategies import search_strategy

ASSUMED = Constants()
# The work of a step, and its number of updates.
PAPER_WORK = Workload(prompt_length=1024, response_length=1024, sequences=1024)
PAPER_UPDATES = 8

# Numbers of GPUs, from the fewest on which the four models of a size fit.
GPUS = {
    "llama-7b": (8, 16, 32, 64, 96, 128),
    "llama-13b": (16, 32, 64, 96, 128),
    "llama-34b": (32, 64, 96, 128),
    "llama-70b": (64, 96, 128),
}
# The systems that the paper compares with, by algorithm: NeMo-Aligner has no ReMax.
SYSTEMS = {
    "ppo": ("deepspeed_chat", "openrlhf", "nemo_aligner"),
    "remax": ("deepspeed_chat", "openrlhf"),
    "safe_rlhf": ("deepspeed_chat", "openrlhf", "nemo_aligner"),
}
# The paper's average speed-ups of PPO, and its ranges over the systems that have the algorithm.
PPO_AVERAGES = {"deepspeed_chat": 3.67, "openrlhf": 3.25, "nemo_aligner": 12.52}
RANGES = {
    ("ppo", "llama-7b"): (1.68, 8.63), ("ppo", "llama-13b"): (2.70, 18.96),
    ("ppo", "llama-34b"): (2.41, 20.57), ("ppo", "llama-70b"): (5.17, 17.98),
    ("remax", "llama-7b"): (1.53, 2.56), ("remax", "llama-13b"): (2.49, 3.66),
    ("remax", "llama-34b"): (2.14, 4.80), ("remax", "llama-70b"): (6.46, 9.78),
    ("safe_rlhf", "llama-7b"): (1.71, 12.87), ("safe_rlhf", "llama-13b"): (2.49, 18.47),
    ("safe_rlhf", "llama-34b"): (2.20, 19.76), ("safe_rlhf", "llama-70b"): (4.89, 16.86),
}  # fmt: skip
STRONG_SCALING = 0.668
# Its actor's layouts: training p-t, generation p_g-t_g; and by how much less time its transition
# takes than the others', on average and at 70B (Fig. 14).
ACTORS = {
    "llama-7b": ((1, 8), (1, 2)),
    "llama-13b": ((1, 8), (1, 4)),
    "llama-34b": ((4, 8), (1, 8)),
    "llama-70b": ((8, 8), (1, 8)),
}
TRANSITION_LESS = {"average": 0.552, "llama-70b": 0.891}

# The placements that the paper finds best somewhere; "critic apart" is not among the strategies.
NAMED: dict[str, Placement] = {
    "colocate": (("actor", "critic", "reference", "reward"),),
    "split": (("actor", "reference"), ("critic", "reward")),
    "critic apart": (("actor", "reference", "reward"), ("critic",)),
    "standalone": (("actor",), ("critic",), ("reference",), ("reward",)),
}
MODELS: Mapping[str, str | Mapping[str, str]] = {
    "13B": "llama-13b",
    "34B": "llama-34b",
    "13B, 70B": {
        "actor": "llama-13b", "reference": "llama-13b",
        "critic": "llama-70b", "reward": "llama-70b",
    },
}  # fmt: skip
# The paper's best placement by models and GPUs.
BEST_PLACEMENTS = {
    "13B": {32: "colocate", 64: "colocate", 96: "split", 128: "standalone"},
    "34B": {32: "colocate", 64: "colocate", 96: "split", 128: "split"},
    "13B, 70B": {32: "colocate", 64: "colocate", 96: "split", 128: "critic apart"},
}


def paper_problem(
    algorithm: str, models: str | Mapping[str, str], gpus: int, constants: Constants | None = None
) -> PlanProblem:
    """One of the HybridFlow paper's experiments, on machines of 8 A100-80GB.

    Its Safe-RLHF has one critic.

    Args:
      models: a published name for all roles, or by role.
    """
    found = find_algorithm(algorithm)
    settings = found.default_config()
    if algorithm == "safe_rlhf":
        settings.pretraining_coef = 1.0
    roles = found.needed_roles(settings)
    names = dict.fromkeys(roles, models) if isinstance(models, str) else dict(models)
    if "cost_critic" in roles:
        names["cost_critic"] = "none"
    return build_problem(
        found,
        settings,
        names,
        PAPER_WORK,
        updates=PAPER_UPDATES,
        cluster=parse_cluster(f"{max(1, gpus // 8)}x{min(gpus, 8)}:a100-80g"),
        constants=constants,
        numerics="mixed",
    )


def placement_name(candidate: Candidate) -> str:
    """Which of ``NAMED`` it is; ``other`` if none."""
    sets = {frozenset(s.roles) for s in candidate.sets}
    same = (name for name, placed in NAMED.items() if sets == set(map(frozenset, placed)))
    return next(same, "other")


@dataclasses.dataclass(frozen=True)
class PlacementRow:
    """One of the paper's twelve cases of PPO.

    Attributes:
      best: the fastest of all placements.
      seconds: of a step under each of ``NAMED`` that fits, with the layouts and allocation that
        are best for it.
      paper: the paper's choice.
    """

    models: str
    gpus: int
    best: Candidate
    seconds: Mapping[str, float]
    paper: str

    @property
    def fastest_named(self) -> str:
        """The fastest of ``NAMED``."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def gap(self) -> float:
        """Share by which the paper's choice takes longer than the best of all."""
        return self.seconds[self.paper] / self.best.total - 1

    @property
    def named_gap(self) -> float:
        """Share by which the paper's choice takes longer than the best of ``NAMED``."""
        return self.seconds[self.paper] / self.seconds[self.fastest_named] - 1


def placement_row(models: str, gpus: int, constants: Constants = ASSUMED) -> PlacementRow:
    """A case of ``BEST_PLACEMENTS``, searched."""
    posed = paper_problem("ppo", MODELS[models], gpus, constants)
    named = search(posed, list(NAMED.values()), len(NAMED)).candidates
    return PlacementRow(
        models,
        gpus,
        search_strategy(posed, "auto", 1).fastest,
        {placement_name(candidate): candidate.total for candidate in named},
        BEST_PLACEMENTS[models][gpus],
    )


def placement_rows(constants: Constants = ASSUMED) -> list[PlacementRow]:
    """All cases of ``BEST_PLACEMENTS``."""
    cases = [(models, gpus) for models, found in BEST_PLACEMENTS.items() for gpus in found]
    return [placement_row(models, gpus, constants) for models, gpus in cases]


@dataclasses.dataclass(frozen=True)
class SpeedupRow:
    """hjax's best plan and what other systems take for the same step.

    Attributes:
      seconds: of hjax's best plan.
      ratios: by system, its seconds over these; systems that do not fit or do not have the
        algorithm are not in it.
    """

    algorithm: str
    model: str
    gpus: int
    seconds: float
    ratios: Mapping[str, float]


def speedup_row(
    algorithm: str, model: str, gpus: int, constants: Constants = ASSUMED
) -> SpeedupRow:
    """One size of one algorithm."""
    posed = paper_problem(algorithm, model, gpus, constants)
    mine = search_strategy(posed, "auto", 1).fastest.total
    others = {s: search_strategy(posed, s, 1).candidates for s in SYSTEMS[algorithm]}
    ratios = {system: found[0].total / mine for system, found in others.items() if found}
    return SpeedupRow(algorithm, model, gpus, mine, ratios)


def speedup_rows() -> list[SpeedupRow]:
    """Every size of every algorithm."""
    cases = [(a, model, gpus) for a in SYSTEMS for model, sizes in GPUS.items() for gpus in sizes]
    return list(itertools.starmap(speedup_row, cases))


def ratios_of(rows: list[SpeedupRow], algorithm: str, system: str) -> list[float]:
    """A system's ratios for an algorithm, of the sizes that fit."""
    return [r.ratios[system] for r in rows if r.algorithm == algorithm and system in r.ratios]


def strong_scaling(rows: list[SpeedupRow], algorithm: str) -> float:
    """Gain in speed from the fewest to the most GPUs over the gain in GPUs, mean over models."""
    efficiencies = []
    for model, sizes in GPUS.items():
        taken = {r.gpus: r.seconds for r in rows if (r.algorithm, r.model) == (algorithm, model)}
        efficiencies.append(taken[sizes[0]] / taken[sizes[-1]] / (sizes[-1] / sizes[0]))
    return statistics.mean(efficiencies)


@dataclasses.dataclass(frozen=True)
class TransitionRow:
    """Fig. 14: seconds from training to generation, of a model on some GPUs, by system."""

    model: str
    gpus: int
    seconds: Mapping[str, float]

    @property
    def less(self) -> float:
        """Share of the mean of the other systems' that hjax's saves."""
        others = [value for name, value in self.seconds.items() if name != "hjax"]
        return 1 - self.seconds["hjax"] / statistics.mean(others)


def transition_row(model: str, gpus: int, constants: Constants = ASSUMED) -> TransitionRow:
    """The paper's layouts of an actor that has all of the GPUs (OpenRLHF's copies half each)."""
    posed = paper_problem("ppo", model, gpus, constants)
    (pipe, tensor), (generate_pipe, generate_tensor) = ACTORS[model]
    place = posed.place(posed.cluster.pools[0], gpus)
    mesh = MeshSizes(
        data=gpus // (pipe * tensor),
        pipe=pipe,
        tensor=tensor,
        generate_pipe=generate_pipe,
        generate_tensor=generate_tensor,
    )
    actor = posed.models["actor"]
    whole = actor.parameters * posed.numerics.compute
    half = posed.place(posed.cluster.pools[0], gpus // 2)
    return TransitionRow(
        model,
        gpus,
        {
            "hjax": generation_cost.transition_seconds(place, actor, mesh),
            "deepspeed_chat": cost.all_gather(place, whole, gpus),
            "openrlhf": cost.weight_sync_seconds(half, actor),
        },
    )


def transition_rows() -> list[TransitionRow]:
    """Of every model and number of GPUs that its layout divides."""
    return [
        transition_row(model, gpus)
        for model, ((pipe, tensor), _) in ACTORS.items()
        for gpus in GPUS[model]
        if gpus % (pipe * tensor) == 0
    ]


def generation_sweep(model: str, constants: Constants = ASSUMED) -> dict[int, float]:
    """Fig. 15: seconds of the transition and generation by t_g.

    On 16 GPUs, all models colocated, trained 1-8-2.
    """
    posed = paper_problem("ppo", model, 16, constants)
    place = posed.place(posed.cluster.pools[0], 16)
    space = dataclasses.replace(PAPER_SPACE, pipes=(1,), shardings=("data",))

    def options(role: str) -> list[Any]:
        arguments = (place, posed.models[role], posed.dataflow, role, PAPER_WORK, space)
        return [o for o in role_options(*arguments, every=True) if o.mesh.tensor == 8]

    others = sum(
        min(o.resident for o in options(role)) for role in ("critic", "reference", "reward")
    )
    best: dict[int, float] = {}
    for option in options("actor"):
        if option.resident + option.transient + others <= place.capacity:
            size = option.mesh.generate_tensor
            best[size] = min(best.get(size, float("inf")), option.seconds[0])
    return dict(sorted(best.items()))
