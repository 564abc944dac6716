"""SimPO: mean log-probs with a margin, no reference.

    python -m hjax.launch --config=sim_po.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=sim_po.py`."""
    config = pairs("SimPO")
    config.warm_start.steps = 40
    return config
