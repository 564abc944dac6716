"""PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic, as used for RLHF."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import gae, length_adaptive_lambda, token_rewards, whiten
from hjax.algorithms.algorithm import Algorithm, Batch, old_logprobs, reference_kl
from hjax.algorithms.losses import ValueLoss
from hjax.algorithms.masks import jit_static_keywords
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.algorithms.surrogates import COVARIANCES
from hjax.algorithms.turn_credit import bilevel_gae, turn_level_gae, turns_of
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, Rule, at_least, between, finite, one_of

# PPO's keys that bound an update; other algorithms with its policy loss have them too.
CLIP_KEYS = (
    "clip_low",
    "clip_high",
    "dual_clip",
    "ratio_cap",
    "covariance",
    "covariance_share",
    "covariance_low",
    "covariance_high",
    "covariance_coef",
)


class PPO(Algorithm):
    """Clipped policy and value losses, advantages by GAE."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "critic", "reference", "reward")
    plays_environments = True

    keys = {
        "gamma": Key(1.0, "discount per token", between(0, 1)),
        "lam": Key(0.95, "lambda of generalised advantage estimation", between(0, 1)),
        "credit": Key(
            "token",
            "what an advantage of an episode's turns is of: each token (token), each turn as one "
            "action (turn), or turns and the tokens within each (bilevel)",
            one_of("token", "turn", "bilevel"),
        ),
        "turn_gamma": Key(1.0, "discount per turn, of credit turn and bilevel", between(0, 1)),
        "turn_lam": Key(0.95, "lambda over turns, of credit turn and bilevel", between(0, 1)),
        "lam_alpha": Key(
            0.0,
            "instead of lam a lambda of each response's own, 1 - 1 / max(lam_alpha * length, 1) "
            "(VAPO: 0.05); 0: lam",
            at_least(0),
        ),
        "value_lam": Key(
            -1.0,
            "lambda of what the critic learns (VAPO: 1); -1: that of the advantages",
            Rule("0 to 1, or -1 for that of the advantages", lambda x: x == -1 or 0 <= x <= 1),
        ),
        "positive_nll": Key(
            0.0,
            "weight of the negative log-likelihood of responses with a reward above 0 (VAPO: 0.1)",
            at_least(0),
        ),
        "clip_low": Key(0.2, "the probability ratio may fall to 1 - clip_low", between(0, 1)),
        "clip_high": Key(0.2, "the probability ratio may rise to 1 + clip_high", at_least(0)),
        "dual_clip": Key(
            0.0,
            "bound on the loss of negative advantages, in units of |A| (0: none; usually 3)",
            Rule("above 1 (usually 3), or 0 for none", lambda x: x == 0 or x > 1),
        ),
        "ratio_cap": Key(
            0.0,
            "largest ratio before the clip, for either sign of A (TRL's delta); of surrogate dppo "
            "its largest weight (0: 20); 0: none",
            at_least(0),
        ),
        "covariance": Key(
            "none",
            "tokens whose covariance of log-prob and advantage is large: clip (a few leave the "
            "loss: clip-cov), kl (the largest pay for each nat they move: kl-cov), or none",
            one_of(*COVARIANCES),
        ),
        "covariance_share": Key(
            0.0002,
            "share of the tokens that covariance chooses",
            Rule("above 0 and at most 1", lambda x: 0 < x <= 1),
        ),
        "covariance_low": Key(1.0, "least covariance of those that clip draws from", finite()),
        "covariance_high": Key(5.0, "largest covariance of those that clip draws from", finite()),
        "covariance_coef": Key(1.0, "what kl costs per nat", at_least(0)),
        "value_clip": Key(
            0.2,
            "how far a value may move from the old one before the loss stops it; 0: no clipping",
            at_least(0),
        ),
        "whiten": Key(
            True, "shift and scale the advantages of a step to mean 0 and standard deviation 1"
        ),
        "whiten_biased": Key(False, "by the biased variance, over n (OpenRLHF) and not over n - 1"),
        "pretraining_coef": Key(
            0.0,
            "weight of the loss on demonstrations, a batch with each update (PPO-ptx); 0: none",
            at_least(0),
        ),
    }

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse switches that have no effect together."""
        super().check(config)
        if config.credit != "token" and (config.lam_alpha or config.value_lam >= 0):
            raise ConfigError(
                f"config.algorithm.credit={config.credit!r} has lambdas of its own: leave "
                "lam_alpha and value_lam out, or use credit='token'"
            )
        unread = {"token": ("turn_gamma", "turn_lam"), "turn": ("gamma", "lam"), "bilevel": ()}
        for key in unread[config.credit]:
            if config.get(key) != cls.default_config().get(key):
                raise ConfigError(
                    f"config.algorithm.{key}={config[key]} has no effect with credit="
                    f"{config.credit!r}: leave it out, or use credit='bilevel', which reads both "
                    "gamma and lam of tokens and those of turns"
                )
        if config.whiten_biased and not config.whiten:
            raise ConfigError(
                "config.algorithm.whiten_biased has no effect without config.algorithm.whiten: "
                "leave it out, or whiten"
            )

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """Clipped policy loss for the actor, clipped squared error for the critic."""
        return {
            "actor": policy_loss(config, max_response_length),
            "critic": ValueLoss(clip=config.value_clip or None),
        }

    def collect(self, prompts: Batch) -> Any:
        """Generate."""
        return self.answer(prompts)

    def learn(self, batch: Any) -> Batch:
        """Score with every model, then update."""
        values = self.critic.compute_values(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.reward.compute_reward(batch)
        old = self.proximal(batch)
        batch = self.with_advantages(join(batch, values, reference, rewards, old))
        for minibatch in self.minibatches(batch):
            self.log(self.critic.update_critic(minibatch))
            self.log(self.actor.update_actor(minibatch, self.pretraining_batch()))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, ``returns``, ``old_logprobs`` and ``row_mask`` (scored rows)."""
        config = self.config
        old, scores, kl = old_logprobs(batch), self.scores(batch), reference_kl(batch)
        rows = self.rows_in_loss(batch, scores)
        advantages, returns = _advantages(
            scores,
            batch["values"],
            batch["response_mask"],
            kl if config.kl_in == "reward" else None,
            jnp.float32(self.kl.coef),
            rows,
            self.token_scores(batch),
            turns_of(batch) if config.credit != "token" else None,
            gamma=config.gamma,
            lam=config.lam,
            lam_alpha=config.lam_alpha,
            value_lam=config.value_lam,
            whitened=config.whiten,
            biased=config.whiten_biased,
            credit=config.credit,
            turn_gamma=config.turn_gamma,
            turn_lam=config.turn_lam,
        )
        positive = batch["response_mask"] & (scores > 0)[:, None]
        return batch | {
            "advantages": np.asarray(advantages),
            "returns": np.asarray(returns),
            "old_logprobs": old,
            "row_mask": rows,
            **({"positive": positive.astype(np.float32)} if config.positive_nll else {}),
            **self.update_kl_coef(batch | {"ref_kl": kl}, old),
        }


