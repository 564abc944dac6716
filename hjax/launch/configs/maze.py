"""GRPO on episodes: walk through a maze, a move a turn.

    python -m hjax.launch --config=maze.py

The return of an episode is 1 at the goal and 0 without. Demonstrations of the warm start take four
moves in ten at random, so the first policy knows what a move is and little of mazes.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import episode_config


def get_config() -> ConfigDict:
    """The config of `--config=maze.py`."""
    config = episode_config("maze", steps=100)
    config.data.task_options.side = 4
    config.data.task_options.distance = 3
    config.data.task_options.noise = 0.4
    config.warm_start.steps = 150
    return config
