"""SPIN: self-play, demonstrations are preferred to the policy's own samples.

    python -m hjax.launch --config=spin.py

On the task of grpo.py, with its demonstrations. With data of your own (`--config.data.path=FILE`)
the column `response` holds them; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=spin.py`."""
    config = sorting_config("SPIN", steps=300)
    # Demonstrations per step, each paired with one sample.
    config.rollout.prompts = 64
    config.rollout.samples = 1
    config.algorithm.epochs = 2
    return config
