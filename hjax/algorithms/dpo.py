"""Learning from preference pairs without a reward model: DPO (Rafailov et al. 2023) and its kin."""

from typing import Any, ClassVar

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.pair_loss import NLL_OVER, PAIR_LOSSES, REFERRED, PairLoss
from hjax.algorithms.prediction_calibration import Predictions
from hjax.controller import join
from hjax.rules import Key, above, at_least, one_of


class DPO(Algorithm):
    """The policy itself is the reward model: it is to prefer what was chosen (arXiv 2305.18290)."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference")
    generates = False
    source = "pairs"
    unit = 2
    needed_data = "preference pairs"
    data_hint = "give it the columns `chosen` and `rejected`"
    # Where pairs are read, sequences per update, two of each pair, are ``warm_start.batch``.
    shared_keys: ClassVar[tuple[str, ...] | None] = ("max_skipped",)

    keys = {
        "kind": Key(
            "sigmoid",
            "loss of a pair: sigmoid (DPO, with smoothing cDPO), ipo, ipo_sum, hinge, robust, odds "
            "(ORPO) or margin (SimPO)",
            one_of(*PAIR_LOSSES),
        ),
        "beta": Key(0.1, "how strongly the policy is held to the reference", above(0)),
        "smoothing": Key(
            0.0, "share of pairs whose sides are taken to be swapped, below 0.5", at_least(0)
        ),
        "margin": Key(0.0, "by how much the chosen one is to be ahead (kind margin)", at_least(0)),
        "nll_coef": Key(
            0.0, "weight of the chosen responses' negative log-likelihood", at_least(0)
        ),
        "nll_over": Key(
            "response",
            "tokens over which that likelihood is a mean: each response's own, or those of the "
            "whole batch (TRL)",
            one_of(*NLL_OVER),
        ),
    }

    @classmethod
    def needs_reference(cls, config: ConfigDict) -> bool:
        """Only where the loss compares with one."""
        return config.kind in REFERRED

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The loss of pairs."""
        names = ("kind", "beta", "smoothing", "margin", "nll_coef", "nll_over")
        return {"actor": PairLoss(**{name: config[name] for name in names})}

    def learn(self, batch: Any) -> Batch:
        """One update."""
        reference = self.reference.compute_ref_log_prob(batch)
        batch = join(batch, reference)
        self.log(self.actor.update_actor(batch))
        return batch

    def predictions(self, batch: Batch) -> Predictions:
        """That the chosen response is preferred, by the implicit rewards (``pair_``)."""
        reference = self.reference.compute_ref_log_prob(batch)
        known = join(batch, reference, self.actor.compute_log_prob(batch))
        loss = self.losses(self.config, 1)["actor"]
        _, stats = loss(known["old_logprobs"], None, known | loss.prepared(known))
        margin = np.asarray(stats["margin"])[::2, 0]
        return {"pair_": (margin, np.ones_like(margin))}


class CDPO(DPO):
    """DPO for labels of which a share is wrong, smoothed (Mitchell 2023)."""

    defaults = {"smoothing": 0.1}


class RobustDPO(DPO):
    """DPO for labels of which a share is wrong, unbiased (arXiv 2403.00409)."""

    defaults = {"kind": "robust", "smoothing": 0.1}


class IPO(DPO):
    """A margin that is aimed at instead of pushed on (arXiv 2310.12036)."""

    defaults = {"kind": "ipo"}


class HingeDPO(DPO):
    """A margin that is enough (SLiC, arXiv 2305.10425)."""

    defaults = {"kind": "hinge"}


class ORPO(DPO):
    """Likelihood of the chosen with the odds against the rejected; no reference (2403.07691)."""

    defaults = {"kind": "odds"}


class SimPO(DPO):
    """Mean log-probs with a margin; no reference (arXiv 2405.14734)."""

    defaults = {"kind": "margin", "beta": 2.0, "margin": 1.0}
