"""What to compute: one file per algorithm, and the pure functions they are made of."""

from __future__ import annotations

import inspect

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.critic_free import (
    CISPO,
    DAPO,
    GDPO,
    GPG,
    GSPO,
    OPO,
    RLOO,
    SAPO,
    DrGRPO,
    GSPOToken,
    MaxRL,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from hjax.algorithms.dpo import CDPO, DPO, IPO, ORPO, HingeDPO, RobustDPO, SimPO
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.ppo import PPO, VAPO
from hjax.algorithms.remax import ReMax
from hjax.algorithms.reward_model import CostModel, ProcessRewardModel, RewardModel
from hjax.algorithms.safe_rlhf import SafeRLHF
from hjax.algorithms.sft import SFT
from hjax.errors import ConfigError
from hjax.user_files import load_object

ALGORITHMS: dict[str, type[Algorithm]] = {
    each.__name__: each
    for each in (
        PPO,
        GRPO,
        ReMax,
        SafeRLHF,
        RLOO,
        Reinforce,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        DrGRPO,
        DAPO,
        GSPO,
        GSPOToken,
        CISPO,
        SAPO,
        OPO,
        GPG,
        MaxRL,
        GDPO,
        VAPO,
        DPO,
        IPO,
        CDPO,
        RobustDPO,
        HingeDPO,
        ORPO,
        SimPO,
        SFT,
        RewardModel,
        CostModel,
        ProcessRewardModel,
    )
}

__all__ = [
    "ALGORITHMS",
    "CDPO",
    "CISPO",
    "DAPO",
    "DPO",
    "GDPO",
    "GPG",
    "GRPO",
    "GSPO",
    "IPO",
    "OPO",
    "ORPO",
    "PPO",
    "RLOO",
    "SAPO",
    "SFT",
    "VAPO",
    "Algorithm",
    "Batch",
    "CostModel",
    "DrGRPO",
    "GSPOToken",
    "HingeDPO",
    "MaxRL",
    "ProcessRewardModel",
    "ReMax",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RewardModel",
    "RobustDPO",
    "SafeRLHF",
    "SimPO",
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
