"""Shipped configs, one `get_config()` per file; `--config=ppo.py` finds them by name.

`benchmarks/learning.py` runs all of them and looks at whether they learn.
"""

from __future__ import annotations

from hjax.config import Config


def pairs(algorithm: str) -> Config:
    """The task and the model of ppo.py with preference pairs: an answer beside one with a mistake.

    Args:
      algorithm: one that learns from pairs.
    """
    config = sorting(algorithm, steps=300)
    # A policy that knows the form of an answer is to learn which one is right.
    config.warm_start.steps = 60
    # Sequences per update, two of each pair.
    config.warm_start.batch = 128
    return config


def judging(algorithm: str, task: str = "sorting", steps: int = 300) -> Config:
    """The model of ppo.py with a scalar head, trained from nothing on a task's labelled answers.

    Args:
      algorithm: one that trains such a model.
      task: of which it learns.
      steps: of the run.
    """
    config = sorting(algorithm, steps)
    config.data.task = task
    config.warm_start.steps = 0
    # Sequences per update, of pairs two each.
    config.warm_start.batch = 128
    config.actor.learning_rate = 1e-3
    config.actor.warmup_updates = 20
    config.eval.every = 50
    return config


def sorting(algorithm: str, steps: int = 450) -> Config:
    """The task, the model and the rollouts of grpo.py, with an algorithm's keys at its defaults.

    Args:
      algorithm: its name.
      steps: of the run.
    """
    import hjax.algorithms
    from hjax.launch.configs import base

    config = base.get_config()
    config.algorithm.name = algorithm
    config.steps = steps

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Graded rewards: a group in which all samples score the same teaches nothing.
    config.data.task_options.partial = 0.5

    small_model(config)

    config.warm_start.steps = 20

    config.rollout.prompts = 32
    config.rollout.samples = 8
    if "entropy_coef" in hjax.algorithms.get_algorithm(algorithm).all_keys():
        # Without it the policy settles early on orders that are nearly right.
        config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 50
    config.checkpoint.every = 50
    return config


def small_model(config: Config) -> None:
    """Sizes of a model that learns on CPUs: there the time goes into the number of operations."""
    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384
