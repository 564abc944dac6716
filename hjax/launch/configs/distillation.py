"""On-policy distillation: a small student samples, a larger teacher scores its tokens.

    python -m hjax.launch --config=distillation.py

On the task of grpo.py. The teacher has twice the student's layers and learns from demonstrations in
the same run; a teacher of your own (`--config.teacher.path=DIR
--config.algorithm.teacher_updates=0`) may have any size, with the student's tokenizer.
docs/losses.md has the formulas.
"""

from ml_collections import ConfigDict

from hjax.launch.configs import sorting_config


def get_config() -> ConfigDict:
    """The config of `--config=distillation.py`."""
    config = sorting_config("Distillation", steps=200)
    config.algorithm.minibatch = 128
    config.algorithm.teacher_updates = 2
    config.teacher.layers = 4
    config.teacher.learning_rate = 1e-3
    # Compare the whole vocabulary, which is small.
    config.algorithm.top_k = 0
    return config
