"""cDPO: DPO for labels of which a tenth is taken to be wrong, smoothed.

    python -m hjax.launch --config=cdpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=cdpo.py`."""
    return pairs("CDPO")
