"""Pairs that a policy makes itself: OnlineDPO has its answers judged, SPIN plays demonstrations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Batch, rows_of
from hjax.algorithms.dpo import DPO
from hjax.algorithms.pair_loss import REFERRED
from hjax.algorithms.resampling import chosen
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key


class OnlineDPO(DPO):
    """Two answers to each prompt; the reward says which is chosen (Guo et al. 2024, 2402.04792)."""

    roles = ("actor", "reference", "reward")
    generates = True
    source = "prompts"
    needed_data = ""
    shared_keys = (
        "minibatch",
        "epochs",
        "reward_scale",
        "reward_clip",
        "overlong_buffer",
        "overlong_penalty",
        "mask_truncated",
        "max_skipped",
    )

    keys = {
        "keep_ties": Key(
            False,
            "pairs of equal rewards stay in the loss, the first answer chosen (TRL), instead of "
            "leaving it",
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.samples != self.fewest_samples(self.config):
            raise ConfigError(
                f"rollout.samples={self.samples}: OnlineDPO compares two answers to a prompt; set "
                "it to 2"
            )

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """The two of a pair."""
        return 2

    def learn(self, batch: Any) -> Batch:
        """Have them judged, then learn from the pairs."""
        reference = self.reference.compute_ref_log_prob(batch)
        rewards = self.reward.compute_reward(batch)
        batch = self.in_pairs(join(batch, reference, rewards))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    def in_pairs(self, batch: Batch) -> Batch:
        """The rows of each pair with the better one first, and ``row_mask``.

        A pair with an unscored answer leaves the loss, and so does one of equal rewards (but with
        ``keep_ties``, where the first one drawn stays first).
        """
        scores = self.scores(batch)
        first, second = scores[::2], scores[1::2]
        rows = np.arange(len(scores)).reshape(-1, 2)
        rows = np.where((second > first)[:, None], rows[:, ::-1], rows)
        counts = self.counted(batch, scores).reshape(-1, 2).all(axis=1)
        if not self.config.keep_ties:
            counts &= first != second
        made = chosen(batch, rows.ravel())
        return made | {"row_mask": np.repeat(counts, 2)}

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """The share of pairs that say something."""
        return {"reward/pairs": float(np.mean(batch["row_mask"]))}


class SPIN(DPO):
    """Demonstrations against the policy's own answers (Chen et al. 2024, arXiv 2401.01335).

    A step is an iterate: the policy as it is answers the demonstrations' prompts, is the opponent
    that the loss refers to, and takes ``epochs`` updates on those pairs.
    """

    roles = ("actor",)
    generates = True
    source = "demonstrations"
    needed_data, data_hint = "demonstrations", "give it a `response` column"
    shared_keys = ("epochs", "max_skipped")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.samples != 1:
            raise ConfigError(
                f"rollout.samples={self.samples}: SPIN sets one answer beside each demonstration; "
                "set it to 1"
            )

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Losses that refer to an opponent."""
        super().check(config)
        if config.kind not in REFERRED:
            raise ConfigError(
                f"config.algorithm.kind={config.kind!r} refers to no opponent, which SPIN plays "
                f"against: use {', '.join(REFERRED)}"
            )

    def collect(self, prompts: Batch) -> Any:
        """Demonstrations, and the policy's own answers to their prompts."""
        assert self.demonstrations is not None
        shown = self.demonstrations()
        asked = {key: shown[key] for key in ("prompts", "prompt_mask")}
        return shown, self.actor.generate_sequences(asked | {"step": prompts["step"]})

    def learn(self, batch: Any) -> Batch:
        """Tell them apart; returns the policy's own answers."""
        shown, own = batch
        own = join(own)
        pairs = in_turn(shown, own)
        opponent = join(self.actor.compute_log_prob(pairs))
        pairs["ref_logprobs"] = opponent["old_logprobs"]
        for minibatch in self.minibatches(pairs):
            self.log(self.actor.update_actor(minibatch))
        return own


def in_turn(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> Batch:
    """Rows of two batches of prompts and responses in turn; responses padded to the longer width.

    Args:
      chosen, rejected: ``prompts``, ``prompt_mask``, ``responses``, ``response_mask`` [rows, ...].
    """
    made = {}
    for key in ("prompts", "prompt_mask", "responses", "response_mask"):
        pair = [np.asarray(batch[key]) for batch in (chosen, rejected)]
        width = max(x.shape[1] for x in pair)
        pair = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in pair]
        made[key] = np.stack(pair, axis=1).reshape(2 * rows_of(chosen), width)
    return made
