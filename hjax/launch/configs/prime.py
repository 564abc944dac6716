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
    # At first few answers are right: groups with one of eight count, though the paper leaves out
    # those below a fifth; and process rewards, which know little yet, weigh less than outcomes.
    config.algorithm.accuracy_low = 0.05
    config.algorithm.accuracy_high = 0.95
    config.algorithm.process_coef = 0.3
    # Rewards for each token make the policy sure of itself early.
    config.algorithm.entropy_coef = 0.05
    config.algorithm.kl_coef = 0.01
    config.critic.learning_rate = 1e-4
    return config
