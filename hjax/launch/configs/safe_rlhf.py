"""Safe-RLHF: maximise the reward while the mean cost stays below a limit.

    python -m hjax.launch --config=safe_rlhf.py

In the task `harvest` the response copies digits of the prompt and the reward is their sum. The
digits 7, 8 and 9 are poisonous: a response with one of them costs 1. The multiplier, which weights
the cost against the reward, grows while the mean cost is above the limit; report.html plots it.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base, small_model


def get_config() -> ConfigDict:
    """The config of `--config=safe_rlhf.py`."""
    config = base.get_config()
    config.algorithm.name = "SafeRLHF"
    config.steps = 300

    config.data.task = "harvest"
    config.data.task_options.length = 8

    small_model(config)

    # Demonstrations copy poisonous digits as often as others, so the initial policy is unsafe.
    config.warm_start.steps = 150

    config.rollout.prompts = 64
    config.rollout.samples = 4
    config.algorithm.minibatch = 128
    config.algorithm.epochs = 2
    config.algorithm.kl_coef = 0.01
    # At most one response in ten may be poisonous on average.
    config.algorithm.cost_limit = 0.1
    config.algorithm.multiplier_learning_rate = 0.2

    config.actor.learning_rate = 3e-4
    config.critic.learning_rate = 1e-3

    config.eval.every = 20
    config.checkpoint.every = 20
    return config
