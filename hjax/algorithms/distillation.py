"""On-policy distillation: a teacher scores what the student draws (GKD, arXiv 2306.13649)."""

from __future__ import annotations

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.distillation_loss import DIVERGENCES, DistillationLoss
from hjax.algorithms.losses import SupervisedLoss
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.roles import Role
from hjax.rules import Key, Rule, at_least, one_of


class Distillation(Algorithm):
    """The student's own responses, the teacher's distribution in the place of each token."""

    roles = ("actor", "teacher")
    # There is no reward and no KL.
    shared_keys = ("minibatch", "epochs", "aggregation", "max_skipped")

    keys = {
        "divergence": Key(
            "reverse",
            "between student and teacher: reverse KL(student, teacher), forward KL(teacher, "
            "student), or jensen_shannon",
            one_of(*DIVERGENCES),
        ),
        "mixture": Key(
            0.5,
            "share of the teacher in the mean that jensen_shannon compares both with",
            Rule("above 0 and below 1", lambda x: 0 < x < 1),
        ),
        "top_k": Key(
            64,
            "the teacher's most probable tokens of each place, all others counting as one; 0: the "
            "whole vocabulary",
            at_least(0),
        ),
        "teacher_updates": Key(
            0,
            "updates of the teacher on demonstrations in each step, before it is asked; 0: its "
            "weights (teacher.path) stay as they are",
            at_least(0),
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.config.teacher_updates and self.demonstrations is None:
            raise ConfigError(
                f"config.algorithm.teacher_updates={self.config.teacher_updates} needs "
                "demonstrations; this data has none: give it a `response` column, or a teacher.path"
            )

    @classmethod
    def role_table(cls, config: ConfigDict) -> dict[str, Role]:
        """With `teacher_updates` a teacher that learns."""
        table = super().role_table(config)
        if config.teacher_updates and "teacher" not in cls.workers:
            table["teacher"] = dataclasses.replace(
                table["teacher"], worker="hjax.workers:LearningTeacher", trained=True
            )
        return table

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Switches that have no effect beside each other."""
        cls.losses(config, 1)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The divergence, and where the teacher learns its likelihood."""
        limit = max_response_length if config.aggregation == "constant" else None
        student = DistillationLoss(
            kind=config.divergence,
            mixture=config.mixture,
            top_k=config.top_k,
            aggregation=config.aggregation,
            max_length=limit,
        )
        return {"actor": student} | (
            {"teacher": SupervisedLoss()} if config.teacher_updates else {}
        )

    def collect(self, prompts: Batch) -> Any:
        """Have the student answer."""
        return self.actor.generate_sequences(prompts)

    def learn(self, batch: Any) -> Batch:
        """Ask the teacher what it would have drawn, and learn that."""
        for _ in range(self.config.teacher_updates):
            self.log(self.teacher.update_teacher(self.demonstrations()))
        batch = join(batch, self.teacher.compute_top_log_probs(batch))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    teacher: Any  # a worker group
    demonstrations: Any
