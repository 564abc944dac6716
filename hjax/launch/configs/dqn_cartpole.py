"""DQN on CartPole: play, store, replay and train as operators over futures.

    python -m hjax.launch --config=dqn_cartpole.py

docs/any_network.md explains the operators.
"""

from ml_collections import ConfigDict

from hjax.settings.keys import default_config


def get_config() -> ConfigDict:
    """The config of `--config=dqn_cartpole.py`."""
    config = default_config()
    config.algorithm.name = "DQN"
    config.algorithm.environment = "cartpole"
    config.algorithm.environments = 16
    config.algorithm.hidden_size = 128
    config.steps = 40
    config.actor.learning_rate = 5e-4
    config.actor.schedule = "linear"
    config.actor.max_grad_norm = 10.0
    config.eval.every = 10
    config.checkpoint.every = 10
    return config
