"""GPG: the plain policy gradient, scaled up for groups that say nothing.

    python -m hjax.launch --config=gpg.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=gpg.py`."""
    config = sorting("GPG", steps=500)
    # One update per batch: there is no ratio that would allow more.
    return config
