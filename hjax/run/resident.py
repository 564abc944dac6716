"""What the roles of a run keep on their devices between calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from hjax.run.roles import Roles


def model_workers(roles: Roles) -> Iterator[tuple[str, Any]]:
    """The roles whose workers have programs, and those workers."""
    for role, group in roles.groups.items():
        if hasattr(group.worker, "programs"):
            yield role, group.worker


def resident_bytes(roles: Roles) -> dict[str, dict[str, int]]:
    """Bytes per device that each role keeps between calls, by role and kind of state."""
    return {
        role: {kind: device_bytes(tree) for kind, tree in worker.abstract_state().items()}
        for role, worker in model_workers(roles)
        if hasattr(worker, "abstract_state")
    }


def device_bytes(tree: Any) -> int:
    """Bytes that each device holds of a tree of jax.ShapeDtypeStruct with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        size = leaf.dtype.itemsize
        for n in leaf.sharding.shard_shape(leaf.shape):
            size *= n
        total += size
    return total


def offloaded_bytes(roles: Roles) -> int:
    """Bytes per device that wait in the host's memory while a pool generates, at most."""
    pools: dict[str, int] = {}
    sizes = resident_bytes(roles)
    for role, worker in model_workers(roles):
        if hasattr(worker, "away"):
            waiting = worker.away("generate", role == "actor")
            size = sum(n for kind, n in sizes.get(role, {}).items() if kind in waiting)
            name = roles.pools[role].name
            pools[name] = pools.get(name, 0) + size
    return max(pools.values(), default=0)
