"""Supervised fine-tuning on demonstrations: the warm start of the other configs, but to the end.

    python -m hjax.launch --config=sft.py

With data of your own (`--config.data.path=FILE`) the column `response` holds the demonstrations;
`--config.actor.path=DIR` starts from pretrained weights.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base, small_model


def get_config() -> ConfigDict:
    """The config of `--config=sft.py`."""
    config = base.get_config()
    config.algorithm.name = "SFT"
    config.steps = 500

    config.data.task = "sorting"
    config.data.task_options.length = 5

    small_model(config)

    # Demonstrations (sequences) per update.
    config.warm_start.batch = 64
    config.actor.learning_rate = 1e-3
    config.actor.schedule = "cosine"
    config.actor.warmup_updates = 20

    config.eval.every = 100
    config.checkpoint.every = 100
    return config
