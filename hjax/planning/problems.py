"""Planning problems from names: an algorithm, published models, a cluster and numerics.

The problem of a run comes from its config instead (``hjax.planning.auto.run_problem``).
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm, get_algorithm
from hjax.errors import ConfigError
from hjax.models.cost_inputs import FLOAT32, MASTERS, MIXED, Workload, model_counts
from hjax.models.presets import planning_shape
from hjax.models.remat import FULL, NONE
from hjax.planning.constants import Constants
from hjax.planning.plan_types import Cluster, Dataflow, PlannedCall
from hjax.planning.search import PlanProblem
from hjax.planning.search_space import OFFLOADS, SearchSpace
from hjax.roles import Role
from hjax.run.dataflow import step_calls

_KINDS: dict[str, Any] = {"generate": "generate", "prepare": "forward", "update": "update"}


def trace_dataflow(
    algorithm: type[Algorithm],
    config: ConfigDict,
    updates: int,
    samples: int,
    roles: Collection[str],
    absent: Collection[str] = (),
    shared_workers: Mapping[str, str] = {},
) -> Dataflow:
    """The dataflow of one step: its calls on the roles that have devices.

    Args:
      config: the section ``algorithm``.
      updates: mini-batches per step and epoch.
      samples: responses per prompt.
      roles: those with a model; calls on others (reward functions) take no devices.
      absent: roles left out of the step altogether.
      shared_workers: as of ``step_calls``.

    Raises:
      ConfigError: the calls cannot be traced, or one belongs to no phase that can be planned.
    """
    calls = step_calls(algorithm, config, updates, samples, absent, shared_workers)
    table = algorithm.role_table(config)
    called = {call.role for call in calls}
    placed = tuple(name for name in table if name in roles and name in called)
    found = []
    for call in calls:
        if call.phase not in _KINDS:
            raise ConfigError(
                f"{call.role}.{call.method} is of the phase {call.phase!r}; a plan knows "
                f"{', '.join(_KINDS)}"
            )
        if call.role in placed:
            found.append(PlannedCall(call.role, call.method, _KINDS[call.phase], call.rows))
    return Dataflow(algorithm.__name__, placed, tuple(found))


def find_algorithm(name: str) -> type[Algorithm]:
    """The algorithm that ``get_algorithm`` finds, which must have a dataflow to place."""
    found = get_algorithm(name)
    if not found.generates:
        raise ConfigError(f"--algorithm={name}: supervised training has no dataflow to place")
    return found


NUMERICS = {"masters": MASTERS, "float32": FLOAT32, "mixed": MIXED}
# Search space of the HybridFlow paper's systems: tensor parallelism within a machine of 8, full or
# no rematerialisation, batches of any size.
PAPER_SPACE = SearchSpace(
    pipes=(1, 2, 4, 8, 16), tensors=(1, 2, 4, 8), contexts=(1,), remat=(NONE, FULL)
)


def build_problem(
    algorithm: type[Algorithm],
    settings: ConfigDict,
    models: Mapping[str, str],
    work: Workload,
    updates: int,
    cluster: Cluster,
    constants: Constants | None = None,
    numerics: str = "masters",
    offload: Mapping[str, Any] | None = None,
    even: bool = False,
) -> PlanProblem:
    """Build the planning problem of an algorithm's models, a workload and a cluster.

    Args:
      settings: the config's section ``algorithm``.
      models: by role a published name or a directory with config.json (``complete_models``).
      work: lengths, sequences and samples of a step.
      updates: optimizer updates per step.
      numerics: one of ``NUMERICS``: hjax's own on accelerators (``masters``) and on CPUs, or the
        paper's (``mixed``), under which ``PAPER_SPACE`` is searched.
      offload: by role the state offloaded to host memory; roles that are not named offload
        nothing. None: the search chooses, or with the paper's numerics nothing is offloaded.
      even: only layouts over which all batches divide; hjax's own numerics always require it.

    Raises:
      ConfigError: an unknown model, a role missing or unknown, sequences longer than a model's.
    """
    table = algorithm.role_table(settings)
    names, absent = complete_models(models, table)
    # The calls of a step do not depend on how many share a prompt.
    samples = max(work.samples, algorithm.fewest_samples(settings))
    flow = trace_dataflow(algorithm, settings, updates, samples, names, absent)
    shapes = {role: planning_shape(name) for role, name in names.items()}
    for role, shape in shapes.items():
        if shape.max_length < work.length and not table[role].function:
            raise ConfigError(
                f"--models: {role}={names[role]} has {shape.max_length} positions, fewer than the "
                f"{work.length} of prompt and response"
            )
    own = NUMERICS[numerics].hjax_programs
    waits = _offloads(flow, offload, "any" if own else "none")
    space = SearchSpace(even=True) if own else dataclasses.replace(PAPER_SPACE, even=even)
    return PlanProblem(
        flow,
        {r: model_counts(shape, names[r], table[r].scalar) for r, shape in shapes.items()},
        work,
        cluster,
        constants or Constants(),
        NUMERICS[numerics],
        space,
        waits,
    )


def _offloads(flow: Dataflow, asked: Mapping[str, Any] | None, usual: Any) -> dict[str, Any]:
    """The offload of each role: as requested, or ``usual`` for all roles without a request.

    Raises:
      ConfigError: a role that has no devices, or an offload that the role does not support.
    """
    if asked is None:
        return dict.fromkeys(flow.roles, usual) if usual != "none" else {}
    for role, what in asked.items():
        trained = bool(flow.calls_of(role, "update"))
        if role not in flow.roles or what not in OFFLOADS[trained]:
            allowed = OFFLOADS[trained] if role in flow.roles else OFFLOADS[True]
            raise ConfigError(
                f"--offload: '{role}={what}' is not ROLE=WHAT, with a role of "
                f"{', '.join(flow.roles)} and one of {', '.join(allowed)}"
            )
    return dict(asked)


def complete_models(
    models: Mapping[str, str], roles: Mapping[str, Role]
) -> tuple[dict[str, str], list[str]]:
    """Model name of each role that has one, in the order of ``roles``, and the roles left out.

    A reward or cost without a name is a function on the host. A cost critic without a name has the
    critic's model; ``none`` leaves it out.

    Raises:
      ConfigError: a role that the algorithm does not have, or one of its roles without a model.
    """
    for role in models:
        if role not in roles:
            raise ConfigError(f"--models: no role {role!r}; this algorithm has {', '.join(roles)}")
    names = dict(models)
    absent = [role for role, name in names.items() if name == "none"]
    for name, like in roles.items():  # roles that share a config section have the same model
        if like.config_section in names:
            names.setdefault(name, names[like.config_section])
    missing = [r for r in roles if r not in names and not (roles[r].function or roles[r].host)]
    if missing or "actor" in absent:
        raise ConfigError(
            f"--models lacks {', '.join(missing or ['actor'])}; this algorithm has "
            f"{', '.join(roles)} (reward and cost may be left out: functions on the host)"
        )
    return {role: names[role] for role in roles if role in names and role not in absent}, absent
