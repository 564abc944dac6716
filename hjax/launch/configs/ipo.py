"""IPO: aims the margin between chosen and rejected at a target value.

    python -m hjax.launch --config=ipo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=ipo.py`."""
    return preference_config("IPO")
