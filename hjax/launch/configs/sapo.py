"""SAPO: a soft gate in place of the clip.

    python -m hjax.launch --config=sapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=sapo.py`."""
    config = sorting_config("SAPO")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
