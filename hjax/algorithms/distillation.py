r"""On-policy distillation: a teacher scores the student's samples (GKD, arXiv 2306.13649).

First its loss: the student learns the teacher's next-token distribution at each position.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.aggregation import TokenLoss, WithStats, check_known
from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.losses import SupervisedLoss
from hjax.algorithms.masks import masked
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.roles import Role
from hjax.rules import Key, Rule, at_least, one_of

DIVERGENCES = ("reverse", "forward", "jensen_shannon")
# Smaller probabilities are float32 rounding error.
_MIN_PROBABILITY = 1e-7


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(TokenLoss):
    r"""Divergence between student p and teacher q over the vocabulary, at each position.

    ==================  ========================================================================
    kind                loss of a token
    ==================  ========================================================================
    "reverse"           :math:`KL(p\|q) = \sum p (\log p - \log q)`: mode-seeking, the student stays
                        within what the teacher finds likely
    "forward"           :math:`KL(q\|p)`: mode-covering, all that the teacher finds likely
    "jensen_shannon"    :math:`b\,KL(q\|m) + (1-b)\,KL(p\|m)`, m = b q + (1 - b) p
    ==================  ========================================================================

    Agarwal et al. 2024 (GKD, https://arxiv.org/abs/2306.13649), as in TRL's `generalized_jsd_loss`
    (there beta 0 is forward and beta 1 reverse). Only the teacher's k most probable tokens are
    compared; the rest of the vocabulary counts as one token, so it is a divergence for every k.

    Attributes:
        kind: see above.
        mixture: b, above 0 and below 1.
        top_k: number of teacher tokens per position; 0: the whole vocabulary.

    Example:
        >>> q, p = jnp.log(jnp.array([[[0.75, 0.25]]])), jnp.log(jnp.array([[[0.5, 0.5]]]))
        >>> batch = {"response_mask": jnp.ones((1, 1), bool), "teacher_logprobs": q}
        >>> DistillationLoss(kind="reverse")(p, None, batch)[0]      # log(2 / sqrt 3)
        Array([[0.1438411]], dtype=float32)
    """

    # Batch key of the tokens, int [N, L, k], whose log-probs it takes instead of the responses'.
    of_tokens: ClassVar[str] = "teacher_tokens"

    kind: str = "reverse"
    mixture: float = 0.5
    top_k: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_known("kind", self.kind, DIVERGENCES)
        if not 0 < self.mixture < 1:
            raise ConfigError(f"mixture={self.mixture} must be above 0 and below 1")
        if self.mixture != 0.5 and self.kind != "jensen_shannon":
            raise ConfigError(
                f"mixture={self.mixture} has no effect with kind={self.kind!r}: leave it out, or "
                "use kind='jensen_shannon'"
            )
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must be 0 (all) or more")

    @property
    def needs(self) -> tuple[str, ...]:
        """Batch keys that the call reads, and the key of the tokens in `of_tokens`."""
        return ("response_mask", "teacher_logprobs", self.of_tokens)

    def shapes(self, vocabulary: int) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Trailing shape (after N and L) and dtype of the `needs` that are not float [N, L]."""
        count = min(self.top_k or vocabulary, vocabulary)
        floats, ids = np.dtype(np.float32), np.dtype(np.int32)
        return {"teacher_logprobs": ((count,), floats), self.of_tokens: ((count,), ids)}

    def __call__(
        self, logprobs: jax.Array, entropy: jax.Array | None, batch: Mapping[str, Any]
    ) -> WithStats:
        """Token losses (nats) and statistics.

        Args:
            logprobs: float [N, L, k], the student's log-probs of the tokens in `of_tokens`.
            entropy: float [N, L] or None.
            batch: `response_mask` bool [N, L], `teacher_logprobs` float [N, L, k], descending.

        Returns:
            (float32 [N, L], stats of that shape without gradient): `agreement` (1 where the argmax
            of both among the k is the same), `teacher_mass` (the teacher's probability of the k),
            and `entropy` if it is passed.
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([logprobs, batch["teacher_logprobs"]])
        chex.assert_shape(mask, logprobs.shape[:2])
        student, teacher = (
            _with_rest(masked(x, mask[..., None])) for x in (logprobs, batch["teacher_logprobs"])
        )
        if self.kind == "reverse":
            loss = _kl(student, teacher)
        elif self.kind == "forward":
            loss = _kl(teacher, student)
        else:
            b = self.mixture
            middle = jnp.logaddexp(teacher + np.log(b), student + np.log1p(-b))
            loss = b * _kl(teacher, middle) + (1 - b) * _kl(student, middle)
        stats = {
            "agreement": jnp.argmax(logprobs, axis=-1) == 0,
            "teacher_mass": jnp.sum(jnp.exp(batch["teacher_logprobs"]), axis=-1),
        }
        stats |= {} if entropy is None else {"entropy": entropy}
        stats = {name: masked(value, mask) for name, value in stats.items()}
        return masked(loss, mask), jax.lax.stop_gradient(stats)


def _with_rest(logprobs: jax.Array) -> jax.Array:
    """float [N, L, k + 1]: the log-probs, and that of all other tokens together."""
    rest = 1.0 - jnp.sum(jnp.exp(logprobs), axis=-1, keepdims=True)
    return jnp.concatenate([logprobs, jnp.log(jnp.maximum(rest, _MIN_PROBABILITY))], axis=-1)


def _kl(p: jax.Array, q: jax.Array) -> jax.Array:
    """KL(p || q) over the last axis of log-probs."""
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


class Distillation(Algorithm):
    """On-policy distillation: the student's responses, the teacher's distribution at each token."""

    roles = ("actor", "teacher")
    # Without those of the reward and the KL, which it does not have.
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
                "demonstrations; this data has none: add a `response` column, or set teacher.path"
            )

    @classmethod
    def role_table(cls, config: ConfigDict) -> dict[str, Role]:
        """The roles; the teacher is trained where `teacher_updates` is above 0."""
        table = super().role_table(config)
        if config.teacher_updates and "teacher" not in cls.workers:
            table["teacher"] = dataclasses.replace(
                table["teacher"], worker="hjax.workers:LearningTeacher", trained=True
            )
        return table

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The divergence for the student, and the supervised loss of a teacher that is trained."""
        return {
            "actor": DistillationLoss(
                kind=config.divergence,
                mixture=config.mixture,
                top_k=config.top_k,
                aggregation=config.aggregation,
                max_length=max_response_length if config.aggregation == "constant" else None,
            )
        } | ({"teacher": SupervisedLoss()} if config.teacher_updates else {})

    def learn(self, batch: Any) -> Batch:
        """Score the student's samples by the teacher, then update the student."""
        for _ in range(self.config.teacher_updates):
            self.log(self.teacher.update_teacher(self.demonstrations()))
        batch = join(batch, self.teacher.compute_top_log_probs(batch))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    teacher: Any  # a worker group
    demonstrations: Any
