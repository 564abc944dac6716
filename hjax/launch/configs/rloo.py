"""RLOO: the mean of the other samples is the baseline.

    python -m hjax.launch --config=rloo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=rloo.py`."""
    config = sorting_config("RLOO", steps=800)
    # One update per batch, since there is no ratio.
    config.algorithm.kl_coef = 0.01
    return config
