"""METIS: the policy judges which prompts it can learn from before it answers them.

    python -m hjax.launch --config=metis.py

Reversing digits of all lengths: short prompts are soon always right, long ones always wrong. A
judgement is the digit after a prompt and `?`, such as `90310|?4`.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base, small_model


def get_config() -> ConfigDict:
    """The config of `--config=metis.py`."""
    config = base.get_config()
    config.algorithm.name = "METIS"
    config.algorithm.minibatch = 64
    config.algorithm.judge_example = "{prompt}?{bin};"
    config.algorithm.judge_context = 64
    config.algorithm.judge_warm_start = 20
    config.steps = 150
    config.data.task = "mixed_reversal"
    config.data.task_options.shortest = 3
    small_model(config)
    config.warm_start.steps = 300
    config.rollout.prompts = 16
    config.rollout.samples = 8
    config.actor.learning_rate = 1e-4
    # Slowly at first: imitating judgements would undo what the warm start has taught.
    config.actor.warmup_updates = 100
    config.actor.schedule = "cosine"
    config.eval.every = 25
    config.checkpoint.every = 50
    return config
