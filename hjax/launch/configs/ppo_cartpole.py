"""PPO on CartPole: a perceptron that plays, without a language model.

    python -m hjax.launch --config=ppo_cartpole.py

docs/any_network.md has what a network of your own needs.
"""

from ml_collections import ConfigDict

from hjax.settings.keys import default_config


def get_config() -> ConfigDict:
    """The config of `--config=ppo_cartpole.py`: 300,000 steps of the environment."""
    config = default_config()
    config.algorithm.name = "NetworkPPO"
    config.algorithm.environment = "cartpole"
    config.algorithm.environments = 16
    config.algorithm.play_steps = 64
    config.algorithm.minibatch = 256
    config.algorithm.epochs = 4
    config.algorithm.gae_lambda = 0.95
    config.steps = 292
    for role in ("actor", "critic"):
        config[role].learning_rate = 1e-3
        config[role].schedule = "linear"
        config[role].max_grad_norm = 0.5
    config.eval.every = 73
    config.checkpoint.every = 73
    return config
