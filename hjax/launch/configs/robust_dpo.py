"""Robust DPO: an unbiased loss for a tenth of wrong labels.

    python -m hjax.launch --config=robust_dpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=robust_dpo.py`."""
    return preference_config("RobustDPO")
