"""REINFORCE++: whitened returns, PPO's clip.

    python -m hjax.launch --config=reinforce_plus_plus.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=reinforce_plus_plus.py`."""
    config = sorting_config("ReinforcePlusPlus")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    config.algorithm.kl_coef = 0.01
    return config
