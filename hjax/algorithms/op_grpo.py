"""OP-GRPO: Flow-GRPO whose groups hold good paths of earlier policies, from a replay buffer."""

from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Batch
from hjax.algorithms.flow_matching import FlowGRPO
from hjax.controller import join
from hjax.errors import ConfigError
from hjax.models.flow_steps import sigma_grid
from hjax.roles import Role
from hjax.rules import Key, above, at_least, between, one_of


def side_by_side(first: Batch, second: Batch, groups: int) -> Batch:
    """Rows of two batches in groups: in each those of the first, then those of the second."""

    def both(name: str) -> np.ndarray:
        each = [x.reshape(groups, -1, *x.shape[1:]) for x in (first[name], second[name])]
        return np.concatenate(each, axis=1).reshape(-1, *first[name].shape[1:])

    return {name: both(name) for name in first}


class OPGRPO(FlowGRPO):
    """OP-GRPO (reconstruction of arXiv 2604.04142, of which the abstract and second-hand readings
    were read): Flow-GRPO whose groups hold good paths of earlier policies.

    A group has ``replayed`` rows of the buffer beside fresh ones. Of a replayed path the first
    steps, down to the noise level ``cut``, are trained; the rest is sampled anew by the current
    policy (``tail``) and scored. Ratios stay those to the policy that starts the step; a weight of
    each path, outside of the clip, corrects for the one that drew it.
    """

    workers = {**FlowGRPO.workers, "buffer": Role("hjax.workers:BestPaths", host=True)}
    keys = {
        "replayed": Key(1, "rows of a group from the buffer, at most group - 1", at_least(1)),
        "cut": Key(
            0.3, "noise level down to which a path is replayed; 0: all of it", between(0, 1)
        ),
        "tail": Key(
            "sampled",
            "the rest of a replayed path: sampled by the current policy and scored, or kept with "
            "its old reward",
            one_of("sampled", "kept"),
        ),
        "weighted": Key(True, "weigh replayed paths by the ratio of the policies that drew them"),
        "weight_low": Key(0.2, "least weight", above(0)),
        "weight_high": Key(5.0, "largest weight", above(0)),
        "decay": Key(0.9, "factor per step of a stored reward, against newer ones", between(0, 1)),
        "max_age": Key(20, "steps after which a path is dropped", at_least(1)),
    }

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse groups of replayed rows alone, and a cut that replays nothing."""
        super().check(config)
        if config.replayed >= config.group:
            raise ConfigError(
                f"config.algorithm.replayed={config.replayed} of a group of {config.group}: at "
                f"least one row is fresh; use at most {config.group - 1}"
            )
        if cls.replayed_steps(config) < 1:
            raise ConfigError(
                f"config.algorithm.cut={config.cut:g}: no step of {config.sample_steps} ends at or "
                "above that noise level; lower it"
            )

    @staticmethod
    def replayed_steps(config: ConfigDict) -> int:
        """The first steps, which are replayed: those that end at or above the cut."""
        return int((sigma_grid(config.sample_steps)[1:] >= config.cut - 1e-6).sum())

    def collect(self, prompts: Batch) -> Any:
        """Groups of fresh rows, then replayed ones (or fresh ones where the buffer has none)."""
        own, step = self.config, prompts["step"]
        conditions = self.group_conditions(step)
        fresh = self.sample(np.repeat(conditions, own.group - own.replayed), 2 * step)
        batch = side_by_side(fresh, self._replayed(step), len(conditions))
        self._offer(batch, step)
        return batch

    def _replayed(self, step: int) -> Batch:
        """Rows of the buffer, or fresh ones in their place where it has none."""
        found = join(self.buffer.look_up(self.group_conditions(step), step))
        there = found.pop("there")
        conditions = np.repeat(self.group_conditions(step), self.config.replayed)
        rows = len(there)
        fresh = None if there.all() else self.sample(conditions, 2 * step + 1)
        if fresh is not None and not there.any():
            return fresh
        own, taken = self.config, self.replayed_steps(self.config)
        early = {"latents": found["latents"][:, : taken + 1], "conditions": conditions}
        old = self.actor.score_paths("path_logprobs", early, own.sample_steps, own.noise)
        latents, samples = found["latents"].copy(), found["samples"]
        rewards = found["rewards"]
        self.evaluations += rows * taken
        if own.tail == "sampled" and taken < own.sample_steps:
            rest = join(
                self.actor.sample_paths(
                    conditions, 2 * step + 1, own.sample_steps, own.noise,
                    start=latents[:, taken], first=taken,
                )
            )  # fmt: skip
            latents[:, taken:] = rest["latents"]
            samples, rewards = rest["samples"], self.score(rest["samples"], conditions)
            self.evaluations += rows * (own.sample_steps - taken)
        now = join(logprobs=old)["logprobs"]
        apart = (now - found["logprobs"][:, :taken]).sum(axis=1)
        weights = np.clip(np.exp(apart), own.weight_low, own.weight_high).astype(np.float32)
        logprobs = np.zeros((rows, own.sample_steps), np.float32)
        logprobs[:, :taken] = now
        mask = np.arange(own.sample_steps) < min(taken, self.trained_count(own))
        made = {
            "samples": samples,
            "latents": latents,
            "logprobs": logprobs,
            "rewards": rewards,
            "conditions": conditions,
            "weights": weights if own.weighted else np.ones(rows, np.float32),
            "step_mask": np.broadcast_to(mask, logprobs.shape).copy(),
            "replayed": there,
        }
        if fresh is None:
            return made
        return {
            name: np.where(there.reshape(-1, *(1,) * (x.ndim - 1)), x, fresh[name])
            for name, x in made.items()
        }

    def _offer(self, batch: Batch, step: int) -> None:
        """Offer fresh rows that are better than their group's mean to the buffer."""
        own = self.config
        rewards = batch["rewards"].reshape(-1, own.group)
        means = np.nanmean(np.where(np.isnan(rewards).all(1, keepdims=True), 0, rewards), axis=1)
        better = (rewards > means[:, None]).reshape(-1) & ~batch["replayed"]
        order = np.argsort(-np.nan_to_num(batch["rewards"]), kind="stable")
        chosen = order[better[order]]
        rows = {
            name: batch[name][chosen]
            for name in ("samples", "latents", "logprobs", "rewards", "conditions")
        } | {"versions": np.full(len(chosen), step, np.int32)}
        shape = "x".join(map(str, self.problem.shape))
        kind = f"{own.problem} [{shape}], {own.sample_steps} steps, noise {own.noise:g}"
        self.buffer.offer(rows, step, kind=kind)

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """With the mean weight and reward of replayed rows."""
        chosen = batch["replayed"]
        found = super().batch_metrics(batch) | {"flow/replayed": float(chosen.mean())}
        if chosen.any():
            found["flow/weight_mean"] = float(batch["weights"][chosen].mean())
            found["flow/replayed_reward"] = float(np.nanmean(batch["rewards"][chosen]))
        return found
