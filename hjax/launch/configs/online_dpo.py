"""Online DPO: two answers to each prompt, the reward says which is chosen.

    python -m hjax.launch --config=online_dpo.py

On the task of grpo.py; docs/losses.md has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=online_dpo.py`."""
    config = sorting("OnlineDPO")
    # As many sequences a step as grpo.py, in twos.
    config.rollout.prompts = 128
    config.rollout.samples = 2
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    return config
