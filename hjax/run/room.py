"""Whether there is room for a run's models and sequences, asked before anything is allocated.

A lower bound, from sizes alone: what it refuses cannot run. What passes may still not fit, since
programs need memory of their own; the dry run tells theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import ConfigError
from hjax.kernels.int8_cache import INT8, element_bytes
from hjax.machine import device_memory, free_bytes
from hjax.models import arithmetic
from hjax.run.roles import Roles
from hjax.settings.checking import on_cluster
from hjax.show.format import size

# Of each token of a step's batch: its id and mask, log-probs, advantages, and those it starts from.
_TOKEN_BYTES = 4 + 1 + 3 * 4
_LOCAL = ("", "local")


def check_room(
    config: ConfigDict,
    algorithm: type[Algorithm],
    roles: Roles,
    prompt_length: int,
    devices: Sequence[Any],
) -> None:
    """Raise ConfigError where a run's sizes need more memory than its devices have.

    Args:
      config: the run's.
      algorithm: its class.
      roles: described.
      prompt_length: tokens.
      devices: all of the run's.
    """
    rollout = config.rollout
    rows = rollout.prompts * rollout.samples if algorithm.generates else config.warm_start.batch
    length = prompt_length + rollout.max_response_length
    weights = [sum(_weights(roles, r) for r in members) for members in roles.plan.placement]
    cache = _cache(roles, rows, length) if algorithm.generates else 0.0
    if devices[0].platform == "cpu":
        if on_cluster(config) and config.cluster.address not in _LOCAL:
            return  # of hosts that are not this one
        needed = sum(weights), cache + _TOKEN_BYTES * rows * length
        has = "this machine has {} left", free_bytes(devices[0])
        return _compare(*needed, *has, rows, length)
    has = "a device has {} for programs", min(map(device_memory, devices))
    for members, count, bytes_ in zip(
        roles.plan.placement, roles.plan.allocation, weights, strict=True
    ):
        own = cache if roles.generates in members else 0.0
        _compare(bytes_ / count, own / count, *has, rows, length)


def _weights(roles: Roles, role: str) -> float:
    """Bytes over all its devices of a role's weights, with what its optimizer keeps."""
    context, entry = roles.builds[role].arguments[0], roles.table[role]
    if context.model is None or context.offload == "all":
        return 0.0
    whole = arithmetic.parameters(context.model, entry.scalar)
    learned = arithmetic.learned_parameters(context.model, entry.scalar) if entry.trained else 0
    frozen = 1 if context.model.quantized else np.dtype(context.compute.dtype).itemsize
    each = 4
    if context.offload == "none" and entry.trained:
        each += context.optimizer.least_bytes
    replicas = roles.layouts[role].train.mesh.shape.get("data", 1)
    return float(replicas * (each * learned + frozen * (whole - learned)))


def _cache(roles: Roles, rows: int, length: int) -> float:
    """Bytes of the keys and values of the sequences that are generated at a time."""
    context = roles.builds[roles.generates].arguments[0]
    dtype = None if context.cache_dtype == INT8 else context.compute.dtype
    element = element_bytes(dtype, context.model.head_dim)
    at_once = min(rows, context.slots) if context.slots > 0 else rows
    return at_once * length * arithmetic.cache_bytes(context.model, element)


def _compare(
    weights: float, sequences: float, has: str, have: int, rows: int, length: int
) -> None:
    if not have or weights + sequences <= have:
        return
    raise ConfigError(
        f"weights with their optimizers take {size(weights)} at the least, {rows} sequences of "
        f"{length} tokens {size(sequences)}, and {has.format(size(have))}; use smaller models "
        "(model.hidden_size, model.layers), fewer or shorter sequences (rollout.prompts, "
        "rollout.samples, rollout.max_response_length), or more memory"
    )
