"""Whether there is room for a run's models and sequences, asked before anything is allocated.

A lower bound, of what stays: what it refuses cannot run. What passes may still not fit, since
programs need memory of their own; the dry run tells theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms import Algorithm
from hjax.errors import ConfigError
from hjax.machine import device_memory, free_bytes
from hjax.models import weight_ring
from hjax.models.counts import Workload
from hjax.roles import ROLLOUT
from hjax.run.roles import Roles
from hjax.run.slot_room import role_memory
from hjax.settings.checking import on_cluster
from hjax.show.format import size
from hjax.workers.memory import Memory

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
    rollout, platform = config.rollout, devices[0].platform
    rows = rollout.prompts * rollout.samples if algorithm.generates else config.warm_start.batch
    work = Workload(prompt_length, rollout.max_response_length, rows, rollout.samples)
    generates = roles.generates if algorithm.generates else ""
    weights, caches = [], []
    for members in roles.plan.placement:
        kept, cache = 0.0, 0.0
        for role in members:
            build, entry = roles.builds[role], roles.table[role]
            context = build.arguments[0]
            if context.model is None:
                continue
            tpu = platform in weight_ring.PLATFORMS
            memory = role_memory(role, build, entry, roles.layouts[role], tpu)
            if role == ROLLOUT:
                kept += memory.generation_copy()
            else:
                kept += memory.resident(entry.trained, context.offload)
            if role == generates:
                cache = _cache(memory, work, context.slots)
        weights.append(kept)
        caches.append(cache)
    if platform == "cpu":
        if on_cluster(config) and config.cluster.address not in _LOCAL:
            return  # of hosts that are not this one
        counts, batch = roles.plan.allocation, _TOKEN_BYTES * rows * work.length
        models = sum(n * kept for n, kept in zip(counts, weights, strict=True))
        sequences = batch + sum(n * cache for n, cache in zip(counts, caches, strict=True))
        has = "this machine has {} left", free_bytes(devices[0])
        return _compare(models, sequences, *has, work)
    has = "a device has {} for programs", min(map(device_memory, devices))
    for kept, cache in zip(weights, caches, strict=True):
        _compare(kept, cache, *has, work)


def _cache(memory: Memory, work: Workload, slots: int) -> float:
    """Bytes of a device for the keys and values of the sequences that are generated at a time."""
    mesh = memory.mesh
    parts = mesh.devices // (mesh.generate_pipe * mesh.generate_tensor)
    at_once = min(work.sequences, slots) if slots > 0 else work.sequences
    groups = at_once / work.samples / parts
    return memory.cache(groups, work.prompt_length + work.samples * work.response_length)


def _compare(weights: float, sequences: float, has: str, have: int, work: Workload) -> None:
    if not have or weights + sequences <= have:
        return
    raise ConfigError(
        f"weights with their optimizers take {size(weights)} at the least, {work.sequences} "
        f"sequences of {work.length} tokens {size(sequences)}, and {has.format(size(have))}; use "
        "smaller models (model.hidden_size, model.layers), fewer or shorter sequences "
        "(rollout.prompts, rollout.samples, rollout.max_response_length), or more memory"
    )
