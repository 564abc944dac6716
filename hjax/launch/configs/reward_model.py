"""A reward model on preference pairs: which of two answers is right.

    python -m hjax.launch --config=reward_model.py

With data of your own (`--config.data.path=FILE`) the columns `chosen` and `rejected` hold the
pairs, text or chat messages, with a column `prompt` or without (hh-rlhf), or `text` and `label`
(1 good, 0 bad) hold texts; `--config.actor.path=DIR` starts from pretrained weights. The workdir is
what other runs name: `--config=ppo.py --config.reward.path=WORKDIR` (docs/reward_models.md).
"""

from ml_collections import ConfigDict

from hjax.launch.configs import judging


def get_config() -> ConfigDict:
    """The config of `--config=reward_model.py`."""
    config = judging("RewardModel")
    # Pairs say nothing of where 0 is: it is held in the middle of each.
    config.algorithm.centring = 0.01
    return config
