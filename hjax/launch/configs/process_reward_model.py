"""A process reward model: which steps of an answer are right.

    python -m hjax.launch --config=process_reward_model.py

Half of the answers have a mistake, from which on their steps, a digit each, are wrong. With data of
your own (`--config.data.path=FILE`) the columns `completions` and `labels` hold the steps of an
answer and whether each is right, as TRL's stepwise supervision has them;
`--config.algorithm.separator` is the text that stands after each.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import judging


def get_config() -> ConfigDict:
    """The config of `--config=process_reward_model.py`."""
    return judging("ProcessRewardModel")
