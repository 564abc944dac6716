"""GRPO (Shao et al. 2024, arXiv 2402.03300): the group of samples is the baseline."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import group_advantages
from hjax.algorithms.base import Algorithm, Batch, old_logprobs
from hjax.algorithms.ppo import PPO, policy_loss
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, at_least, one_of


class GRPO(Algorithm):
    """Rewards normalised within each prompt's samples; no critic; KL in the loss."""

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")

    keys = {
        "clip_low": PPO.keys["clip_low"],
        "clip_high": PPO.keys["clip_high"],
        "normalise": Key(
            "std",
            'divide by the group\'s standard deviation ("std"), or not ("none": Dr.GRPO)',
            one_of("std", "none"),
        ),
        "epsilon": Key(1e-6, "added to the group's standard deviation", at_least(0)),
        "leave_one_out": Key(
            False,
            'compare each sample with the others only (with normalise "none": RLOO\'s baseline)',
        ),
    }
    defaults = {"kl_coef": 0.04, "kl_in": "loss", "aggregation": "sequence"}

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """A KL stands in the loss."""
        super().check(config)
        if config.kl_coef and config.kl_in != "loss":
            raise ConfigError(
                f"algorithm.kl_in={config.kl_in!r}: GRPO takes its KL in the loss; "
                "use 'loss', or PPO for a KL in the reward"
            )

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The clipped policy loss with its KL."""
        return {"actor": policy_loss(config, max_response_length)}

    def collect(self, prompts: Batch) -> Any:
        """Generate groups of samples."""
        return self.actor.generate_sequences(prompts)

    def learn(self, batch: Any) -> Batch:
        """Score the samples, then learn."""
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.reward.compute_reward(batch)
        old = self.proximal(batch)
        batch = self.compute_advantages(join(batch, reference, rewards, old))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Adds ``advantages``, ``old_logprobs`` and ``row_mask`` (scored rows)."""
        config = self.config
        per_row = _advantages(
            batch["rewards"],
            self.samples,
            normalise=config.normalise,
            epsilon=config.epsilon,
            leave_one_out=config.leave_one_out,
        )
        mask, old = np.asarray(batch["response_mask"], bool), old_logprobs(batch)
        return batch | {
            "advantages": np.where(mask, np.asarray(per_row)[:, None], np.float32(0)),
            "old_logprobs": old,
            "row_mask": ~np.isnan(batch["rewards"]),
            **self.follow_kl(batch, old),
        }


_advantages = functools.partial(
    jax.jit, static_argnums=(1,), static_argnames=("normalise", "epsilon", "leave_one_out")
)(group_advantages)
