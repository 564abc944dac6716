"""ReMax on the task of ppo.py: the greedy response's reward is the baseline, no critic.

python -m hjax.launch --config=remax.py
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=remax.py`."""
    config = sorting("ReMax", steps=1000)
    # One update per batch, without a ratio that would allow more, so every batch is new; one
    # sample per prompt would do as well, since the baseline does not come from the group.
    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.kl_coef = 0.01
    # Without it the policy settles early on orders that are nearly right.
    config.algorithm.entropy_coef = 0.06
    # Rewards minus the greedy one are small where both are nearly right; their scale is evened out.
    config.algorithm.whiten = True

    config.eval.every = 100
    config.checkpoint.every = 100
    return config
