"""GDPO: two rewards, each normalised within its group before they are summed.

    python -m hjax.launch --config=gdpo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=gdpo.py`."""
    config = sorting_config("GDPO")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Rewards for the exact answer and for digits in place, in a file of hjax/rewards.
    config.reward.function = "sorted_digits.py:reward"
    return config
