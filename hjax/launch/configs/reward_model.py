"""A reward model on preference pairs: which of two answers is right.

    python -m hjax.launch --config=reward_model.py

With data of your own (`--config.data.path=FILE`) the columns `chosen` and `rejected` hold the
pairs, text or chat messages, with a column `prompt` or without (hh-rlhf), or `text` and `label`
(1 good, 0 bad) hold texts; `--config.actor.path=DIR` starts from pretrained weights. Other runs use
the workdir: `--config=ppo.py --config.reward.path=WORKDIR` (docs/reward_models.md).
"""

from ml_collections import ConfigDict

from hjax.launch.configs import reward_model_config


def get_config() -> ConfigDict:
    """The config of `--config=reward_model.py`."""
    config = reward_model_config("RewardModel")
    # Pairs do not determine the offset of scores; centring puts 0 in the middle of each pair.
    config.algorithm.centring = 0.01
    return config
