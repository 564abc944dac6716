"""OPO: the baseline that is best on-policy, the group's mean by length.

    python -m hjax.launch --config=opo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=opo.py`."""
    config = sorting("OPO", steps=500)
    # Exactly on-policy: one update per batch.
    return config
