"""KTO: answers that are each marked right or wrong, no pairs.

    python -m hjax.launch --config=kto.py

On the task of dpo.py. With data of your own (`--config.data.path=FILE`) the columns `response` and
`label` (true or false) hold the verdicts; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import pairs


def get_config() -> ConfigDict:
    """The config of `--config=kto.py`."""
    config = pairs("KTO")
    config.warm_start.steps = 20
    config.actor.learning_rate = 1e-3
    config.algorithm.beta = 0.3
    # Right answers weigh more: wrong ones say only what to leave.
    config.algorithm.desirable = 1.5
    return config
