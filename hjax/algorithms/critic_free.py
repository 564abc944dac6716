"""The critic-free methods: GRPO with other switches, each as its paper or its code has it.

docs/losses.md has the formulas, and where implementations of one name differ.
"""

from __future__ import annotations

from hjax.algorithms.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO without its two biases (Liu et al. 2025, arXiv 2503.20783).

    Neither the group's standard deviation nor the response's length divides; no KL.
    """

    defaults = {"normalise": "none", "aggregation": "constant", "kl_coef": 0.0}


class DAPO(GRPO):
    """GRPO with a wider upper clip, token losses and groups drawn anew (arXiv 2503.14476).

    Groups whose rewards are all equal are replaced; long responses lose reward; no KL.
    """

    defaults = {
        "clip_high": 0.28,
        "aggregation": "token",
        "kl_coef": 0.0,
        "filter": True,
        "resample": 2,
        "overlong": 0.2,
    }


class GSPO(GRPO):
    """One ratio for a response, the geometric mean of its tokens' (arXiv 2507.18071)."""

    defaults = {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0}


class GSPOToken(GSPO):
    """GSPO's ratio with a gradient of each token's own: for advantages that differ by token."""

    defaults = {"ratio": "sequence_token"}


class CISPO(GRPO):
    """The ratio is a bounded weight, every token keeps its gradient (MiniMax, arXiv 2506.13585).

    Without a lower bound, as there; the upper one is 5, as in ScaleRL.
    """

    defaults = {
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "token",
        "kl_coef": 0.0,
    }


class SAPO(GRPO):
    """A soft gate in place of the clip, steeper where the advantage is negative (as in TRL)."""

    defaults = {"surrogate": "sapo", "kl_coef": 0.0}


class RLOO(GRPO):
    """REINFORCE with the mean of the other samples as baseline (arXiv 2402.14740).

    The KL is part of a response's score.
    """

    defaults = {
        "baseline": "others",
        "normalise": "none",
        "ratio": "none",
        "aggregation": "sum",
        "kl_in": "score",
        "kl_coef": 0.05,
    }


class Reinforce(GRPO):
    """REINFORCE (Williams 1992): rewards to go, less the KL, times the gradient; no baseline."""

    defaults = {
        "baseline": "none",
        "normalise": "none",
        "ratio": "none",
        "aggregation": "token",
        "kl_in": "reward",
        "kl_coef": 0.05,
    }


class ReinforcePlusPlus(Reinforce):
    """PPO's clip on whitened rewards to go (Hu 2025, arXiv 2501.03262)."""

    defaults = {"ratio": "token", "whiten": True}


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """The group's mean first, then whitened over the step; KL (k2) in the loss."""

    defaults = {"baseline": "group", "kl_in": "loss", "kl_estimator": "k2"}


class OPO(GRPO):
    """The baseline that is best on-policy: the group's mean by length (arXiv 2505.23585).

    Exactly on-policy: one update a step, neither KL nor entropy.
    """

    defaults = {
        "baseline": "length",
        "normalise": "none",
        "ratio": "none",
        "aggregation": "token",
        "kl_coef": 0.0,
    }


class GPG(GRPO):
    """Policy gradient of the group's mean, scaled up for groups that say nothing (GPG's code)."""

    defaults = {
        "normalise": "none",
        "ratio": "none",
        "aggregation": "token",
        "kl_coef": 0.0,
        "filter": True,
        "rescale": True,
    }


class MaxRL(GRPO):
    """Advantages over the group's mean reward: rare successes weigh more (as in SkyRL)."""

    defaults = {"normalise": "mean", "aggregation": "token", "kl_coef": 0.0}
