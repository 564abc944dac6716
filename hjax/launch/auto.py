"""`placement=auto`: the plan of a run for the devices it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import ConfigError
from hjax.launch.dataflow import trace
from hjax.launch.placement import Plan
from hjax.launch.plan_result import describe_result
from hjax.launch.profile import Profile, find_profile
from hjax.models import arithmetic
from hjax.models.config import ModelConfig
from hjax.sharding.mapping.options import Space
from hjax.sharding.mapping.records import FLOAT32, MASTERS, Cluster, Pool, Workload
from hjax.sharding.mapping.search import Problem
from hjax.sharding.mapping.strategies import plan as search_plan

SCALAR = ("critic", "cost_critic", "reward", "cost")


def auto_plan(
    config: ConfigDict,
    algorithm: type[Algorithm],
    models: dict[str, ModelConfig],
    prompt_length: int,
    devices: Sequence[Any],
    float32: bool,
    profile: Callable[[Sequence[Any]], Profile] = find_profile,
) -> Plan:
    """The fastest plan of the cost model on ``devices``.

    Args:
      models: shapes of the roles that need devices.
      float32: whether the run computes in float32.

    Raises:
      ConfigError: it would not fit, with the bytes missing; or a run that cannot be planned.
    """
    problem = run_problem(config, algorithm, models, prompt_length, devices, float32, profile)
    found = search_plan(problem, "auto")
    described = describe_result(found, problem, "auto")
    keys = ("seconds", "memory_bytes", "set_memory_bytes", "usable_bytes", "origins", "candidates")
    return Plan(
        tuple(tuple(s) for s in described["placement"]),
        tuple(described["allocation"]),
        described["layouts"],
        {key: described[key] for key in keys},
    )


def run_problem(
    config: ConfigDict,
    algorithm: type[Algorithm],
    models: dict[str, ModelConfig],
    prompt_length: int,
    devices: Sequence[Any],
    float32: bool,
    profile: Callable[[Sequence[Any]], Profile] = find_profile,
) -> Problem:
    """A run as a problem for the search."""
    if not algorithm.generates:
        raise ConfigError(
            f"placement=auto: {algorithm.__name__} has one model and no rollouts; use colocate"
        )
    rollout = config.rollout
    rows = rollout.prompts * rollout.samples
    minibatch = config.algorithm.get("minibatch", 0) or rows
    flow = trace(algorithm, config.algorithm, rows // minibatch, rollout.samples, models)
    measured = profile(devices)
    batches = [rows, minibatch]
    if config.warm_start.steps and not config.actor.path:
        batches.append(config.warm_start.batch)
    micro = max(config.actor.micro_batch, config.critic.micro_batch)
    space = Space(
        even=True,
        batches=tuple(b for b in (*batches, micro) if b),
        micro_batch=micro,
        waves=(1,),
        rematerialise=(bool(config.model.remat),),
    )
    return Problem(
        flow,
        {r: arithmetic.counts(m, r, scalar=r in SCALAR) for r, m in models.items()},
        Workload(prompt_length, rollout.max_response_length, rows, rollout.samples),
        Cluster((Pool(measured.device, 1, len(devices)),)),
        measured.constants,
        FLOAT32 if float32 else MASTERS,
        space,
    )
