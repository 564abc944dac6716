"""SPIN: demonstrations against the policy's own answers, which it learns to tell apart.

    python -m hjax.launch --config=spin.py

On the task of grpo.py, with its demonstrations. With data of your own (`--config.data.path=FILE`)
the column `response` holds them; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=spin.py`."""
    config = sorting("SPIN", steps=300)
    # Demonstrations a step, each beside an answer.
    config.rollout.prompts = 64
    config.rollout.samples = 1
    config.algorithm.epochs = 2
    return config
