"""Models that judge: rewards and costs of pairs (Bradley-Terry), process rewards of steps."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.base import Algorithm, Batch
from hjax.algorithms.calibration import Predictions
from hjax.algorithms.score_losses import ScoreLoss, StepLoss, at_end, with_end
from hjax.controller import join
from hjax.roles import SCORER
from hjax.rules import Key, at_least


class Scored(Algorithm):
    """What they share: the actor has a scalar head and learns from labelled data."""

    roles = ("actor",)
    workers = {"actor": SCORER}
    generates = False
    # Sequences per update are ``warm_start.batch``.
    shared_keys = ("max_skipped",)

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Switches that mean nothing."""
        cls.losses(config, 1)

    def collect(self, prompts: Batch) -> Any:
        """The next examples; the prompts are not used."""
        assert self.demonstrations is not None
        return with_end(self.demonstrations())

    def learn(self, batch: Any) -> Batch:
        """One update."""
        self.log(self.actor.update_scores(batch))
        return batch

    def scored(self, batch: Batch) -> tuple[Batch, np.ndarray]:
        """Examples with their ends, and their scores float32 [N, L + 1]."""
        batch = with_end(batch)
        return batch, np.asarray(join(self.actor.compute_scores(batch))["scores"])


class RewardModel(Scored):
    """Bradley-Terry: the chosen response is to score higher than the rejected one."""

    source = "pairs"
    unit = 2
    needed_data = (
        "preference pairs (the columns `chosen` and `rejected`), or texts with labels (`text` and "
        "`label`)"
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
        """The loss of pairs."""
        names = ("margin", "centring", "label_coef")
        return {"actor": ScoreLoss(sign=cls.sign, **{name: config[name] for name in names})}

    def predictions(self, batch: Batch) -> Predictions:
        """That the chosen one is better; with labels also (``label_``) that a response is good."""
        batch, scores = self.scored(batch)
        ends = at_end(jnp.asarray(scores), jnp.asarray(batch["response_mask"]))
        better = self.sign * np.asarray(ends)
        difference = better[::2] - better[1::2]
        found = {"": (difference, np.ones_like(difference))}
        if self.config.label_coef:
            by_pair = (len(difference), -1)
            labels = np.where(batch["response_mask"], batch["labels"], np.nan)
            found["label_"] = (self.sign * scores).reshape(by_pair), labels.reshape(by_pair)
        return found


class CostModel(RewardModel):
    """Safe-RLHF's: the chosen response is the safer one and costs less; unsafe is above 0."""

    sign = -1
    defaults = {"label_coef": 1.0}


class ProcessRewardModel(Scored):
    """Each step of a response is right or wrong (arXiv 2305.20050)."""

    source = "steps"
    needed_data = "steps with labels (the columns `completions` and `labels`)"

    keys = {
        "separator": Key("", "text that stands after each step of a response, and is read with it"),
    }

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The loss of steps."""
        return {"actor": StepLoss()}

    def predictions(self, batch: Batch) -> Predictions:
        """That a step is right."""
        batch, scores = self.scored(batch)
        return {"": (scores, np.where(batch["response_mask"], batch["labels"], np.nan))}
