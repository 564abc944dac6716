"""On-policy distillation: a small student answers, a larger teacher says what it would have drawn.

    python -m hjax.launch --config=distillation.py

On the task of grpo.py. The teacher has twice the student's layers and learns from demonstrations as
it teaches; a teacher of your own (`--config.teacher.path=DIR --config.algorithm.teacher_updates=0`)
may have any size, with the student's tokenizer. docs/losses.md has the formulas.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting


def get_config() -> ConfigDict:
    """The config of `--config=distillation.py`."""
    config = sorting("Distillation", steps=200)
    config.algorithm.minibatch = 128
    config.algorithm.teacher_updates = 2
    config.teacher.layers = 4
    config.teacher.learning_rate = 1e-3
    # The teacher gives every token of the little vocabulary.
    config.algorithm.top_k = 0
    return config
