"""SAPO: a soft gate in place of the clip.

    python -m hjax.launch --config=sapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=sapo.py`."""
    config = sorting("SAPO")
    # Learned from in two mini-batches, twice, as grpo.py does.
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
