"""ORPO: likelihood of the chosen response plus an odds ratio, no reference.

    python -m hjax.launch --config=orpo.py

On the pairs of dpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=orpo.py`."""
    config = preference_config("ORPO")
    # The likelihood term is supervised training, so a short warm start suffices.
    config.warm_start.steps = 20
    return config
