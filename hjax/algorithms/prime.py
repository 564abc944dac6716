"""PRIME (Cui et al. 2025, arXiv 2502.01456): implicit process rewards, trained as the policy is."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import discounted_returns, process_leave_one_out, whiten
from hjax.algorithms.algorithm import Algorithm, Batch, old_logprobs
from hjax.algorithms.masks import by_switches, last_places
from hjax.algorithms.ppo import CLIP_KEYS, PPO, policy_loss
from hjax.algorithms.resampling import Resampling
from hjax.algorithms.unpaired_loss import ImplicitRewardLoss
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, above, at_least, between, finite, one_of


class PRIME(Resampling, Algorithm):
    """Outcomes train a language model whose log-ratios to the reference are the tokens' rewards."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward", "process_reward")

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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.samples < self.fewest_samples(self.config):
            raise ConfigError(
                f"rollout.samples={self.samples}: PRIME compares a response with the others to its "
                "prompt; set it to 2 or more"
            )

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Both rewards are compared within their group."""
        return 2

    @classmethod
    def needs_reference(cls, config: ConfigDict) -> bool:
        """Whatever the KL: process rewards are measured from it."""
        return True

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Something must be learned from."""
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
        """The policy loss, and cross-entropy for the process reward."""
        return {
            "actor": policy_loss(config, max_response_length),
            "process_reward": ImplicitRewardLoss(beta=config.beta),
        }

    def collect(self, prompts: Batch) -> Any:
        """Generate groups of samples."""
        return self.actor.generate_sequences(prompts)

    def learn(self, batch: Any) -> Batch:
        """Score the samples; outcomes teach the process reward, both teach the policy."""
        batch = self.resampled(batch)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.rewards(batch)
        old = self.proximal(batch)
        batch = self.with_outcomes(join(batch, reference, rewards, old))
        for minibatch in self.minibatches(batch):
            self.log(self.process_reward.update_reward(minibatch))
        process = self.process_reward.compute_process_reward(batch)
        batch = self.compute_advantages(join(batch, process))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    process_reward: Any  # a worker group

    def with_outcomes(self, batch: Batch) -> Batch:
        """Adds ``positive`` (1 on tokens of right responses) and ``row_mask`` (rows that count).

        Prompts of which nearly all or nearly no responses are right leave both losses, as in the
        paper: where outcomes say nothing, a policy would learn from its process reward alone.
        """
        right = np.nan_to_num(np.asarray(batch["rewards"], np.float32)) > self.config.right_above
        positive = np.asarray(batch["response_mask"], bool) & right[:, None]
        scores = self.scores(batch)
        rows = self.counted(batch, scores)
        scored = (~np.isnan(scores)).reshape(-1, self.samples).sum(axis=1)
        share = right.reshape(-1, self.samples).sum(axis=1) / np.maximum(scored, 1)
        kept = (share >= self.config.accuracy_low) & (share <= self.config.accuracy_high)
        if self.config.filter:
            kept &= self._says_something(batch)
        rows &= np.repeat(kept, self.samples)
        return batch | {"positive": positive.astype(np.float32), "row_mask": rows}

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, ``process_rewards`` by token and ``old_logprobs``."""
        config, old = self.config, old_logprobs(batch)
        mask = np.asarray(batch["response_mask"], bool)
        ratio = np.where(mask, batch["process_logprobs"] - batch["ref_logprobs"], 0.0)
        process = np.float32(config.beta) * ratio.astype(np.float32)
        if not config.process_end:
            process = np.where(last_places(mask), np.float32(0), process)
        if config.process_norm == "largest":
            process = process / largest_to_go(process, batch["row_mask"])
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
            **self.follow_kl(batch, old),
        }

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """The mean process reward of a response, and the share of rows that are learned from."""
        totals = np.asarray(batch["process_rewards"]).sum(axis=1)
        kept = float(np.mean(batch["row_mask"]))
        own = {"reward/process": float(totals.mean()), "rollout/rows_kept": kept}
        return super().batch_metrics(batch) | own


def largest_to_go(process: np.ndarray, rows: np.ndarray) -> np.float32:
    """The largest magnitude of a sum to go, float [N, L], of the rows that count, bool [N].

    1 where all are 0, so that one may divide by it.
    """
    sums = process[:, ::-1].cumsum(axis=1)[:, ::-1]
    largest = np.abs(sums[np.asarray(rows, bool)]).max(initial=0.0)
    return np.float32(largest or 1.0)


@by_switches
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
    last = last_places(mask)
    at_end = jnp.where(last, jnp.where(scored, outcomes, 0.0)[:, None], 0.0)
    total = jnp.zeros(mask.shape, jnp.float32)
    for weight, rewards, places in ((weights[0], process, mask), (weights[1], at_end, last)):
        made = process_leave_one_out(rewards, places, scored, samples)
        total = total + weight * discounted_returns(made, mask, gamma)
    return whiten(total, mask & rows[:, None])
