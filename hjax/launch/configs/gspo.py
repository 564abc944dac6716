"""GSPO: sequence-level probability ratio.

    python -m hjax.launch --config=gspo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=gspo.py`."""
    config = sorting_config("GSPO")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Wider than the paper's bounds (3e-4, 4e-4), which are for long responses and small steps.
    config.algorithm.clip_low = 0.1
    config.algorithm.clip_high = 0.1
    return config
