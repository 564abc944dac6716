"""DPO on preference pairs: the right answer is preferred to one with a wrong digit.

    python -m hjax.launch --config=dpo.py
    python -m hjax.launch --config=dpo.py --config.algorithm.name=IPO

With data of your own (`--config.data.path=FILE`) the columns `chosen` and `rejected` hold the
pairs, text or chat messages, with a column `prompt` or without (hh-rlhf);
`--config.actor.path=DIR` starts from pretrained weights.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import preference_config


def get_config() -> ConfigDict:
    """The config of `--config=dpo.py`."""
    return preference_config("DPO")
