"""Shipped configs, one `get_config()` per file; `--config=ppo.py` finds them by name.

`benchmarks/learning.py` runs all of them and checks that they learn.
"""

from __future__ import annotations

from hjax.config import Config


def preference_config(algorithm: str) -> Config:
    """Task and model of ppo.py with preference pairs: the right answer and one with a mistake.

    Args:
      algorithm: an algorithm that learns from pairs.
    """
    config = sorting_config(algorithm, steps=300)
    # Long enough that the policy knows the format of an answer, and learns which one is right.
    config.warm_start.steps = 60
    # Sequences per update, two per pair.
    config.warm_start.batch = 128
    return config


def reward_model_config(algorithm: str, task: str = "sorting", steps: int = 300) -> Config:
    """The model of ppo.py with a scalar head, trained from scratch on a task's labelled answers.

    Args:
      algorithm: an algorithm that trains reward or cost models.
      task: the built-in task with the answers.
      steps: training steps.
    """
    config = sorting_config(algorithm, steps)
    config.data.task = task
    config.warm_start.steps = 0
    # Sequences per update, two per pair.
    config.warm_start.batch = 128
    config.actor.learning_rate = 1e-3
    config.actor.warmup_updates = 20
    config.eval.every = 50
    return config


def sorting_config(algorithm: str, steps: int = 450) -> Config:
    """Task, model and rollouts of grpo.py, with an algorithm's keys at their defaults.

    Args:
      algorithm: its name.
      steps: training steps.
    """
    import hjax.algorithms
    from hjax.launch.configs import base

    config = base.get_config()
    config.algorithm.name = algorithm
    config.steps = steps

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Partial credit: a group with equal rewards has no gradient.
    config.data.task_options.partial = 0.5

    small_model(config)

    config.warm_start.steps = 20

    config.rollout.prompts = 32
    config.rollout.samples = 8
    if "entropy_coef" in hjax.algorithms.get_algorithm(algorithm).all_keys():
        # Without the bonus the policy converges early to orders that are nearly right.
        config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.critic.learning_rate = 1e-3

    config.eval.every = 50
    config.checkpoint.every = 50
    return config


def episode_config(task: str, steps: int) -> Config:
    """GRPO with a small model on the episodes of a built-in task.

    Args:
      task: one that is played over several turns.
      steps: training steps.
    """
    from hjax.launch.configs import base

    config = base.get_config()
    config.algorithm.name = "GRPO"
    config.algorithm.kl_coef = 0.0
    config.algorithm.minibatch = 64
    config.algorithm.epochs = 2
    config.steps = steps
    config.data.task = task
    small_model(config)
    config.rollout.prompts = 16
    config.rollout.samples = 8
    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.eval.every = 20
    config.checkpoint.every = 50
    return config


def small_model(config: Config) -> None:
    """Sizes of a model that trains fast on CPUs, where time depends on the number of operations."""
    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384
