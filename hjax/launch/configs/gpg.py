"""GPG: the plain policy gradient, rescaled for groups without signal.

    python -m hjax.launch --config=gpg.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=gpg.py`."""
    config = sorting_config("GPG", steps=500)
    # One update per batch, since there is no ratio.
    return config
