"""SLiC's hinge loss on preference pairs.

    python -m hjax.launch --config=hinge_dpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=hinge_dpo.py`."""
    return preference_config("HingeDPO")
