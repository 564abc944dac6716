"""Safe-RLHF (Dai et al. 2023, arXiv 2310.12773): PPO under a constraint on the cost."""

import collections
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import gae, lagrangian_advantages, token_rewards, whiten
from hjax.algorithms.algorithm import Batch, old_logprobs, reference_kl
from hjax.algorithms.losses import ValueLoss
from hjax.algorithms.masks import jit_static_keywords
from hjax.algorithms.ppo import PPO
from hjax.controller import join
from hjax.rules import Key, above, at_least, finite


class SafeRLHF(PPO):
    """PPO-Lagrangian: a multiplier weights cost advantages against reward advantages."""

    roles = ("actor", "critic", "reference", "reward", "cost", "cost_critic")
    plays_environments = False

    keys = {
        "cost_limit": Key(
            0.1,
            "mean cost per response that may not be exceeded; a cost above 0 is unsafe",
            finite(),
        ),
        "initial_multiplier": Key(1.0, "the multiplier (lambda) at the start", above(0)),
        "max_multiplier": Key(20.0, "largest value of the multiplier", above(0)),
        "multiplier_learning_rate": Key(0.1, "learning rate of the multiplier", at_least(0)),
        "multiplier_delay": Key(0, "steps before the multiplier first moves", at_least(0)),
        "cost_window": Key(4, "steps over whose mean costs the multiplier averages", at_least(1)),
        "score_clip": Key(
            50.0,
            "bound on the absolute reward and cost of a token, KL included; 0: none",
            at_least(0),
        ),
    }
    # Safe-RLHF does not whiten.
    defaults = {"whiten": False}

    def __init__(self, config: ConfigDict, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.log_multiplier = math.log(config.initial_multiplier)
        self.recent_costs: collections.deque[float] = collections.deque(maxlen=config.cost_window)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """PPO's losses, and the value loss of the cost critic."""
        critic = ValueLoss(
            clip=config.value_clip or None, values_key="cost_values", returns_key="cost_returns"
        )
        return super().losses(config, max_response_length) | {"cost_critic": critic}

    def learn(self, batch: Any) -> Batch:
        """PPO's step with cost, cost critic and multiplier."""
        values = self.critic.compute_values(batch)
        cost_values = self.cost_critic.compute_values(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.reward.compute_reward(batch)
        costs = self.cost.compute_cost(batch)
        old = self.proximal(batch)
        batch = join(batch, values, reference, rewards, costs, old, cost=cost_values)
        batch = self.with_advantages(self.update_multiplier(batch))
        for minibatch in self.minibatches(batch):
            self.log(self.critic.update_critic(minibatch))
            self.log(self.cost_critic.update_critic(minibatch))
            self.log(self.actor.update_actor(minibatch, self.pretraining_batch()))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds PPO's entries, for the combined advantage, and ``cost_returns``."""
        config = self.config
        old, scores, kl = old_logprobs(batch), self.scores(batch), reference_kl(batch)
        advantages, returns, cost_returns = _advantages(
            scores,
            batch["costs"],
            batch["values"],
            batch["cost"]["values"],
            batch["response_mask"],
            kl if config.kl_in == "reward" else None,
            jnp.float32(self.kl.coef),
            jnp.float32(self.multiplier),
            self.token_scores(batch),
            gamma=config.gamma,
            lam=config.lam,
            clip=config.score_clip or None,
            whitened=config.whiten,
            biased=config.whiten_biased,
        )
        return batch | {
            "advantages": np.asarray(advantages),
            "returns": np.asarray(returns),
            "cost_returns": np.asarray(cost_returns),
            "cost_values": batch["cost"]["values"],
            "old_logprobs": old,
            "row_mask": self.rows_in_loss(batch, scores + batch["costs"]),
            **self.update_kl_coef(batch | {"ref_kl": kl}, old),
        }

    @property
    def multiplier(self) -> float:
        """Lambda, the weight of the cost."""
        return math.exp(self.log_multiplier)

    def update_multiplier(self, batch: Batch) -> Batch:
        """Gradient ascent of lambda = exp(eta) on the mean cost minus the limit."""
        config = self.config
        costs = np.asarray(batch["costs"], np.float64)
        if not np.isnan(costs).all():
            self.recent_costs.append(float(np.nanmean(costs)))
        if self.step_number > config.multiplier_delay and self.recent_costs:
            excess = float(np.mean(self.recent_costs)) - config.cost_limit
            self.log_multiplier += config.multiplier_learning_rate * excess * self.multiplier
            self.log_multiplier = min(self.log_multiplier, math.log(config.max_multiplier))
        return batch

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """The mean cost and the multiplier."""
        return super().batch_metrics(batch) | {
            "cost/mean": float(np.nanmean(batch["costs"])),
            "cost/multiplier": self.multiplier,
        }

    def state(self) -> dict[str, Any]:
        """PPO's state, and the multiplier's."""
        return super().state() | {
            "log_multiplier": self.log_multiplier,
            "recent_costs": list(self.recent_costs),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        self.log_multiplier = state["log_multiplier"]
        self.recent_costs.extend(state["recent_costs"])


@jit_static_keywords
def _advantages(
    rewards: jax.Array,
    costs: jax.Array,
    values: jax.Array,
    cost_values: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None,
    kl_coef: jax.Array,
    multiplier: jax.Array,
    dense: jax.Array | None,
    *,
    gamma: float,
    lam: float,
    clip: float | None,
    whitened: bool,
    biased: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    per_token = token_rewards(rewards, mask, kl, kl_coef, clip, dense)
    # The KL is subtracted from rewards and added to costs.
    token_costs = token_rewards(costs, mask, kl, -kl_coef, clip)
    reward_advantages, returns = gae(per_token, values, mask, gamma, lam)
    cost_advantages, cost_returns = gae(token_costs, cost_values, mask, gamma, lam)
    scored = mask & ~jnp.isnan(rewards + costs)[:, None]
    advantages = lagrangian_advantages(reward_advantages, cost_advantages, multiplier)
    if whitened:
        advantages = whiten(advantages, scored, unbiased=not biased)
    return jnp.where(scored, advantages, 0.0), returns, cost_returns
