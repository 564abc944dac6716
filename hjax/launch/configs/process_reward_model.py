"""A process reward model: which steps of an answer are right.

    python -m hjax.launch --config=process_reward_model.py

A step is one digit of an answer. Half of the answers have a mistake, and all steps from it on are
wrong. With data of your own (`--config.data.path=FILE`) the columns `completions` and `labels` hold
the steps of an answer and whether each is right, in TRL's stepwise supervision format;
`--config.algorithm.separator` is the text after each step.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import reward_model_config


def get_config() -> ConfigDict:
    """The config of `--config=process_reward_model.py`."""
    return reward_model_config("ProcessRewardModel")
