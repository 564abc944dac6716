"""Dr.GRPO: no division by the standard deviation or the length.

    python -m hjax.launch --config=dr_grpo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=dr_grpo.py`."""
    config = sorting_config("DrGRPO")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
