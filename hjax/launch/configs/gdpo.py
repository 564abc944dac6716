"""GDPO: two rewards, each normalised within its group before they are added.

    python -m hjax.launch --config=gdpo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=gdpo.py`."""
    config = sorting("GDPO")
    # Learned from in two mini-batches, twice, as grpo.py does.
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # The whole answer, and the digits in place: a file of hjax/rewards, to copy and change.
    config.reward.function = "sorted_digits.py:reward"
    return config
