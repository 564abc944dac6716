"""Online DPO: two samples per prompt, the reward says which is chosen.

    python -m hjax.launch --config=online_dpo.py

On the task of grpo.py; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=online_dpo.py`."""
    config = sorting_config("OnlineDPO")
    # As many sequences per step as grpo.py, in pairs.
    config.rollout.prompts = 128
    config.rollout.samples = 2
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
