"""Preference optimisation from pairs without a reward model: DPO (Rafailov et al. 2023) and kin."""

from typing import Any, ClassVar

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.pair_loss import NLL_OVER, PAIR_LOSSES, REFERENCE_KINDS, PairLoss
from hjax.algorithms.prediction_calibration import Predictions
from hjax.controller import join
from hjax.rules import Key, above, at_least, one_of


class DPO(Algorithm):
    """Direct preference optimisation: the policy is its own reward model (arXiv 2305.18290)."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference")
    generates = False
    source = "pairs"
    unit = 2
    needed_data = "preference pairs"
    data_hint = "give it the columns `chosen` and `rejected`"
    # Offline algorithms set sequences per update (two per pair) by ``warm_start.batch``.
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
        """Only where the loss compares with the reference."""
        return config.kind in REFERENCE_KINDS

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The pair loss."""
        names = ("kind", "beta", "smoothing", "margin", "nll_coef", "nll_over")
        return {"actor": PairLoss(**{name: config[name] for name in names})}

    def learn(self, batch: Any) -> Batch:
        """One update."""
        batch = join(batch, self.reference.compute_ref_log_prob(batch))
        self.log(self.actor.update_actor(batch))
        return batch

    def predictions(self, batch: Batch) -> Predictions:
        """Whether the chosen response is preferred, by implicit rewards (prefix ``pair_``)."""
        reference = self.reference.compute_ref_log_prob(batch)
        scored = join(batch, reference, self.actor.compute_log_prob(batch))
        loss = self.losses(self.config, 1)["actor"]
        _, stats = loss(scored["old_logprobs"], None, scored | loss.prepared(scored))
        margin = np.asarray(stats["margin"])[::2, 0]
        return {"pair_": (margin, np.ones_like(margin))}


class CDPO(DPO):
    """Conservative DPO: label smoothing for noisy preferences (Mitchell 2023)."""

    defaults = {"smoothing": 0.1}


class RobustDPO(DPO):
    """Robust DPO: an unbiased loss for noisy preferences (arXiv 2403.00409)."""

    defaults = {"kind": "robust", "smoothing": 0.1}


class IPO(DPO):
    """IPO: squared loss that aims the margin at a target value (arXiv 2310.12036)."""

    defaults = {"kind": "ipo"}


class HingeDPO(DPO):
    """SLiC's hinge loss: no gradient once the margin is large enough (arXiv 2305.10425)."""

    defaults = {"kind": "hinge"}


class ORPO(DPO):
    """ORPO: likelihood of the chosen response plus an odds ratio; no reference (2403.07691)."""

    defaults = {"kind": "odds"}


class SimPO(DPO):
    """SimPO: length-normalised log-probs with a margin; no reference (arXiv 2405.14734)."""

    defaults = {"kind": "margin", "beta": 2.0, "margin": 1.0}
