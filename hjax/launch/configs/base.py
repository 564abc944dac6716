"""A neutral start: nobody's task, no data, sizes for a model and prompts of your own.

    python -m hjax.launch --config=base.py --config.actor.path=DIR \\
        --config.data.path=FILE --config.reward.function=FILE.py:reward

It is GRPO, which needs no critic; `--config.algorithm.name` takes another. The other shipped
configs stand on it and say what their task wants.
"""

from ml_collections import ConfigDict

import hjax


def get_config() -> ConfigDict:
    """The config of `--config=base.py`."""
    config = hjax.default_config()
    config.algorithm.name = "GRPO"
    config.steps = 200

    # `data.path` is yours to name, or a built-in task.
    config.data.task = ""

    # 32 prompts x 8 responses = 256 sequences a step; responses as long as the data wants, see
    # docs/config.md.
    config.rollout.prompts = 32
    config.rollout.samples = 8

    # Of pretrained weights; one from scratch wants some hundred times as much.
    config.actor.learning_rate = 1e-6
    config.critic.learning_rate = 1e-5

    config.eval.every = 20
    config.checkpoint.every = 20
    return config
