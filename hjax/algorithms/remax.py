"""ReMax (Li et al. 2023, arXiv 2310.10505): the greedy response's reward is the baseline."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import remax_advantages, whiten
from hjax.algorithms.algorithm import Algorithm, Batch, old_logprobs, reference_kl, row_count
from hjax.algorithms.episode_rows import EpisodeRows
from hjax.algorithms.masks import jit_static_keywords
from hjax.algorithms.ppo import PPO, policy_loss
from hjax.controller import join
from hjax.rules import Key


class ReMax(Algorithm):
    """REINFORCE with a greedy baseline; no critic, no ratio, one update per batch."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")
    plays_environments = True

    keys = {
        "gamma": PPO.keys["gamma"],
        "pretraining_coef": PPO.keys["pretraining_coef"],
        "kl_cumulated": Key(
            False,
            "each token answers for the KL of those after it too (verl), or only for its own (the "
            "authors' code)",
        ),
        "whiten": Key(
            False,
            "shift and scale the advantages of a step to mean 0 and standard deviation 1 (not in "
            "the paper)",
        ),
    }

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """REINFORCE's loss."""
        return {"actor": policy_loss(config, max_response_length, ratio="none")}

    def collect(self, prompts: Batch) -> Any:
        """Generate samples, and a greedy response to each prompt."""
        batch = self.answer(prompts)
        return batch, self.answer(prompts, greedy=True)

    def learn(self, batch: Any) -> Batch:
        """Score against the greedy response, then update."""
        batch, greedy = batch
        greedy = greedy, self.reward.compute_reward(greedy)
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.reward.compute_reward(batch)
        old = self.proximal(batch)
        batch = self.with_advantages(join(batch, reference, rewards, old, baseline=greedy))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch, self.pretraining_batch()))
        return batch

    def with_advantages(self, batch: Batch) -> Batch:
        """``compute_advantages`` with ``baseline``, float32 [rows]: of each row the score of its
        prompt's greedy answer. An answer may be an episode of several rows."""
        greedy = join(*batch["baseline"])
        answers, episodes = EpisodeRows.of(greedy), EpisodeRows.of(batch)
        scores = self.scores(greedy if answers is None else answers.join(greedy))
        sample = np.arange(row_count(batch)) if episodes is None else episodes.places[:, 0]
        baseline = scores[np.maximum(sample, 0) // self.samples]
        return super().with_advantages(batch | {"baseline": baseline})

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, ``old_logprobs`` and ``row_mask``; ``baseline`` is there."""
        config = self.config
        old, scores, kl = old_logprobs(batch), self.scores(batch), reference_kl(batch)
        advantages = _advantages(
            scores,
            batch["baseline"],
            batch["response_mask"],
            kl if config.kl_in == "reward" else None,
            jnp.float32(self.kl.coef),
            gamma=config.gamma,
            kl_cumulated=config.kl_cumulated,
            whitened=config.whiten,
        )
        return batch | {
            "advantages": np.asarray(advantages),
            "old_logprobs": old,
            "row_mask": self.rows_in_loss(batch, scores - batch["baseline"]),
            **self.update_kl_coef(batch | {"ref_kl": kl}, old),
        }


@jit_static_keywords
def _advantages(
    rewards: jax.Array,
    baseline: jax.Array,
    mask: jax.Array,
    kl: jax.Array | None,
    kl_coef: jax.Array,
    *,
    gamma: float,
    kl_cumulated: bool,
    whitened: bool,
) -> jax.Array:
    advantages = remax_advantages(
        rewards, baseline, mask, kl, kl_coef, gamma, kl_cumulated=kl_cumulated
    )
    if whitened:
        advantages = whiten(advantages, mask & ~jnp.isnan(rewards - baseline)[:, None])
    return advantages
