"""KTO: unpaired answers, each labelled right or wrong.

    python -m hjax.launch --config=kto.py

On the task of dpo.py. With data of your own (`--config.data.path=FILE`) the columns `response` and
`label` (true or false) hold them; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=kto.py`."""
    config = preference_config("KTO")
    config.warm_start.steps = 20
    config.actor.learning_rate = 1e-3
    config.algorithm.beta = 0.3
    # Right answers weigh more: wrong ones only show what to avoid.
    config.algorithm.desirable = 1.5
    return config
