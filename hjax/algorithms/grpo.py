"""GRPO (Shao et al. 2024, arXiv 2402.03300): the samples of a prompt are the baseline.

``hjax.algorithms.critic_free`` has further methods: the same class with other defaults.
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import (
    BASELINES,
    NORMALISERS,
    discounted_returns,
    group_advantages,
    token_rewards,
    whiten,
)
from hjax.algorithms.algorithm import Algorithm, Batch, old_logprobs, reference_kl
from hjax.algorithms.masks import jit_static_keywords
from hjax.algorithms.policy_loss import RATIOS, SURROGATES
from hjax.algorithms.ppo import CLIP_KEYS, PPO, policy_loss
from hjax.algorithms.resampling import Resampling
from hjax.algorithms.turn_credit import group_turn_advantages, turn_returns, turns_of
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, Rule, above, at_least, one_of

RESCALES = ("none", "groups", "rewarded")


class GRPO(Resampling, Algorithm):
    """Group-relative advantages: rewards normalised per prompt; no critic; KL in the loss."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")
    plays_environments = True

    keys = {
        **{name: PPO.keys[name] for name in (*CLIP_KEYS, "gamma")},
        "baseline": Key(
            "group",
            "what a reward is compared with: the mean of its group, of the others (RLOO), weighed "
            "by length (OPO), or nothing (none)",
            one_of(*BASELINES),
        ),
        "normalise": Key(
            "std",
            'divide by the group\'s standard deviation ("std"), by its mean ("mean": MaxRL) or by '
            'nothing ("none": Dr.GRPO)',
            one_of(*NORMALISERS),
        ),
        "epsilon": Key(1e-6, "added to the group's standard deviation", at_least(0)),
        "turn_discount": Key(
            -1.0,
            "in episodes of several turns: a turn's advantage is of what it and later turns were "
            "rewarded, discounted so per turn, compared with all turns of the group; -1: all "
            "turns have that of the episode's return",
            Rule("0 to 1, or -1 for the episode's return", lambda x: x == -1 or 0 <= x <= 1),
        ),
        "whiten": Key(
            False, "shift and scale the advantages of a step to mean 0 and standard deviation 1"
        ),
        "rescale": Key(
            "none",
            "multiply advantages by all groups over those whose rewards differ (groups: GPG's "
            "code), or by all responses over those whose reward is not 0 (rewarded: verl's GPG)",
            one_of(*RESCALES),
        ),
        "ratio": Key(
            "token",
            'probability ratio of the "token" or the response: "sequence" (GSPO), '
            '"sequence_token", "sequence_sum"; "none": REINFORCE',
            one_of(*RATIOS),
        ),
        "surrogate": Key(
            "clip",
            'bound on the ratio: "clip" (PPO), "cispo", "sapo", "dppo" or "dppo_kl"',
            one_of(*SURROGATES),
        ),
        "tau_positive": Key(1.0, "tau of surrogate sapo where A > 0", above(0)),
        "tau_negative": Key(1.05, "tau of surrogate sapo elsewhere", above(0)),
        "pretraining_coef": PPO.keys["pretraining_coef"],
        "kl_cumulated": Key(
            True,
            "of kl_in reward: each token answers for the KL of those after it too (verl), or only "
            "for its own (NeMo-RL)",
        ),
        "kl_in": Key(
            "loss",
            'where the KL enters: "loss", "reward" (k1, per token, those after it too) or "score" '
            "(k1, summed over the response, before the baseline)",
            one_of("loss", "reward", "score"),
        ),
    }
    defaults = {"kl_coef": 0.04, "kl_estimator": "k3", "aggregation": "sequence"}

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Two where a response's advantage depends on the others to its prompt."""
        return 1 if config.baseline == "none" else 2

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse switches that have no effect together, here and in the loss."""
        super().check(config)
        if config.baseline == "none" and config.normalise != "none":
            raise ConfigError(
                f"config.algorithm.normalise={config.normalise!r} normalises by statistics of the "
                "group, and config.algorithm.baseline='none' compares with no group: use "
                "normalise='none', or a baseline"
            )
        if config.turn_discount >= 0 and (
            config.baseline != "group"
            or config.normalise == "mean"
            or config.kl_in != "loss"
            or config.whiten
        ):
            raise ConfigError(
                f"config.algorithm.turn_discount={config.turn_discount} compares turns with those "
                "of their group: it goes with baseline='group', normalise='std' or 'none', "
                "kl_in='loss' and whiten=False"
            )
        if not config.kl_cumulated and config.kl_in != "reward":
            raise ConfigError(
                f"config.algorithm.kl_cumulated=False has no effect with config.algorithm.kl_in="
                f"{config.kl_in!r}: leave it out, or use kl_in='reward'"
            )
        if config.rescale != "none" and config.whiten:
            raise ConfigError(
                "config.algorithm.rescale has no effect with config.algorithm.whiten, which "
                "scales all advantages: use one of the two"
            )

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The policy loss with its KL."""
        return {"actor": policy_loss(config, max_response_length)}

    def collect(self, prompts: Batch) -> Any:
        """Generate groups of samples."""
        return self.answer(prompts)

    def learn(self, batch: Any) -> Batch:
        """Score the samples, then learn."""
        batch = self.resampled(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.rewards(batch)
        batch = self.with_advantages(join(batch, reference, rewards, self.proximal(batch)))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch, self.pretraining_batch()))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, ``old_logprobs`` and ``row_mask`` (rows in the loss)."""
        config = self.config
        old, scores, kl = old_logprobs(batch), self.scores(batch), reference_kl(batch)
        rows = self.rows_in_loss(batch, scores)
        with_signal = self._groups_with_signal(batch)
        if config.filter:
            rows &= np.repeat(with_signal, self.samples)
        advantages = self._advantages(batch, scores, kl, rows)
        rewarded = np.nan_to_num(scores) != 0
        counted = {"none": np.ones(1), "groups": with_signal, "rewarded": rewarded}[config.rescale]
        scale = counted.size / max(int(counted.sum()), 1)
        return batch | {
            "advantages": np.asarray(advantages) * np.float32(scale),
            "old_logprobs": old,
            "row_mask": rows,
            **self.update_kl_coef(batch | {"ref_kl": kl}, old),
        }

    def _advantages(
        self, batch: Batch, scores: np.ndarray, kl: np.ndarray | None, rows: np.ndarray
    ) -> jax.Array:
        """float32 [rows, length], as the keys say."""
        config, mask, dense = self.config, batch["response_mask"], self.token_scores(batch)
        if config.turn_discount >= 0:
            return _turn_advantages(
                scores,
                mask,
                dense,
                turns_of(batch),
                discount=config.turn_discount,
                samples=self.samples,
                normalise=config.normalise,
                epsilon=config.epsilon,
            )
        return _advantages(
            scores,
            mask,
            None if config.kl_in == "loss" else kl,
            jnp.float32(self.kl.coef),
            rows,
            # A group baseline compares whole responses, so dense rewards only count without one.
            dense if config.baseline == "none" else None,
            samples=self.samples,
            baseline=config.baseline,
            normalise=config.normalise,
            epsilon=config.epsilon,
            gamma=config.gamma,
            kl_in=config.kl_in,
            kl_cumulated=config.kl_cumulated,
            whitened=config.whiten,
        )


@jit_static_keywords
def _turn_advantages(
    scores: jax.Array,
    mask: jax.Array,
    dense: jax.Array | None,
    turn: jax.Array,
    *,
    discount: float,
    samples: int,
    normalise: str,
    epsilon: float,
) -> jax.Array:
    returns = turn_returns(token_rewards(scores, mask, dense=dense), turn, discount)
    scored = ~jnp.isnan(scores)
    return group_turn_advantages(
        returns, turn, scored, samples, normalise=normalise == "std", epsilon=epsilon
    )


@jit_static_keywords
def _advantages(
    scores: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None,
    kl_coef: jax.Array,
    rows: jax.Array,
    dense: jax.Array | None,
    *,
    samples: int,
    baseline: Any,
    normalise: Any,
    epsilon: float,
    gamma: float,
    kl_in: str,
    kl_cumulated: bool,
    whitened: bool,
) -> jax.Array:
    mask = jnp.asarray(mask, bool)
    if kl is not None and kl_in == "score":
        scores = scores - kl_coef * jnp.sum(jnp.where(mask, kl, 0.0), axis=1)
        kl = None
    options = {"baseline": baseline, "normalise": normalise, "epsilon": epsilon}
    per_row = group_advantages(scores, samples, lengths=jnp.sum(mask, axis=1), **options)
    # Without a KL and a discount each token has its response's advantage.
    cumulated_kl, token_kl = (kl, None) if kl_cumulated else (None, kl)
    per_token = token_rewards(per_row, mask, cumulated_kl, kl_coef, dense=dense)
    advantages = discounted_returns(per_token, mask, gamma)
    if token_kl is not None:
        advantages = advantages - kl_coef * jnp.where(mask, token_kl, 0.0)
    advantages = jnp.where(jnp.isnan(scores)[:, None], 0.0, advantages)
    return whiten(advantages, mask & rows[:, None]) if whitened else advantages
