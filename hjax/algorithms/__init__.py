"""What to compute: one file per algorithm, and the pure functions they are made of."""

from __future__ import annotations

import inspect

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.ppo import PPO
from hjax.algorithms.remax import ReMax
from hjax.algorithms.safe_rlhf import SafeRLHF
from hjax.algorithms.sft import SFT
from hjax.errors import ConfigError
from hjax.user_files import load_object

ALGORITHMS: dict[str, type[Algorithm]] = {
    "PPO": PPO,
    "GRPO": GRPO,
    "ReMax": ReMax,
    "SafeRLHF": SafeRLHF,
    "SFT": SFT,
}

__all__ = [
    "ALGORITHMS",
    "GRPO",
    "PPO",
    "SFT",
    "Algorithm",
    "Batch",
    "ReMax",
    "SafeRLHF",
    "get_algorithm",
]


def get_algorithm(name: str) -> type[Algorithm]:
    """The class of a name (``PPO``) or of a file of the user's (``mine.py:Mine``).

    Raises:
      ConfigError: no such name, file or class, or a class that is no Algorithm.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise ConfigError(
            f"algorithm.name={name!r} is unknown; allowed: {', '.join(ALGORITHMS)}, "
            "or a class of yours as path.py:Class"
        )
    found = load_object(name, "algorithm.name")
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm.name={name!r}: {found!r} is no subclass of hjax.algorithms.Algorithm"
        )
    return found
