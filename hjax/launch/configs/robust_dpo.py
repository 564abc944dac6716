"""Robust DPO: DPO for labels of which a tenth is taken to be wrong, unbiased.

    python -m hjax.launch --config=robust_dpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=robust_dpo.py`."""
    return pairs("RobustDPO")
