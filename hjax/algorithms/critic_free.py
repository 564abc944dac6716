"""Critic-free methods: GRPO with other defaults, each as in its paper or its code.

docs/algorithms/critic_free.md has the formulas; same_name.md says where implementations differ.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import group_advantages, rewards_differ
from hjax.algorithms.algorithm import Batch
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.masks import constant
from hjax.errors import ConfigError, RunError
from hjax.rules import Key


class DrGRPO(GRPO):
    """GRPO without its two biases (Liu et al. 2025, arXiv 2503.20783).

    No division by the group's standard deviation or by the response length; no KL.
    """

    defaults = {"normalise": "none", "aggregation": "constant", "kl_coef": 0.0}


class DAPO(GRPO):
    """GRPO with clip-higher, token-level loss and dynamic sampling (arXiv 2503.14476).

    Groups whose rewards are all equal are replaced; overlong responses are penalised; no KL.
    """

    defaults = {
        "clip_high": 0.28,
        "aggregation": "token",
        "kl_coef": 0.0,
        "filter": True,
        "resample": 2,
        "overlong_buffer": 0.2,
    }


class GSPO(GRPO):
    """Sequence-level ratio: the geometric mean of the token ratios (arXiv 2507.18071)."""

    defaults = {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0}


class GSPOToken(GSPO):
    """GSPO's ratio with per-token gradients, for advantages that differ between tokens."""

    defaults = {"ratio": "sequence_token"}


class CISPO(GRPO):
    """The ratio is a clipped weight and every token keeps its gradient (arXiv 2506.13585).

    No lower bound, as in that paper (MiniMax-M1); the upper bound is 5, as in ScaleRL.
    """

    defaults = dict(
        surrogate="cispo", clip_low=1.0, clip_high=4.0, aggregation="token", kl_coef=0.0
    )


class SAPO(GRPO):
    """A soft gate instead of the clip, steeper for negative advantages (as in TRL)."""

    defaults = {"surrogate": "sapo", "kl_coef": 0.0}


class RLOO(GRPO):
    """REINFORCE with the mean of the other samples as baseline (arXiv 2402.14740).

    The KL is subtracted from the response's reward.
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
    """REINFORCE (Williams 1992): reward to go minus the KL, times the gradient; no baseline."""

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
    """Group-mean baseline, then whitening over the step; KL (k2) in the loss."""

    defaults = {"baseline": "group", "kl_in": "loss", "kl_estimator": "k2"}


class OPO(GRPO):
    """The optimal on-policy baseline: the length-weighted group mean (arXiv 2505.23585).

    Exactly on-policy: one update a step, neither KL nor entropy.
    """

    defaults = dict(
        baseline="length", normalise="none", ratio="none", aggregation="token", kl_coef=0.0
    )


class GPG(GRPO):
    """Policy gradient with group-mean baseline, rescaled for groups without signal (GPG's code)."""

    defaults = {
        "normalise": "none",
        "ratio": "none",
        "aggregation": "token",
        "kl_coef": 0.0,
        "filter": True,
        "rescale": "groups",
    }


class MaxRL(GRPO):
    """Advantages divided by the group's mean reward: rare successes weigh more (as in SkyRL)."""

    defaults = {"normalise": "mean", "aggregation": "token", "kl_coef": 0.0}


class GDPO(GRPO):
    """Several rewards, each normalised within its group before they are summed (as in TRL).

    So a reward of small variance counts as much as one of large variance. The sum is normalised
    over the step.
    """

    keys = {
        "weights": Key(
            (),
            "of the reward function's named rewards: numbers in the order of its dict, or a dict "
            "by name, which is the same as `('math=1', 'format=0.5')`; empty: 1 each",
        )
    }
    defaults = {"baseline": "none", "normalise": "none", "kl_coef": 0.0}

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Two: each reward is normalised within its group."""
        return 2

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse clipping and length penalties, which the normalisation would undo."""
        super().check(config)
        for name in ("reward_clip", "overlong_buffer"):
            if config[name]:
                raise ConfigError(
                    f"config.algorithm.{name}={config[name]}: GDPO normalises each reward, which "
                    "would undo it; make it a named reward instead, and set this to 0"
                )
        cls._weights(config, None)

    @classmethod
    def _weights(cls, config: ConfigDict, names: Sequence[str] | None) -> list[float]:
        """One weight for each name; without names only the form is checked."""
        given = config.weights
        pairs = [str(each).rpartition("=") for each in given]
        try:
            numbers = [float(number) for _, _, number in pairs]
        except ValueError:
            numbers = []
        by_name = {name.strip(): number for (name, _, _), number in zip(pairs, numbers)}
        named = all(by_name) and bool(given)
        right = len(numbers) == len(given) and (len(by_name) == len(given) if named else True)
        if not right or (not named and any(by_name)):
            raise ConfigError(
                f"config.algorithm.weights={given}: must be numbers, or a number by each name, "
                "such as ('math=1', 'format=0.5')"
            )
        if names is None or not given:
            return [1.0] * len(names or ())
        if named and set(by_name) != set(names) or len(given) != len(names):
            raise ConfigError(
                f"config.algorithm.weights={given} for the rewards {', '.join(names)}: give one "
                "each, or none"
            )
        return [by_name[name] for name in names] if named else numbers

    @classmethod
    def check_rewards(cls, config: ConfigDict, names: Sequence[str]) -> None:
        """Require several named rewards, and one weight each or none."""
        if not names:
            raise ConfigError(
                "GDPO sums several named rewards, and the reward function returns only one: set "
                "config.reward.function to one that returns a dict of lists by name, or use GRPO"
            )
        cls._weights(config, names)

    def _groups_with_signal(self, batch: Batch) -> np.ndarray:
        """Whether any of the rewards differs within the group: bool [prompts]."""
        named = batch.get("named_rewards") or {"": batch["rewards"]}
        return np.any([rewards_differ(each, self.samples) for each in named.values()], axis=0)

    def scores(self, batch: Batch) -> np.ndarray:
        """The normalised sum of the normalised rewards, float32 [rows], NaN where unscored.

        Raises:
          RunError: the reward function returned one reward, or not as many as there are weights.
        """
        named: dict[str, Any] = batch.get("named_rewards", {})
        try:
            self.check_rewards(self.config, tuple(named))
        except ConfigError as error:  # a later call returned other names than the first
            raise RunError(str(error)) from None
        weights = self._weights(self.config, tuple(named))
        epsilon = self.config.epsilon
        total = np.zeros(len(batch["rewards"]), np.float32)
        for weight, rewards in zip(weights, named.values(), strict=True):
            normalised = group_advantages(rewards, self.samples, epsilon=epsilon)
            total += np.float32(weight) * np.asarray(normalised)
        scored = ~np.isnan(np.asarray(batch["rewards"]))
        if scored.any():
            equal = constant(total[scored].min(), total[scored].max())
            total -= total[scored].mean()
            total /= 1.0 if equal else total[scored].std(ddof=min(1, scored.sum() - 1)) + epsilon
        return np.where(scored, total, np.float32(np.nan))
