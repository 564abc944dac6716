"""Base config without a task: sizes for a model and prompts of your own.

    python -m hjax.launch --config=base.py --config.actor.path=DIR \\
        --config.data.path=FILE --config.reward.function=FILE.py:reward

It is GRPO, which needs no critic; `--config.algorithm.name` sets another algorithm. The other
shipped configs start from it.
"""

from ml_collections import ConfigDict

import hjax


def get_config() -> ConfigDict:
    """The config of `--config=base.py`."""
    config = hjax.default_config()
    config.algorithm.name = "GRPO"
    config.steps = 200

    # Set `data.path`, or a built-in task.
    config.data.task = ""

    # 32 prompts x 8 responses = 256 sequences per step.
    config.rollout.prompts = 32
    config.rollout.samples = 8

    # For pretrained weights; a model from scratch needs about a hundred times as much.
    config.actor.learning_rate = 1e-6
    config.critic.learning_rate = 1e-5

    config.eval.every = 20
    config.checkpoint.every = 20
    return config
