"""PRIME (Cui et al. 2025, arXiv 2502.01456): implicit process rewards, trained online."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import discounted_returns, process_leave_one_out, whiten
from hjax.algorithms.algorithm import Algorithm, Batch, old_logprobs
from hjax.algorithms.masks import jit_static_keywords, last_token_mask
from hjax.algorithms.ppo import CLIP_KEYS, PPO, policy_loss
from hjax.algorithms.resampling import Resampling
from hjax.algorithms.unpaired_loss import ImplicitRewardLoss
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, above, at_least, between, finite, one_of


class PRIME(Resampling, Algorithm):
    """Implicit PRM: a language model trained on outcomes; its log-ratios are token rewards."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward", "process_reward")
    plays_environments = False

    keys = {
        **{name: PPO.keys[name] for name in (*CLIP_KEYS, "gamma")},
        "beta": Key(0.05, "reward of a token per nat of its log-ratio to the reference", above(0)),
        "right_above": Key(
            0.5, "a response with a reward above it is right, for the process reward", finite()
        ),
        "accuracy_low": Key(
            0.2,
            "least share of right responses to a prompt with which its group stays in both losses",
            between(0, 1),
        ),
        "accuracy_high": Key(0.8, "largest share of right responses, likewise", between(0, 1)),
        "process_coef": Key(1.0, "weight of the process rewards' returns", at_least(0)),
        "outcome_coef": Key(1.0, "weight of the outcome rewards' returns", at_least(0)),
        "process_end": Key(True, "a response's last token has a process reward (verl: none)"),
        "process_norm": Key(
            "none",
            "largest: divide process rewards by the step's largest sum to go (verl's batch_norm)",
            one_of("none", "largest"),
        ),
        "kl_in": Key("loss", 'where the KL of the policy enters: "loss"', one_of("loss")),
    }
    defaults = {"kl_coef": 0.0}

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Two: both rewards have a leave-one-out baseline."""
        return 2

    @classmethod
    def needs_reference(cls, config: ConfigDict) -> bool:
        """Always: process rewards are log-ratios to the reference."""
        return True

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse settings that leave nothing to learn from."""
        super().check(config)
        if config.accuracy_low > config.accuracy_high:
            raise ConfigError(
                f"config.algorithm.accuracy_low={config.accuracy_low} is above accuracy_high="
                f"{config.accuracy_high}: no prompt is left"
            )
        if not config.process_coef and not config.outcome_coef:
            raise ConfigError(
                "config.algorithm.process_coef=0 and outcome_coef=0 leave no reward: set one of "
                "them above 0"
            )

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The policy loss, and cross-entropy for the process reward model."""
        return {
            "actor": policy_loss(config, max_response_length),
            "process_reward": ImplicitRewardLoss(beta=config.beta),
        }

    def collect(self, prompts: Batch) -> Any:
        """Generate groups of samples."""
        return self.answer(prompts)

    def learn(self, batch: Any) -> Batch:
        """Score the samples, update the process reward model on outcomes, then the policy."""
        batch = self.resampled(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.rewards(batch)
        batch = self.with_outcomes(join(batch, reference, rewards, self.proximal(batch)))
        for minibatch in self.minibatches(batch):
            self.log(self.process_reward.update_reward(minibatch))
        process = self.process_reward.compute_process_reward(batch)
        batch = self.compute_advantages(join(batch, process))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    process_reward: Any  # a worker group

    def with_outcomes(self, batch: Batch) -> Batch:
        """Adds ``positive`` (1 on tokens of right responses) and ``row_mask`` (rows in the loss).

        Prompts with nearly all or nearly no right responses are filtered from both losses, as in
        the paper: without a signal from outcomes the policy would learn from process rewards only.
        """
        right = np.nan_to_num(np.asarray(batch["rewards"], np.float32)) > self.config.right_above
        positive = np.asarray(batch["response_mask"], bool) & right[:, None]
        scores = self.scores(batch)
        rows = self.rows_in_loss(batch, scores)
        scored = (~np.isnan(scores)).reshape(-1, self.samples).sum(axis=1)
        share = right.reshape(-1, self.samples).sum(axis=1) / np.maximum(scored, 1)
        kept = (share >= self.config.accuracy_low) & (share <= self.config.accuracy_high)
        if self.config.filter:
            kept &= self._groups_with_signal(batch)
        rows &= np.repeat(kept, self.samples)
        return batch | {"positive": positive.astype(np.float32), "row_mask": rows}

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, per-token ``process_rewards`` and ``old_logprobs``."""
        config, old = self.config, old_logprobs(batch)
        mask = np.asarray(batch["response_mask"], bool)
        ratio = np.where(mask, batch["process_logprobs"] - batch["ref_logprobs"], 0.0)
        process = np.float32(config.beta) * ratio.astype(np.float32)
        if not config.process_end:
            process = np.where(last_token_mask(mask), np.float32(0), process)
        if config.process_norm == "largest":
            process = process / largest_return(process, batch["row_mask"])
        advantages = _advantages(
            self.scores(batch),
            process,
            mask,
            batch["row_mask"],
            samples=self.samples,
            gamma=config.gamma,
            weights=(config.process_coef, config.outcome_coef),
        )
        return batch | {
            "advantages": np.asarray(advantages),
            "process_rewards": process,
            "old_logprobs": old,
            **self.update_kl_coef(batch, old),
        }

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """The mean process reward of a response, and the share of rows in the loss."""
        totals = np.asarray(batch["process_rewards"]).sum(axis=1)
        kept = float(np.mean(batch["row_mask"]))
        added = {"reward/process": float(totals.mean()), "rollout/rows_kept": kept}
        return super().batch_metrics(batch) | added


def largest_return(process: np.ndarray, rows: np.ndarray) -> np.float32:
    """Largest absolute return (sum of `process` float [N, L] to the end) in `rows` bool [N].

    1 if all are 0, so that it can be divided by.
    """
    sums = process[:, ::-1].cumsum(axis=1)[:, ::-1]
    return np.float32(np.abs(sums[np.asarray(rows, bool)]).max(initial=0.0) or 1.0)


@jit_static_keywords
def _advantages(
    outcomes: jax.Array,
    process: jax.Array,
    mask: jax.Array,
    rows: jax.Array,
    *,
    samples: int,
    gamma: float,
    weights: tuple[float, float],
) -> jax.Array:
    scored = ~jnp.isnan(outcomes)
    last = last_token_mask(mask)
    at_end = jnp.where(last, jnp.where(scored, outcomes, 0.0)[:, None], 0.0)
    total = jnp.zeros(mask.shape, jnp.float32)
    for weight, rewards, places in ((weights[0], process, mask), (weights[1], at_end, last)):
        made = process_leave_one_out(rewards, places, scored, samples)
        total = total + weight * discounted_returns(made, mask, gamma)
    return whiten(total, mask & rows[:, None])
