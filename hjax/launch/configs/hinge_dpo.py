"""SLiC's hinge: a margin between chosen and rejected that is enough.

    python -m hjax.launch --config=hinge_dpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=hinge_dpo.py`."""
    return pairs("HingeDPO")
