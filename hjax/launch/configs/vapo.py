"""VAPO: PPO with value pretraining and decoupled GAE.

    python -m hjax.launch --config=vapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=vapo.py`."""
    config = sorting_config("VAPO", steps=320)
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # For responses of six tokens: a lambda of 5/6, as alpha .05 gives for 120 tokens.
    config.algorithm.lam_alpha = 1.0
    config.critic.learning_rate = 1e-3
    # Twenty steps of four updates train the critic alone.
    config.actor.frozen_updates = 80
    return config
