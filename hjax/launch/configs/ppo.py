"""PPO on a built-in task, from nothing: a small model learns to sort digits within minutes.

    python -m hjax.launch --config=ppo.py

A supervised warm start on demonstrations stands for the pretrained weights that a real run has;
it is stopped early, so that there is something left to learn from rewards.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base


def get_config() -> ConfigDict:
    """The config of `--config=ppo.py`."""
    config = base.get_config()
    config.algorithm.name = "PPO"
    config.steps = 300

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Part of the reward for digits in the right place: without it an early policy, which gets few
    # prompts right, would learn from little.
    config.data.task_options.partial = 0.5

    # Shallow and narrow: on a CPU the time goes into the number of operations, not their size.
    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384

    config.warm_start.steps = 20
    config.warm_start.batch = 64
    config.warm_start.learning_rate = 1e-3

    # 64 prompts x 4 samples = 256 sequences a step, learned from in two mini-batches.
    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    # The model from scratch may move far from where it starts; the KL is there to be watched.
    config.algorithm.kl_coef = 0.01
    # Without it the policy settles early on orders that are nearly right.
    config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 50
    config.checkpoint.every = 50
    return config
