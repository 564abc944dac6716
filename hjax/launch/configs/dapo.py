"""DAPO: groups whose rewards are all equal are drawn anew, the clip is wider upwards.

    python -m hjax.launch --config=dapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=dapo.py`."""
    config = sorting("DAPO", steps=300)
    # Learned from in two mini-batches, twice, as grpo.py does.
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Right answers have six tokens; longer ones lose reward, as in the paper, from 6.4 of 8 on.
    config.rollout.max_response_length = 8
    # Of right or wrong alone nearly all first groups would be wrong: then the penalty of long
    # answers is all that is learned from. Groups that are all right are drawn anew later on.
    return config
