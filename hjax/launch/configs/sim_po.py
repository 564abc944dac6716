"""SimPO: length-normalised log-probs with a margin, no reference.

    python -m hjax.launch --config=sim_po.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=sim_po.py`."""
    config = preference_config("SimPO")
    config.warm_start.steps = 40
    return config
