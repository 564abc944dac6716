"""ReMax on the task of ppo.py: the greedy response's reward is the baseline, no critic.

python -m hjax.launch --config=remax.py
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=remax.py`."""
    config = sorting_config("ReMax", steps=1000)
    # One update per batch, since there is no ratio. One sample per prompt would also work, because
    # the baseline does not come from the group.
    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.kl_coef = 0.01
    # Without the bonus the policy converges early to orders that are nearly right.
    config.algorithm.entropy_coef = 0.06
    # Advantages are small where sample and greedy response are both nearly right.
    config.algorithm.whiten = True

    config.eval.every = 100
    config.checkpoint.every = 100
    return config
