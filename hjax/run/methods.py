"""What a role's worker can be called with, read off its class."""

from __future__ import annotations

from collections.abc import Collection

from hjax.algorithms import Algorithm
from hjax.algorithms.base import Absent
from hjax.errors import ConfigError
from hjax.run.roles import WORKERS
from hjax.workers import ModelReward


def worker_methods(algorithm: type[Algorithm], role: str) -> dict[str, str]:
    """The phase (``generate``, ``prepare``, ``update``) of each method bound to a protocol.

    Raises:
      ConfigError: the role has no worker class.
    """
    # A reward function's worker answers the same calls as a reward model's.
    known = {**WORKERS, "reward": ModelReward, "cost": ModelReward, **algorithm.workers}
    if role not in known:
        raise ConfigError(
            f"role {role!r} has no worker class: give it one in {algorithm.__name__}.workers"
        )
    worker = known[role]
    return {
        name: method.phase
        for name in dir(worker)
        if not name.startswith("__") and hasattr(method := getattr(worker, name), "phase")
    }


def absent_roles(algorithm: type[Algorithm], present: Collection[str]) -> dict[str, Absent]:
    """Stand-ins for the algorithm's roles that are not ``present``, by role."""
    roles = dict.fromkeys((*algorithm.roles, *algorithm.workers))
    return {
        role: Absent(role, worker_methods(algorithm, role))
        for role in roles
        if role not in present
    }
