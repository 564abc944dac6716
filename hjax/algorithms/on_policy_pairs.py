"""DPO on the policy's own samples: OnlineDPO ranks them by reward, SPIN rejects them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Batch, row_count
from hjax.algorithms.dpo import DPO
from hjax.algorithms.pair_loss import REFERENCE_KINDS
from hjax.algorithms.prediction_calibration import Predictions
from hjax.algorithms.resampling import select_rows
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key


class OnlineDPO(DPO):
    """Two samples per prompt; the reward says which is chosen (Guo et al. 2024, 2402.04792)."""

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
        )
    }

    @classmethod
    def fewest_samples(cls, config: ConfigDict) -> int:
        """Two, for a pair."""
        return 2

    @classmethod
    def check_samples(cls, config: ConfigDict, samples: int) -> None:
        """Refuse more than a pair, too."""
        if samples != cls.fewest_samples(config):
            raise ConfigError(
                f"config.rollout.samples={samples}: OnlineDPO compares two answers to a prompt; "
                "set it to 2"
            )

    def learn(self, batch: Any) -> Batch:
        """Score the samples, then update on the pairs."""
        reference = self.reference.compute_ref_log_prob(batch)
        batch = self.rank_pairs(join(batch, reference, self.reward.compute_reward(batch)))
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update_actor(minibatch))
        return batch

    def rank_pairs(self, batch: Batch) -> Batch:
        """Order the rows of each pair with the better one first, and add ``row_mask``.

        A pair with an unscored response is masked, and so is a pair with equal rewards (unless
        ``keep_ties``: then the first sample counts as chosen).
        """
        scores = self.scores(batch)
        first, second = scores[::2], scores[1::2]
        rows = np.arange(len(scores)).reshape(-1, 2)
        rows = np.where((second > first)[:, None], rows[:, ::-1], rows)
        valid = self.rows_in_loss(batch, scores).reshape(-1, 2).all(axis=1)
        if not self.config.keep_ties:
            valid &= first != second
        return select_rows(batch, rows.ravel()) | {"row_mask": np.repeat(valid, 2)}

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """The share of pairs in the loss."""
        return {"reward/pairs": float(np.mean(batch["row_mask"]))}


class SPIN(DPO):
    """Self-play: demonstrations against own samples (Chen et al. 2024, arXiv 2401.01335).

    A step is one iteration: the current policy samples responses to the demonstrations' prompts,
    serves as the opponent (the reference of the loss), and takes ``epochs`` updates on the pairs.
    """

    roles = ("actor",)
    generates = True
    source = "demonstrations"
    needed_data, data_hint = "demonstrations", "give it a `response` column"
    shared_keys = ("epochs", "max_skipped")

    @classmethod
    def check_samples(cls, config: ConfigDict, samples: int) -> None:
        """Refuse several responses to a prompt."""
        if samples != 1:
            raise ConfigError(
                f"config.rollout.samples={samples}: SPIN pairs one response with each "
                "demonstration; set it to 1"
            )

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse losses without a reference, since the opponent is the reference."""
        super().check(config)
        if config.kind not in REFERENCE_KINDS:
            raise ConfigError(
                f"config.algorithm.kind={config.kind!r} has no reference, which is the opponent "
                f"in SPIN: use {', '.join(REFERENCE_KINDS)}"
            )

    def collect(self, prompts: Batch) -> Any:
        """Demonstrations, and the policy's own responses to their prompts."""
        assert self.demonstrations is not None
        shown = self.demonstrations()
        own_prompts = {key: shown[key] for key in ("prompts", "prompt_mask")}
        return shown, self.actor.generate_sequences(own_prompts | {"step": prompts["step"]})

    def predictions(self, batch: Batch) -> Predictions:
        """None: held-out demonstrations have no opponent."""
        return {}

    def learn(self, batch: Any) -> Batch:
        """Update on the pairs; returns the policy's own responses."""
        shown, own = batch
        own = join(own)
        pairs = interleave_pairs(shown, own)
        pairs["ref_logprobs"] = join(self.actor.compute_log_prob(pairs))["old_logprobs"]
        for minibatch in self.minibatches(pairs):
            self.log(self.actor.update_actor(minibatch))
        return own


def interleave_pairs(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> Batch:
    """Alternate the rows of two batches; prompts and responses are padded to the longer width.

    Args:
      chosen, rejected: ``prompts``, ``prompt_mask``, ``responses``, ``response_mask`` [rows, ...].
    """
    made = {}
    for key in ("prompts", "prompt_mask", "responses", "response_mask"):
        pair = [np.asarray(batch[key]) for batch in (chosen, rejected)]
        width = max(x.shape[1] for x in pair)
        pair = [np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in pair]
        made[key] = np.stack(pair, axis=1).reshape(2 * row_count(chosen), width)
    return made
