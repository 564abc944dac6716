"""CISPO: the ratio is a clipped weight, every token keeps its gradient.

    python -m hjax.launch --config=cispo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=cispo.py`."""
    config = sorting_config("CISPO")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
