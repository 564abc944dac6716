"""Shipped configs, one `get_config()` per file; `--config=ppo.py` finds them by name.

Beside it a file may say by what its runs show that they learn (`LEARNS`, a tuple of measures; none:
by held-out accuracy). `benchmarks/learning.py` runs all configs and looks at that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hjax.config import Config


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric by which a run shows that it learns.

    Args:
      metric: of the rows of metrics.jsonl. One of an evaluation counts at the start (before the
        first update) and at the end; another counts in the first step, whose rollouts and losses
        are those of the start, and by its mean over the last ten.
      rise: least difference of end and start; below 0: it is to fall.
      below: what the end is to stay below; None: anything.
      start: what counts as the start; None: what was measured.
    """

    metric: str
    rise: float = 0.2
    below: float | None = None
    start: float | None = None

    def change(self, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
        """Start and end of a run, of its rows of metrics.jsonl."""
        values = [row[self.metric] for row in rows if row.get(self.metric) is not None]
        last = values[-1:] if self.metric.startswith("eval/") else values[-10:]
        first = values[0] if self.start is None else self.start
        return first, sum(last) / len(last)

    def met(self, start: float, end: float) -> bool:
        """Whether a run that went from start to end shows it."""
        far = end - start >= self.rise if self.rise >= 0 else end - start <= self.rise
        return far and (self.below is None or end < self.below)


LEARNS = (Measure("eval/accuracy"),)
# Of pairs: which of the two the policy has made more likely than its reference has. At first it is
# the reference: chance. Its answers are to get better too.
PREFERS = (Measure("actor/accuracy", start=0.5), Measure("eval/accuracy", rise=0.05))


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
    config.actor.warmup_steps = 20
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

    config.model.hidden_size = 128
    config.model.layers = 2
    config.model.heads = 4
    config.model.kv_heads = 4
    config.model.mlp_size = 384

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
