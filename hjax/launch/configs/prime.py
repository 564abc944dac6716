"""PRIME: outcomes train an implicit process reward model; the policy learns from both.

    python -m hjax.launch --config=prime.py

On the task of grpo.py; docs/losses.md has the formula. The process reward model reads the keys of
`critic`.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=prime.py`."""
    config = sorting_config("PRIME")
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Few answers are right at first, so groups with one of eight are kept (the paper drops those
    # below a fifth), and process rewards, inaccurate at first, weigh less than outcomes.
    config.algorithm.accuracy_low = 0.05
    config.algorithm.accuracy_high = 0.95
    config.algorithm.process_coef = 0.3
    # Process rewards reduce the entropy early.
    config.algorithm.entropy_coef = 0.05
    config.algorithm.kl_coef = 0.01
    config.critic.learning_rate = 1e-4
    return config
