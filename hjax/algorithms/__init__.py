"""RL algorithms: one file each, and the pure functions that they are made of."""

import difflib
import inspect

from hjax.algorithms.algorithm import Algorithm, Batch
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
from hjax.algorithms.distillation import Distillation
from hjax.algorithms.dpo import CDPO, DPO, IPO, ORPO, HingeDPO, RobustDPO, SimPO
from hjax.algorithms.dqn import DQN
from hjax.algorithms.flow_matching import FlowGRPO, FlowMatching
from hjax.algorithms.gigpo import GiGPO
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.kto import KTO
from hjax.algorithms.metis import METIS
from hjax.algorithms.network_ppo import NetworkPPO
from hjax.algorithms.on_policy_pairs import SPIN, OnlineDPO
from hjax.algorithms.op_grpo import OPGRPO
from hjax.algorithms.ppo import PPO, VAPO
from hjax.algorithms.prime import PRIME
from hjax.algorithms.remax import ReMax
from hjax.algorithms.reward_model import CostModel, ProcessRewardModel, RewardModel
from hjax.algorithms.safe_rlhf import SafeRLHF
from hjax.algorithms.sft import SFT
from hjax.errors import ConfigError
from hjax.user_code import load_object

__all__ = [
    "PPO",
    "GRPO",
    "ReMax",
    "SafeRLHF",
    "RLOO",
    "Reinforce",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "DrGRPO",
    "DAPO",
    "GSPO",
    "GSPOToken",
    "CISPO",
    "SAPO",
    "OPO",
    "GPG",
    "MaxRL",
    "GDPO",
    "METIS",
    "GiGPO",
    "VAPO",
    "PRIME",
    "DPO",
    "IPO",
    "CDPO",
    "RobustDPO",
    "HingeDPO",
    "ORPO",
    "SimPO",
    "KTO",
    "SPIN",
    "OnlineDPO",
    "Distillation",
    "SFT",
    "RewardModel",
    "CostModel",
    "ProcessRewardModel",
    "NetworkPPO",
    "DQN",
    "FlowMatching",
    "FlowGRPO",
    "OPGRPO",
    "Algorithm",
    "Batch",
    "get_algorithm",
]

ALGORITHMS: dict[str, type[Algorithm]] = {
    name: globals()[name] for name in __all__[: __all__.index("Algorithm")]
}


def get_algorithm(name: str) -> type[Algorithm]:
    """Look up an algorithm class: a shipped one by name, or a user's in a file.

    Args:
      name: the class's name (``SimPO``), the name of its config (``sim_po``), or
        ``path.py:Class``.

    Raises:
      ConfigError: no such name (similar ones are suggested), file or class, or the object is not
        a subclass of Algorithm.
    """
    known = {_plain(each): each for each in ALGORITHMS}
    if _plain(name) in known:
        return ALGORITHMS[known[_plain(name)]]
    if ":" not in name:
        near = difflib.get_close_matches(_plain(name), known, 3, 0.5)
        offer = f"did you mean {' or '.join(known[each] for each in near)}? " if near else ""
        raise ConfigError(
            f"algorithm.name={name!r} is unknown; {offer}There are {', '.join(ALGORITHMS)}, "
            "and classes of yours as path.py:Class"
        )
    found = load_object(name, "algorithm.name")
    if not (inspect.isclass(found) and issubclass(found, Algorithm)):
        raise ConfigError(
            f"algorithm.name={name!r}: {found!r} is no subclass of hjax.algorithms.Algorithm"
        )
    return found


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
