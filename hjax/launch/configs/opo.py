"""OPO: the optimal on-policy baseline, the length-weighted group mean.

    python -m hjax.launch --config=opo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=opo.py`."""
    config = sorting_config("OPO", steps=500)
    # Exactly on-policy: one update per batch.
    return config
