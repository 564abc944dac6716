"""Runs an algorithm's steps and computes their metrics: rewards, KL, lengths, updates, skips."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from hjax.algorithms import Algorithm, Batch
from hjax.algorithms.algorithm import reference_kl
from hjax.algorithms.losses import explained_variance
from hjax.batches import real_rows, response_lengths, sample_rows
from hjax.controller import join
from hjax.data.sources import MIXTURE
from hjax.environments.episode_batch import episode_summary
from hjax.errors import RunError

_explained_variance = jax.jit(explained_variance)


class StepRecorder:
    """Runs an algorithm's steps, one at a time, and computes their metrics.

    Args:
      algorithm: its steps are run.
      max_skipped: consecutive skipped updates of a role at which the run stops.

    Attributes:
      batch: of the step in progress, to be saved if it fails; empty until it is complete.
      skipped_this_step: updates of the last step that were skipped because they were not finite.
    """

    def __init__(self, algorithm: Algorithm, max_skipped: int):
        self.algorithm = algorithm
        self.max_skipped = max_skipped
        self.batch: Batch = {}
        self.skipped_this_step = 0
        self._skipped: dict[str, int] = {}
        self._skipped_in_a_row: dict[str, int] = {}

    def run(self, prompts: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """Run the algorithm's ``step`` and wait for its updates.

        Args:
          prompts: of the step, see docs/design.md.
          step: its number, counted from 1.

        Returns:
          (the batch it trained on, arrays on the host; its metrics).

        Raises:
          RunError: too many consecutive updates were not finite.
        """
        return self.record(lambda: self.algorithm.step(prompts), step)

    def record(self, compute: Callable[[], Any], step: int) -> tuple[Batch, dict[str, float]]:
        """``run`` for a step taken by ``compute``, which returns the batch it trained on."""
        algorithm = self.algorithm
        algorithm.step_number = step
        algorithm.logged = []
        self.skipped_this_step = 0
        self.batch = {}
        self.batch = join(compute())
        if algorithm.generates:
            algorithm.remember(self.batch)
        metrics: dict[str, float] = {}
        if algorithm.generates:
            metrics |= batch_metrics(self.batch, algorithm.kl.coef)
            if "episode" in self.batch:
                metrics |= episode_summary(self.batch)
            metrics |= mixture_metrics(self.batch)
            metrics |= algorithm.batch_metrics(self.batch)
        elif not algorithm.sequences:
            metrics |= reward_metrics(self.batch.get("rewards"))
            metrics |= algorithm.batch_metrics(self.batch)
        metrics |= self._update_metrics()
        return self.batch, metrics | algorithm.finish(metrics)

    def _update_metrics(self) -> dict[str, float]:
        """Means over each role's updates of this step, without skipped ones."""
        by_role: dict[str, list[dict[str, float]]] = {}
        for role, logged in self.algorithm.logged:
            by_role.setdefault(role, []).append(
                {key: float(x) for key, x in join(logged).items() if np.ndim(x) == 0}
            )
        metrics: dict[str, float] = {}
        for role, updates in by_role.items():
            taken = [u for u in updates if not u.get("skipped")]
            for key in dict.fromkeys(key for update in updates for key in update):
                values = [update[key] for update in updates if key in update]
                if key == "token_prob_error":
                    # Only the first update has the parameters that generated; 0 means that none
                    # of its tokens counts. Of a second source, such as replayed rows, it stands
                    # under the name they are logged by.
                    again = "rollout/token_prob_error" in metrics
                    if values[0]:
                        metrics[f"{role if again else 'rollout'}/{key}"] = values[0]
                elif key != "skipped":
                    counted = [update[key] for update in taken if key in update]
                    metrics[f"{role}/{key}"] = float(np.mean(counted or values))
            self._count_skipped(role, updates)
            metrics[f"{role}/skipped"] = float(self._skipped.get(role, 0))
        self.algorithm.logged = []
        return metrics

    def _count_skipped(self, role: str, updates: list[dict[str, float]]) -> None:
        for update in updates:
            if not update.get("skipped"):
                self._skipped_in_a_row[role] = 0
                continue
            self._skipped[role] = self._skipped.get(role, 0) + 1
            self.skipped_this_step += 1
            in_a_row = self._skipped_in_a_row.get(role, 0) + 1
            self._skipped_in_a_row[role] = in_a_row
            if in_a_row >= self.max_skipped:
                raise RunError(
                    f"{in_a_row} updates of the {role} in a row were skipped: the last one's loss "
                    f"is {update['loss']} and its gradient norm {update['grad_norm']}; look at the "
                    f"batch kept in skipped/, or start another run with a lower "
                    f"{role}.learning_rate (a workdir as actor.path starts from its last weights)"
                )

    def state(self) -> dict[str, Any]:
        """The counts of skipped updates by role, as plain JSON."""
        return {"skipped": dict(self._skipped), "in_a_row": dict(self._skipped_in_a_row)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state()``."""
        self._skipped = dict(state["skipped"])
        self._skipped_in_a_row = dict(state["in_a_row"])


def mixture_metrics(batch: Batch) -> dict[str, float]:
    """Share and mean reward of each file of a mixture, as ``mixture/NAME/share`` and ``/reward``.

    Args:
      batch: numpy arrays; rows of a mixture have its names in the column ``mixture``.
    """
    names = (batch.get("columns") or {}).get(MIXTURE)
    if names is None:
        return {}
    samples = sample_rows(batch)
    names, metrics = np.asarray([str(names[row]) for row in samples]), {}
    rewards = batch.get("rewards")
    for name in dict.fromkeys(names.tolist()):
        metrics[f"mixture/{name}/share"] = float((names == name).mean())
        if rewards is not None:
            scored = np.asarray(rewards, np.float64)[samples][names == name]
            scored = scored[~np.isnan(scored)]
            metrics[f"mixture/{name}/reward"] = float(scored.mean()) if scored.size else np.nan
    return metrics


def reward_metrics(rewards: Any) -> dict[str, float]:
    """Mean and standard deviation of rewards, and the share of those that are NaN: unscored.

    Args:
      rewards: float, one per sample; None: there are none.
    """
    if rewards is None:
        return {}
    rewards = np.asarray(rewards, np.float64)
    scored = rewards[~np.isnan(rewards)]
    return {
        "reward/mean": float(scored.mean()) if scored.size else math.nan,
        "reward/std": float(scored.std()) if scored.size else math.nan,
        "reward/unscored": 1.0 - scored.size / max(rewards.size, 1),
    }


def batch_metrics(batch: Batch, kl_coefficient: float) -> dict[str, float]:
    """Metrics of a step's batch: rewards, lengths, KL, the critic's explained variance.

    Args:
      batch: numpy arrays, as docs/design.md describes it.
      kl_coefficient: weight of the KL after the step, reported if there is a reference.
    """
    mask = np.asarray(batch["response_mask"], bool)
    metrics, samples = {}, sample_rows(batch)
    rows = real_rows(batch)
    if "rewards" in batch:
        rewards = np.asarray(batch["rewards"], np.float64)
        metrics = reward_metrics(rewards[samples])
    metrics |= {
        "response/length_mean": float(np.mean(np.asarray(response_lengths(batch))[rows])),
        "response/truncated": float(np.mean(np.asarray(batch["truncated"])[samples])),
    }
    by_name = {**batch.get("named_rewards", {}), **batch.get("reward_metrics", {})}
    for name, values in by_name.items():
        said = np.asarray(values, np.float64)[samples]
        said = said[~np.isnan(said)]
        metrics[f"reward/{name}"] = float(said.mean()) if said.size else math.nan
    if "guessed" in batch:
        guessed = int(np.sum(batch["guessed"]))
        right = int(np.sum(batch["guessed_right"]))
        metrics["rollout/guesses_right"] = right / guessed if guessed else math.nan
    if "prompt_known" in batch:
        tokens = int(np.sum(batch["prompt_mask"]))
        metrics["rollout/prefix_tokens"] = int(np.sum(batch["prompt_known"])) / max(tokens, 1)
    kl = reference_kl(batch)
    if kl is not None:
        metrics["kl/reference"] = float(kl[mask].astype(np.float64).mean())
        metrics["kl/coefficient"] = kl_coefficient
    if "values" in batch:
        counted = mask & ~np.isnan(rewards)[:, None]
        explained = _explained_variance(batch["values"], batch["returns"], counted)
        metrics["critic/explained_variance"] = float(explained)
    for outcome, count in batch.get("reward_outcomes", {}).items():
        if outcome != "ok" and count:
            metrics[f"reward/{outcome}"] = float(count)
    return metrics
