"""PRIME: outcomes train a reward of tokens while the policy learns from both.

    python -m hjax.launch --config=prime.py

On the task of grpo.py; docs/losses.md has the formula. The model of the process rewards takes the
keys of `critic`.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=prime.py`."""
    config = sorting("PRIME", steps=300)
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Of eight responses one to seven: at first few are right.
    config.algorithm.accuracy_low = 0.1
    config.algorithm.accuracy_high = 0.9
    config.algorithm.process_coef = 0.3
    config.actor.learning_rate = 5e-4
    config.critic.learning_rate = 3e-4
    return config
