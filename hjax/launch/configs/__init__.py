"""Shipped configs, one `get_config()` per file; `--config=ppo.py` finds them by name."""

from __future__ import annotations

from hjax.config import Config


def sorting(algorithm: str, steps: int = 450) -> Config:
    """The task, the model and the rollouts of grpo.py, with an algorithm's keys at its defaults.

    Args:
      algorithm: its name.
      steps: of the run.
    """
    import hjax

    config = hjax.default_config()
    config.algorithm.name = algorithm
    config.steps = steps

    config.data.task = "sorting"
    config.data.task_options.length = 5
    # Graded rewards: a group in which all samples score the same teaches nothing.
    config.data.task_options.partial = 0.5
    config.rollout.max_response_length = 6

    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384
    config.model.unroll_layers = True

    config.warm_start.steps = 20

    config.rollout.prompts = 32
    config.rollout.samples = 8
    # Without it the policy settles early on orders that are nearly right.
    config.algorithm.entropy_coef = 0.02

    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"

    config.eval.every = 50
    config.checkpoint.every = 50
    return config
