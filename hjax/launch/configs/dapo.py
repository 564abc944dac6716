"""DAPO: dynamic sampling of groups with equal rewards, clip-higher.

    python -m hjax.launch --config=dapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=dapo.py`."""
    config = sorting_config("DAPO", steps=300)
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Right answers have six tokens; the overlong penalty begins at 6.4 of 8, as in the paper.
    config.rollout.max_response_length = 8
    # Without partial credit nearly all first groups would be wrong, and only the overlong penalty
    # would be learned.
    return config
