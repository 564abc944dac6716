"""Groups with equal rewards: filtered, or resampled (DAPO's dynamic sampling, arXiv 2503.14476).

A group whose responses all have the same reward has no gradient. With ``filter`` its rows are
masked in the loss. With ``resample`` further prompts are sampled in its place, for at most so many
rounds. The batch keeps its shape, so that nothing is recompiled: groups that are still missing are
filled with groups of equal rewards, which are then masked.
"""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import rewards_differ
from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.episode_rows import EpisodeRows
from hjax.batches import concatenate_batches, sample_rows, select_rows
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, at_least


class Resampling(Algorithm):
    """Mixin for algorithms that compare the samples of a prompt with each other."""

    keys = {
        "filter": Key(False, "groups whose rewards are all equal leave the loss"),
        "resample": Key(
            0,
            "times that other prompts are answered in a step in place of groups whose rewards are "
            "all equal (dynamic sampling); 0: none",
            at_least(0),
        ),
    }

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.config.resample and self.more_prompts is None:
            raise ConfigError(
                f"config.algorithm.resample={self.config.resample} draws further prompts during a "
                "step, which asynchronous rollout (rollout.max_staleness) has already drawn: set "
                "one of them to 0"
            )
        self._resample_metrics: dict[str, float] = {}
        self._drawn: Batch | None = None  # all that this step has drawn, kept or not

    @classmethod
    def check_samples(cls, config: ConfigDict, samples: int) -> None:
        """Refuse a single response to a prompt for ``resample`` and ``filter`` too."""
        super().check_samples(config, samples)
        if samples < 2 and (config.resample or config.filter):
            raise ConfigError(
                "config.algorithm.resample and filter compare the samples of a prompt, and "
                f"config.rollout.samples={samples}: set it to 2 or more"
            )

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse ``resample`` without ``filter``."""
        super().check(config)
        if config.resample and not config.filter:
            raise ConfigError(
                f"config.algorithm.resample={config.resample} fills the batch with groups of equal "
                "rewards; set config.algorithm.filter=True, so that these are masked in the loss"
            )

    def rewards(self, batch: Any) -> Any:
        """The future of a batch's rewards; {} where ``resampled`` has scored it already."""
        return {} if self.config.resample else self.reward.compute_reward(batch)

    def resampled(self, batch: Any) -> Any:
        """Dynamic sampling: with ``resample`` a scored batch of groups with differing rewards.

        Args:
          batch: from ``collect``, or its future. Without ``resample`` it is returned as it is.
        """
        self._resample_metrics, self._drawn = {}, None
        if not self.config.resample:
            return batch
        sampled = [join(batch, self.reward.compute_reward(batch))]
        wanted = len(sample_rows(sampled[0])) // self.samples
        signals = [self._groups_with_signal(sampled[0])]
        for _ in range(self.config.resample):
            if sum(map(np.sum, signals)) >= wanted:
                break
            assert self.more_prompts is not None
            more = self.collect(self.more_prompts(sum(len(sample_rows(x)) for x in sampled)))
            sampled.append(join(more, self.reward.compute_reward(more)))
            signals.append(self._groups_with_signal(sampled[-1]))
        everything, with_signal = concatenate_batches(sampled), np.concatenate(signals)
        self._drawn = everything
        rewards = np.asarray(everything["rewards"], np.float64)[sample_rows(everything)]
        self._resample_metrics = {
            "rollout/groups_drawn": float(with_signal.size),
            "rollout/groups_kept": float(min(with_signal.sum(), wanted)),
            "reward/drawn_mean": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else 0.0,
        }
        # Groups with a signal first, each kind in the order of sampling.
        groups = np.argsort(~with_signal, kind="stable")[:wanted]
        episodes = EpisodeRows.of(everything)
        if episodes is not None:
            size = max(len(batch["episode"]) for batch in sampled)
            return select_rows(everything, episodes.of_groups(groups, self.samples, size))
        rows = (groups[:, None] * self.samples + np.arange(self.samples)).ravel()
        return select_rows(everything, rows)

    def _groups_with_signal(self, batch: Batch) -> np.ndarray:
        """Whether the rewards of each group differ: bool [prompts]."""
        # Of the raw rewards: a length penalty alone is not a learning signal.
        rewards = np.asarray(batch["rewards"])[sample_rows(batch)]
        return np.asarray(rewards_differ(rewards, self.samples))

    def remember(self, batch: Batch) -> None:
        """With ``resample`` of all groups that the step has drawn."""
        super().remember(batch if self._drawn is None else self._drawn)

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """With ``resample`` the numbers of groups sampled and kept, and the mean sampled reward."""
        return super().batch_metrics(batch) | self._resample_metrics
