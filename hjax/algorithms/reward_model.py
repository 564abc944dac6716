r"""Training of reward models and cost models (Bradley-Terry) and process reward models (PRM).

First their losses, for models with a scalar head. The score s_t is the head's output after the
prompt and the first t tokens of a response. So a response of T tokens has T + 1 positions, and the
last one scores the whole response (`append_end_position`). The batch's `labels` say what is known
at each position: 1 good, 0 bad, NaN unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.aggregation import (
    Loss,
    SequenceLoss,
    WithStats,
    at_first_token,
    check_not_negative,
)
from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.masks import masked
from hjax.algorithms.prediction_calibration import Predictions
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.roles import SCORER
from hjax.rules import Key, at_least


def append_end_position(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Add a position after each response's last token, whose score is that of the response.

    Args:
      batch: `responses`, `response_mask` [N, L], and further entries, which are kept.

    Returns:
      the batch with `responses` and `response_mask` [N, L + 1]: position t comes after t tokens of
      the response.
    """
    responses, mask = np.asarray(batch["responses"]), np.asarray(batch["response_mask"], bool)
    wider = ((0, 0), (0, 1))
    first = np.ones((len(mask), 1), bool)
    return {
        **batch,
        "responses": np.pad(responses, wider),
        "response_mask": np.concatenate([first, mask], axis=1),
    }


