"""GiGPO on episodes: moves in the same cell of a maze are compared with each other.

    python -m hjax.launch --config=gigpo.py

The task of maze.py. `--config.algorithm.step_weight=0` is GRPO.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import episode_config


def get_config() -> ConfigDict:
    """The config of `--config=gigpo.py`."""
    config = episode_config("maze", steps=100)
    config.algorithm.name = "GiGPO"
    config.algorithm.kl_coef = 0.0
    config.data.task_options.side = 5
    config.data.task_options.distance = 4
    config.data.task_options.noise = 0.5
    config.warm_start.steps = 150
    return config
