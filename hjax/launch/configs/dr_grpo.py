"""Dr.GRPO: neither a standard deviation nor a length divides.

    python -m hjax.launch --config=dr_grpo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=dr_grpo.py`."""
    config = sorting("DrGRPO")
    # Learned from in two mini-batches, twice, as grpo.py does.
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
