"""GRPO on the task of ppo.py: the other samples of a prompt are the baseline, no critic.

python -m hjax.launch --config=grpo.py
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base


def get_config() -> ConfigDict:
    """The config of `--config=grpo.py`."""
    config = base.get_config()
    config.algorithm.name = "GRPO"
    config.steps = 450  # of five seeds one was at .898 after 300

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Graded rewards: a group in which all samples score the same teaches nothing.
    config.data.task_options.partial = 0.5

    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384

    config.warm_start.steps = 20

    # Fewer prompts and larger groups than PPO: the group is all that a sample is compared with.
    config.rollout.prompts = 32
    config.rollout.samples = 8
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    config.algorithm.kl_coef = 0.01
    # Without it the policy settles early on orders that are nearly right.
    config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 50
    config.checkpoint.every = 50
    return config
