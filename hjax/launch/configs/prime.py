"""PRIME: outcomes train a reward of tokens while the policy learns from both.

    python -m hjax.launch --config=prime.py

On the task of grpo.py; docs/losses.md has the formula. The model of the process rewards takes the
keys of `critic`.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=prime.py`."""
    config = sorting("PRIME")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # At first hardly any answer is wholly right: outcomes graded by place teach on every prompt,
    # and process rewards, which know little yet, weigh less.
    config.algorithm.accuracy_low = 0.0
    config.algorithm.accuracy_high = 1.0
    config.algorithm.process_coef = 0.2
    config.critic.learning_rate = 3e-4
    return config
