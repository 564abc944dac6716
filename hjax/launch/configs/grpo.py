"""GRPO on the task of ppo.py: the other samples of a prompt are the baseline, no critic.

python -m hjax.launch --config=grpo.py
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=grpo.py`."""
    # Of five seeds one was at .898 after 300 steps. Fewer prompts and larger groups than PPO: the
    # group is all that a sample is compared with.
    config = sorting("GRPO", steps=450)
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    config.algorithm.kl_coef = 0.01
    return config
