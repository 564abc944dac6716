"""IPO: a margin between chosen and rejected is aimed at, not pushed on.

    python -m hjax.launch --config=ipo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=ipo.py`."""
    return pairs("IPO")
