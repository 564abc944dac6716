"""PPO on a built-in task, from scratch: a small model learns to sort digits within minutes.

    python -m hjax.launch --config=ppo.py

A supervised warm start on demonstrations replaces the pretrained weights of a real run. It stops
early, so that something is left to learn from rewards.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base, small_model


def get_config() -> ConfigDict:
    """The config of `--config=ppo.py`."""
    config = base.get_config()
    config.algorithm.name = "PPO"
    config.steps = 400

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Partial credit for digits in the right place: an early policy gets few prompts right.
    config.data.task_options.partial = 0.5

    small_model(config)

    config.warm_start.steps = 20
    config.warm_start.batch = 64
    config.warm_start.learning_rate = 1e-3

    # 64 prompts x 4 samples = 256 sequences per step, in two mini-batches.
    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # Small, because a model from scratch may move far from its start; the KL is logged.
    config.algorithm.kl_coef = 0.01
    # Without the bonus the policy converges early to orders that are nearly right.
    config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 50
    config.checkpoint.every = 50
    return config
