"""GRPO on episodes with a tool: sums of three numbers, worked out with a calculator.

    python -m hjax.launch --config=calculator.py

A turn is a calculation, which the environment answers, or the answer. Without the calculator, which
is what to compare with, the same policy has to answer by heart:

    python -m hjax.launch --config=calculator.py --config.data.task_options.tool=False
"""

from ml_collections import ConfigDict

from hjax.launch.configs import episode_config


def get_config() -> ConfigDict:
    """The config of `--config=calculator.py`."""
    config = episode_config("calculator", steps=60)
    config.data.task_options.terms = 3
    config.data.task_options.digits = 1
    config.data.task_options.noise = 0.3
    config.warm_start.steps = 200
    return config
