"""VAPO: PPO with a critic that begins alone and learns from whole returns.

    python -m hjax.launch --config=vapo.py

On the task of grpo.py; docs/algorithms has the formula.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=vapo.py`."""
    config = sorting("VAPO", steps=320)
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # For responses of six tokens: a lambda of 5/6, as .05 gives one of 120.
    config.algorithm.lam_alpha = 1.0
    config.critic.learning_rate = 1e-3
    # Twenty steps of four updates in which the critic learns alone.
    config.actor.frozen_updates = 80
    return config
