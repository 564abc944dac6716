"""ThinC in small: a plan, code whose output comes back, and the answer.

    python -m hjax.launch --config=thinc.py

GRPO with DAPO's higher clip bound and token mean, as there, on sums of three numbers; code runs in
the sandbox. What to compare with is the same model without an interpreter:

    python -m hjax.launch --config=thinc.py --config.data.task_options.tool=False
"""

from ml_collections import ConfigDict

from hjax.launch.configs import episode_config


def get_config() -> ConfigDict:
    """The config of `--config=thinc.py`."""
    config = episode_config("code_sums", steps=40)
    config.algorithm.clip_high = 0.28
    config.algorithm.aggregation = "token"
    config.data.task_options.terms = 3
    config.data.task_options.digits = 1
    # As the paper's demonstrations, about half of which are right.
    config.data.task_options.noise = 0.3
    config.warm_start.steps = 300
    config.warm_start.batch = 32
    # Every episode has an interpreter of its own.
    config.rollout.prompts = 8
    config.eval.prompts = 64
    return config