def end_scores(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """float32 [N]: the scores [N, L + 1] at each row's last position in the mask [N, L + 1]."""
    last = jnp.arange(mask.shape[1]) == jnp.sum(mask, axis=1, keepdims=True) - 1
    return jnp.sum(jnp.where(last, scores, 0.0), axis=1)


@dataclass(frozen=True, kw_only=True)
class ScoreLoss(SequenceLoss):
    r"""Bradley-Terry loss of pairs, with margin, centring and a label term.

    With the score s of a whole response and :math:`z = s` (for a cost :math:`z = -s`), a pair's
    loss is

    .. math:: -\log\sigma(z_w - z_l - m) + c (z_w + z_l)^2
              - \lambda \sum_{i \in \{w, l\}} \log\sigma(y_i z_i)

    - m = `margin` times the pair's entry of `margins` (Llama 2, https://arxiv.org/abs/2307.09288);
    - c = `centring` (TRL's `center_rewards_coefficient`, https://arxiv.org/abs/2312.09244), because
      differences of pairs do not determine where 0 is;
    - λ = `label_coef`: y = 1 where the label is 1, -1 where it is 0. For a cost model this is
      Safe-RLHF's safety term (https://arxiv.org/abs/2310.12773, from memory).

    Attributes:
        sign: 1 for rewards, -1 for costs, which are lower for the chosen response.
        margin, centring, label_coef: 0 or more.
    """

    unit: ClassVar[int] = 2
    needs: ClassVar[tuple[str, ...]] = ("response_mask", "labels", "margins")

    sign: int = 1
    margin: float = 0.0
    centring: float = 0.0
    label_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.sign not in (1, -1):
            raise ConfigError(f"sign={self.sign} must be 1 (rewards) or -1 (costs)")
        check_not_negative(self, "margin", "centring", "label_coef")

    def __call__(self, scores: jax.Array, batch: Mapping[str, Any]) -> WithStats:
        """Losses and statistics of pairs, each at the first token of its chosen row.

        Args:
            scores: float [N, L + 1]; row 2i is the chosen one of pair i, row 2i + 1 the rejected.
            batch: `response_mask` bool, `labels` and `margins` float [N, L + 1], see
                `append_end_position`; a pair's margins are in its chosen row, 0 elsewhere.

        Returns:
            (float32 [N, L + 1], stats of that shape without gradient): `accuracy` (1 where the
            chosen one scores better), `difference` (chosen minus rejected z), `chosen_score`,
            `rejected_score` and, with `label_coef`, `label_accuracy`.
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([scores, mask, batch["labels"], batch["margins"]])
        score = end_scores(masked(scores, mask), mask)
        better = self.sign * score
        chosen, rejected = better[::2], better[1::2]
        margins = jnp.sum(masked(batch["margins"], mask), axis=1)[::2]
        loss = -jax.nn.log_sigmoid(chosen - rejected - self.margin * margins)
        stats = {
            "accuracy": (chosen > rejected).astype(jnp.float32),
            "difference": chosen - rejected,
            "chosen_score": score[::2],
            "rejected_score": score[1::2],
        }
        if self.centring:
            loss = loss + self.centring * jnp.square(chosen + rejected)
        if self.label_coef:
            labels = batch["labels"]
            known = mask & ~jnp.isnan(labels)
            signed = self.sign * masked(scores, known) * (2.0 * masked(labels, known) - 1.0)
            terms = masked(-jax.nn.log_sigmoid(signed), known)
            loss = loss + self.label_coef * jnp.sum(terms, axis=1).reshape(-1, 2).sum(axis=1)
            right = jnp.sum(masked((signed > 0).astype(jnp.float32), known), axis=1)
            count = jnp.sum(known, axis=1).reshape(-1, 2).sum(axis=1)
            stats["label_accuracy"] = right.reshape(-1, 2).sum(axis=1) / jnp.maximum(count, 1)
        stats = {name: at_first_token(value, mask) for name, value in stats.items()}
        return at_first_token(loss, mask), jax.lax.stop_gradient(stats)


@dataclass(frozen=True, kw_only=True)
class StepLoss(Loss):
    r"""Binary cross-entropy of process rewards, the mean over all labelled steps.

    .. math:: -\frac{1}{|S|}\sum_{t \in S} \log\sigma(y_t s_t)

    S are the positions after the last token of a step, y = 1 for right and -1 for wrong steps
    (https://arxiv.org/abs/2305.20050; TRL's PRMTrainer has a token classifier of two classes).
    """

    needs: ClassVar[tuple[str, ...]] = ("response_mask", "labels")

    def weights(self, batch: Mapping[str, Any]) -> jax.Array:
        """float32 [N, L + 1], 1 / (labelled steps of the optimizer step) at each of them."""
        known = jnp.asarray(batch["response_mask"], bool) & ~jnp.isnan(batch["labels"])
        return known / jnp.maximum(jnp.sum(known), 1).astype(jnp.float32)

    def __call__(self, scores: jax.Array, batch: Mapping[str, Any]) -> WithStats:
        """Losses and statistics of steps, each at the step's end.

        Args:
            scores: float [N, L + 1].
            batch: `response_mask` bool, `labels` float [N, L + 1], see `append_end_position`.

        Returns:
            (float32 [N, L + 1], stats of that shape without gradient): `accuracy`, `score` and
            `right_share` (of the labels).
        """
        mask = jnp.asarray(batch["response_mask"], bool)
        chex.assert_equal_shape([scores, mask, batch["labels"]])
        known = mask & ~jnp.isnan(batch["labels"])
        labels, scores = masked(batch["labels"], known), masked(scores, known)
        signed = scores * (2.0 * labels - 1.0)
        stats = {
            "accuracy": masked((signed > 0).astype(jnp.float32), known),
            "score": scores,
            "right_share": labels,
        }
        return masked(-jax.nn.log_sigmoid(signed), known), jax.lax.stop_gradient(stats)


class ScoredAlgorithm(Algorithm):
    """Base of reward and cost models: the actor has a scalar head and learns from labels."""

    roles = ("actor",)
    workers = {"actor": SCORER}
    generates = False
    # ``warm_start.batch`` sets the sequences per update.
    shared_keys = ("max_skipped",)

    def collect(self, prompts: Batch) -> Any:
        """The next examples; the prompts are not used."""
        assert self.demonstrations is not None
        return append_end_position(self.demonstrations())

    def learn(self, batch: Any) -> Batch:
        """One update."""
        self.log(self.actor.update_scores(batch))
        return batch

    def score_examples(self, batch: Batch) -> tuple[Batch, np.ndarray]:
        """Examples with an end position, and their scores float32 [N, L + 1]."""
        batch = append_end_position(batch)
        return batch, np.asarray(join(self.actor.compute_scores(batch))["scores"])


class RewardModel(ScoredAlgorithm):
    """Bradley-Terry reward model: the chosen response should score above the rejected one."""

    source = "pairs"
    unit = 2
    needed_data = "preference pairs"
    data_hint = (
        "give it the columns `chosen` and `rejected`, or texts with labels (`text` and `label`)"
    )
    sign: ClassVar[int] = 1

    keys = {
        "margin": Key(
            0.0,
            "by how much the chosen response is to be ahead, times the pair's column `margin` "
            "where the data has one",
            at_least(0),
        ),
        "centring": Key(
            0.0,
            "weight of the squared sum of a pair's scores, which holds them around 0",
            at_least(0),
        ),
        "label_coef": Key(
            0.0,
            "weight of the negative log-likelihood of each response's own label, good above 0 and "
            "bad below (of costs the other way round): the columns `chosen_label` and "
            "`rejected_label`, or `label` of texts",
            at_least(0),
        ),
    }

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The pair loss."""
        names = ("margin", "centring", "label_coef")
        return {"actor": ScoreLoss(sign=cls.sign, **{name: config[name] for name in names})}

    def predictions(self, batch: Batch) -> Predictions:
        """Whether the chosen response is better, and with labels if each is good (``label_``)."""
        batch, scores = self.score_examples(batch)
        ends = end_scores(jnp.asarray(scores), jnp.asarray(batch["response_mask"]))
        better = self.sign * np.asarray(ends)
        difference = better[::2] - better[1::2]
        found = {"": (difference, np.ones_like(difference))}
        if self.config.label_coef:
            by_pair = (len(difference), -1)
            labels = np.where(batch["response_mask"], batch["labels"], np.nan)
            found["label_"] = (self.sign * scores).reshape(by_pair), labels.reshape(by_pair)
        return found


class CostModel(RewardModel):
    """Safe-RLHF's cost model: the chosen (safer) response costs less; unsafe is above 0."""

    sign = -1
    defaults = {"label_coef": 1.0}


class ProcessRewardModel(ScoredAlgorithm):
    """Process reward model (PRM): each step of a response is right or wrong (arXiv 2305.20050)."""

    source = "steps"
    needed_data = "steps with labels"
    data_hint = "give it the columns `completions` and `labels`"

    keys = {
        "separator": Key("", "text that stands after each step of a response, and is read with it")
    }

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The step loss."""
        return {"actor": StepLoss()}

    def predictions(self, batch: Batch) -> Predictions:
        """Whether a step is right."""
        batch, scores = self.score_examples(batch)
        return {"": (scores, np.where(batch["response_mask"], batch["labels"], np.nan))}
