"""DeonticBench's task in small: fees by a schedule, answered by programs that an evaluator runs.

    python -m hjax.launch --config=fee_schedule.py

Dr.GRPO with five samples, as there. `--config.data.task_options.mode=direct` answers with the
number instead. docs/algorithms/deontic_bench.md has the benchmark itself.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import base, small_model


def get_config() -> ConfigDict:
    """The config of `--config=fee_schedule.py`."""
    config = base.get_config()
    config.algorithm.name = "DrGRPO"
    config.algorithm.minibatch = 80
    config.algorithm.epochs = 2
    config.algorithm.entropy_coef = 0.01
    config.steps = 150
    config.data.task = "fee_schedule"
    # What a program that cannot be run is paid for predicates like the right ones.
    config.data.task_options.partial = 0.2
    small_model(config)
    config.warm_start.steps = 150
    config.rollout.prompts = 32
    config.rollout.samples = 5
    config.actor.learning_rate = 3e-4
    config.actor.schedule = "cosine"
    config.eval.every = 25
    config.checkpoint.every = 50
    return config