class VAPO(PPO):
    """PPO for long answers with a verifier (arXiv 2504.05118).

    Decoupled and length-adaptive GAE, clip-higher, and the likelihood of right answers in the
    loss. Value pretraining is ``actor.frozen_updates``.
    """

    defaults = dict(value_lam=1.0, lam_alpha=0.05, clip_high=0.28, positive_nll=0.1, kl_coef=0.0)


def policy_loss(config: ConfigDict, max_response_length: int, **switches: Any) -> PolicyLoss:
    """Build the policy loss from an algorithm's config."""
    options = {name: config[name] for name in PolicyLoss.__dataclass_fields__ if name in config}
    for name in ("dual_clip", "ratio_cap", "correction_low", "correction_cap"):
        options[name] = options.get(name) or None  # 0: none
    in_loss = config.kl_in == "loss"
    if config.get("kl_importance") and not (in_loss and config.kl_coef):
        raise ConfigError(
            "config.algorithm.kl_importance=True weights the KL in the loss, and there is none: "
            f"kl_in={config.kl_in}, kl_coef={config.kl_coef:g}; set kl_in=loss and kl_coef above 0"
        )
    options |= {
        "max_length": max_response_length if config.aggregation == "constant" else None,
        "entropy_adaptive": config.get("entropy_target", 0.0) > 0,
        "kl_coef": config.kl_coef if in_loss else 0.0,
        "kl_adaptive": in_loss and config.kl_target > 0,
    }
    return PolicyLoss(**options | switches)


@jit_static_keywords
def _advantages(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None,
    kl_coef: jax.Array,
    rows: jax.Array,
    dense: jax.Array | None,
    turn: jax.Array | None,
    *,
    credit: str,
    turn_gamma: float,
    turn_lam: float,
    gamma: float,
    lam: float,
    lam_alpha: float,
    value_lam: float,
    whitened: bool,
    biased: bool,
) -> tuple[jax.Array, jax.Array]:
    per_token = token_rewards(rewards, mask, kl, kl_coef, dense=dense)
    policy_lam: Any = lam
    if lam_alpha:
        policy_lam = length_adaptive_lambda(jnp.sum(mask, axis=1), lam_alpha)
    if turn is None:
        advantages, returns = gae(per_token, values, mask, gamma, policy_lam)
    elif credit == "turn":
        advantages, returns = turn_level_gae(per_token, values, turn, turn_gamma, turn_lam)
    else:
        advantages, returns = bilevel_gae(
            per_token, values, turn,
            gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam,
        )  # fmt: skip
    if value_lam >= 0:
        _, returns = gae(per_token, values, mask, gamma, value_lam)
    scored = mask & rows[:, None]
    if whitened:
        advantages = whiten(advantages, scored, unbiased=not biased)
    return jnp.where(scored, advantages, 0.0), returns
