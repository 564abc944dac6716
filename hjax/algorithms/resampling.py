"""Groups that say nothing: left out, or drawn anew (DAPO's dynamic sampling, arXiv 2503.14476).

A group whose responses all have the same reward has no gradient. With ``filter`` its rows leave the
loss. With ``resample`` further prompts of the data's order are answered in its stead, so many times
at most; the step's batch keeps its shape, so that nothing is compiled anew, and groups that are
still missing are filled up by those that say nothing, which then leave the loss.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import rewards_differ
from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.rules import Key, at_least

# Of a batch what is counted over all rows, not kept by row.
COUNTED = "reward_outcomes"


class Resampling(Algorithm):
    """For algorithms that compare the samples of a prompt with each other."""

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
                f"config.algorithm.resample={self.config.resample} draws prompts while a step "
                "learns, and rollout.max_staleness has drawn those that follow by then: set one "
                "of them to 0"
            )
        if self.samples < 2 and (self.config.resample or self.config.filter):
            raise ConfigError(
                "config.algorithm.resample and filter compare the samples of a prompt, and "
                "rollout.samples=1: set it to 2 or more"
            )
        self._drawn: dict[str, float] = {}

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Who draws anew also leaves out."""
        super().check(config)
        if config.resample and not config.filter:
            raise ConfigError(
                f"config.algorithm.resample={config.resample} fills up with groups that say "
                "nothing; set config.algorithm.filter=True, so that these leave the loss"
            )

    def rewards(self, batch: Any) -> Any:
        """The future of a batch's rewards; {} where ``resampled`` has scored it."""
        return {} if self.config.resample else self.reward.compute_reward(batch)

    def resampled(self, batch: Any) -> Any:
        """The batch; with ``resample`` scored, and of groups that say something as far as found.

        Args:
          batch: of ``collect``, or its future.
        """
        self._drawn = {}
        if not self.config.resample:
            return batch
        drawn = [join(batch, self.reward.compute_reward(batch))]
        wanted = len(drawn[0]["rewards"]) // self.samples
        says = [self._says_something(drawn[0])]
        for _ in range(self.config.resample):
            if sum(map(np.sum, says)) >= wanted:
                break
            assert self.more_prompts is not None
            more = self.collect(self.more_prompts(sum(len(x["rewards"]) for x in drawn)))
            drawn.append(join(more, self.reward.compute_reward(more)))
            says.append(self._says_something(drawn[-1]))
        whole, found = concatenated(drawn), np.concatenate(says)
        rewards = np.asarray(whole["rewards"], np.float64)
        self._drawn = {
            "rollout/groups_drawn": float(found.size),
            "rollout/groups_kept": float(min(found.sum(), wanted)),
            "reward/drawn_mean": float(np.nanmean(rewards)) if not np.isnan(rewards).all() else 0.0,
        }
        # Those that say something first, each in the order in which they were drawn.
        groups = np.argsort(~found, kind="stable")[:wanted]
        rows = (groups[:, None] * self.samples + np.arange(self.samples)).ravel()
        return chosen(whole, rows)

    def _says_something(self, batch: Batch) -> np.ndarray:
        """Whether the rewards of each group differ, bool [prompts]."""
        # By the rewards as they came: that one answer is longer does not make a group say more.
        return np.asarray(rewards_differ(batch["rewards"], self.samples))

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """With ``resample`` how many groups were drawn and say something, and their mean reward."""
        return super().batch_metrics(batch) | self._drawn


def chosen(batch: Mapping[str, Any], rows: Sequence[int] | np.ndarray) -> Batch:
    """Some rows of a batch of arrays, lists and dicts of lists."""
    made: Batch = {}
    for key, value in batch.items():
        if key == COUNTED or not (isinstance(value, Mapping | list) or np.ndim(value)):
            made[key] = value  # of all rows
        elif isinstance(value, Mapping):
            made[key] = chosen(value, rows)
        else:
            made[key] = [value[i] for i in rows] if isinstance(value, list) else value[rows]
    return made


def concatenated(batches: Sequence[Mapping[str, Any]]) -> Batch:
    """Batches one after the other; responses padded on the right to the longest."""
    made: Batch = {}
    for key, first in batches[0].items():
        values = [batch[key] for batch in batches]
        if key == COUNTED:
            names = dict.fromkeys(name for value in values for name in value)
            made[key] = {name: sum(value.get(name, 0) for value in values) for name in names}
        elif isinstance(first, Mapping):
            made[key] = concatenated(values)
        elif isinstance(first, list):
            made[key] = [x for value in values for x in value]
        elif not np.ndim(first):
            made[key] = first
        else:
            arrays = [np.asarray(value) for value in values]
            if arrays[0].ndim == 2:
                longest = max(x.shape[1] for x in arrays)
                arrays = [np.pad(x, ((0, 0), (0, longest - x.shape[1]))) for x in arrays]
            made[key] = np.concatenate(arrays)
    return made
