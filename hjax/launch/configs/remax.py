"""ReMax on the task of ppo.py: the greedy response's reward is the baseline, no critic.

python -m hjax.launch --config=remax.py
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base


def get_config() -> ConfigDict:
    """The config of `--config=remax.py`."""
    config = base.get_config()
    config.algorithm.name = "ReMax"
    config.steps = 1000

    config.data.task = "sorting"
    config.data.task_options.length = 5
    config.data.task_options.partial = 0.5

    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384

    config.warm_start.steps = 20

    # One update per batch, without a ratio that would allow more, so every batch is new; one
    # sample per prompt would do as well, since the baseline does not come from the group.
    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.kl_coef = 0.01
    # Without it the policy settles early on orders that are nearly right.
    config.algorithm.entropy_coef = 0.06
    # Rewards minus the greedy one are small where both are nearly right; their scale is evened out.
    config.algorithm.whiten = True

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 100
    config.checkpoint.every = 100
    return config
