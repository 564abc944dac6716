"""ORPO: likelihood of the chosen with the odds against the rejected, no reference.

    python -m hjax.launch --config=orpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=orpo.py`."""
    config = pairs("ORPO")
    # Its likelihood of the chosen ones is supervised training: it takes any policy.
    config.warm_start.steps = 20
    return config
