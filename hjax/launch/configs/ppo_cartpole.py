"""PPO on CartPole: a perceptron that plays, without a language model.

    python -m hjax.launch --config=ppo_cartpole.py

docs/any_network.md has what a network of your own needs.
"""

from ml_collections import ConfigDict

from hjax.settings.keys import default_config


def get_config() -> ConfigDict:
    """The config of `--config=ppo_cartpole.py`: 299,008 steps of the environment."""
    config = default_config()
    config.algorithm.name = "NetworkPPO"
    config.algorithm.environment = "cartpole"
    config.algorithm.environments = 8
    config.algorithm.play_steps = 128
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 4
    # With 0.99 and 0.95 seed 7 learned to hold the pole and let the cart drift off after 230 steps.
    config.algorithm.gamma = 0.995
    config.algorithm.gae_lambda = 0.98
    config.steps = 292
    for role in ("actor", "critic"):
        config[role].learning_rate = 1e-3
        config[role].schedule = "linear"
        config[role].max_grad_norm = 0.5
    config.eval.every = 73
    config.checkpoint.every = 73
    return config
