"""MaxRL: advantages divided by the group's mean reward.

    python -m hjax.launch --config=max_rl.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=max_rl.py`."""
    config = sorting_config("MaxRL")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
