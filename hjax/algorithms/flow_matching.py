"""Flow matching, and GRPO over the denoising steps of a flow model: Flow-GRPO and OP-GRPO."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.controller import join
from hjax.environments.flow_problems import find_problem
from hjax.errors import ConfigError
from hjax.models.flow_steps import deviations, sigma_grid
from hjax.roles import Role
from hjax.rules import Key, above, at_least, between, one_of

_FLOW_KEYS: Mapping[str, Key] = {
    "problem": Key(
        "ring", "samples and rewards: ring, ring_pairs, glyphs, or your own as path.py:Class"
    ),
    "hidden_size": Key(128, "width of the perceptron's hidden layers", at_least(1)),
    "hidden_layers": Key(3, "hidden layers of the perceptron", at_least(1)),
    "eval_steps": Key(40, "deterministic steps of an evaluation's samples", at_least(2)),
    "eval_samples": Key(256, "samples per condition in an evaluation", at_least(1)),
}
# Draws of evaluations are those of a step that no run takes.
_EVAL_NUMBER = 2**31


class FlowMatching(Algorithm):
    """Train a flow model on a problem's samples (Lipman et al. 2023, arXiv 2210.02747)."""

    sequences = False
    workers = {"actor": Role("hjax.workers:MLPFlow", trained=True)}
    keys = {
        **_FLOW_KEYS,
        "batch": Key(256, "samples per update", at_least(1)),
        "updates": Key(10, "updates in a training step", at_least(1)),
    }

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.problem = find_problem(self.config.problem)
        self._draw = jax.jit(self._samples, static_argnums=1)

    @classmethod
    def updates_per_step(cls, config: ConfigDict) -> Mapping[str, int]:
        """Of the flow model."""
        return {"actor": config.updates}

    @classmethod
    def describe_step(cls, config: ConfigDict) -> dict[str, int]:
        """Samples and updates."""
        return {"samples_per_update": config.batch, "updates_per_step": config.updates}

    def _samples(self, key: jax.Array, rows: int) -> Batch:
        keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
        conditions = jax.random.randint(
            jax.random.fold_in(key, 2**32 - 1), (rows,), 0, self.problem.conditions
        )
        return {"samples": jax.vmap(self.problem.draw)(keys), "conditions": conditions}

    def learn(self, batch: Any) -> Batch:
        """So many updates, each on samples drawn anew; conditions are drawn apart from them."""
        updates = self.config.updates
        for update in range(updates):
            number = (batch["step"] - 1) * updates + update
            key = jax.random.fold_in(jax.random.key(self.seed), number)
            drawn = join(self._draw(key, self.config.batch))
            self.log(self.actor.update(drawn))
        return drawn

    def evaluate(self, held_out: Any) -> dict[str, float]:
        """See ``sample_metrics``."""
        return sample_metrics(self.actor, self.problem, self.config)


def sample_metrics(actor: Any, problem: Any, config: ConfigDict) -> dict[str, float]:
    """``reward`` and the problem's ``measures`` of samples by deterministic steps."""
    conditions = np.repeat(np.arange(problem.conditions, dtype=np.int32), config.eval_samples)
    found = actor.sample_paths(conditions, _EVAL_NUMBER, config.eval_steps, 0.0)
    samples = join(found)["samples"]
    rewards = np.asarray(problem.reward(samples, conditions), np.float64)
    rewards = rewards[np.isfinite(rewards)]
    measures = problem.measures(samples, conditions)
    return {"reward": float(rewards.mean()) if rewards.size else float("nan"), **measures}


@dataclasses.dataclass(frozen=True)
class PathLoss:
    """GRPO's clipped loss of each denoising step (Flow-GRPO), a number per path.

    Attributes:
      steps, noise: of the sampling grid.
      clip: how far a ratio may be from 1.
      kl_coef: weight of the squared distance of means to the reference's, over 2 s^2 as in
        Flow-GRPO's code (without the step's size).
    """

    steps: int
    noise: float
    clip: float
    kl_coef: float

    @property
    def needs(self) -> tuple[str, ...]:
        """Entries of a batch that it reads."""
        names = ("latents", "conditions", "logprobs", "step_mask", "advantages", "weights")
        return (*names, "reference_means") if self.kl_coef else names

    def __call__(self, worker: Any, model: Any, batch: Batch, keys: Any) -> Any:
        """Losses and statistics [rows]."""
        latents, mask = batch["latents"], batch["step_mask"]
        means, step = worker.step_means(model, latents, batch["conditions"], self.steps, self.noise)
        found = step.log_density(latents[:, 1:].reshape(means.shape), means).reshape(mask.shape)
        ratio = jnp.exp(jnp.where(mask, found - batch["logprobs"], 0.0))
        advantages = batch["advantages"][:, None]
        clipped = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
        each = jnp.maximum(-advantages * ratio, -advantages * clipped)
        counted = jnp.maximum(mask.sum(axis=1), 1)

        def over_steps(values: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(mask, values, 0.0), axis=1) / counted

        losses = batch["weights"] * over_steps(each)
        stats = {
            "clip_fraction": over_steps((jnp.abs(ratio - 1) > self.clip).astype(jnp.float32)),
            "ratio_error": over_steps(jnp.abs(ratio - 1)),
        }
        if self.kl_coef:
            apart = (means - batch["reference_means"].reshape(means.shape)) ** 2
            apart = apart / (2 * step.deviation**2)
            kl = over_steps(apart.reshape(len(apart), -1).mean(axis=1).reshape(mask.shape))
            losses, stats["kl"] = losses + self.kl_coef * kl, kl
        return losses, stats


class FlowGRPO(Algorithm):
    """GRPO over the denoising steps of a flow model (Liu et al. 2025, arXiv 2505.05470)."""

    sequences = False
    workers = {
        "actor": Role("hjax.workers:MLPFlow", trained=True),
        "reference": Role("hjax.workers:MLPFlow", starts_from="actor"),
    }
    shared_keys = ("minibatch", "epochs", "kl_coef", "max_skipped")
    keys = {
        **_FLOW_KEYS,
        "groups": Key(8, "groups in a training step, each of one condition", at_least(1)),
        "group": Key(8, "samples in a group", at_least(2)),
        "sample_steps": Key(10, "stochastic steps of a sample", at_least(3)),
        "noise": Key(0.7, "noise level a of the stochastic steps", above(0)),
        "clip": Key(1e-4, "how far a step's ratio may be from 1", above(0)),
        "advantage_clip": Key(5.0, "largest absolute advantage", above(0)),
        "normalise": Key(
            "batch",
            "standard deviation that advantages are divided by: that of the batch, of the group, "
            "or none",
            one_of("batch", "group", "none"),
        ),
        "trained_steps": Key(
            0.99, "share of the steps that is trained, rounded down: the last is not", between(0, 1)
        ),
    }
    defaults = {"kl_coef": 0.04, "minibatch": 32}

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.problem = find_problem(self.config.problem)
        self.evaluations = 0  # of the network in sampling, rows times steps

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse what leaves no step to train, and mini-batches that do not divide."""
        super().check(config)
        if cls.trained_count(config) < 1:
            raise ConfigError(
                f"config.algorithm.trained_steps={config.trained_steps:g} of "
                f"{config.sample_steps} steps is none; raise it"
            )
        deviations(sigma_grid(config.sample_steps), config.noise)
        rows = config.groups * config.group
        if config.minibatch and rows % config.minibatch:
            raise ConfigError(
                f"config.algorithm.minibatch={config.minibatch} does not divide groups * group = "
                f"{config.groups} * {config.group} = {rows}"
            )

    @staticmethod
    def trained_count(config: ConfigDict) -> int:
        """The first steps, which are trained."""
        return int(config.sample_steps * config.trained_steps)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The clipped loss of steps."""
        loss = PathLoss(config.sample_steps, config.noise, config.clip, config.kl_coef)
        return {"actor": loss}

    @classmethod
    def updates_per_step(cls, config: ConfigDict) -> Mapping[str, int]:
        """Of the flow model."""
        rows = config.groups * config.group
        return {"actor": config.epochs * rows // (config.minibatch or rows)}

    @classmethod
    def describe_step(cls, config: ConfigDict) -> dict[str, int]:
        """Samples, network evaluations of sampling, and updates."""
        rows = config.groups * config.group
        return {
            "samples_per_step": rows,
            "evaluations_per_step": rows * config.sample_steps,
            "updates_per_step": cls.updates_per_step(config)["actor"],
        }

    def group_conditions(self, step: int) -> np.ndarray:
        """The condition of each group of a step: all in turn, int32 [groups]."""
        first = (step - 1) * self.config.groups
        return (
            np.arange(first, first + self.config.groups, dtype=np.int32) % self.problem.conditions
        )

    def sample(self, conditions: np.ndarray, number: int) -> Batch:
        """Fresh paths of conditions, scored: ``samples``, ``latents``, ``logprobs``, ``rewards``
        (NaN: unscored), ``conditions``, ``weights`` of 1, ``replayed`` (none) and ``step_mask`` of
        the trained steps."""
        own = self.config
        batch = join(self.actor.sample_paths(conditions, number, own.sample_steps, own.noise))
        self.evaluations += len(conditions) * own.sample_steps
        trained = np.arange(own.sample_steps) < self.trained_count(own)
        return batch | {
            "conditions": conditions,
            "rewards": self.score(batch["samples"], conditions),
            "weights": np.ones(len(conditions), np.float32),
            "replayed": np.zeros(len(conditions), bool),
            "step_mask": np.broadcast_to(trained, batch["logprobs"].shape).copy(),
        }

    def score(self, samples: np.ndarray, conditions: np.ndarray) -> np.ndarray:
        """The problem's rewards, float32 [rows]; NaN where they are not finite."""
        rewards = np.asarray(self.problem.reward(samples, conditions), np.float32)
        if rewards.shape != (len(samples),):
            raise ConfigError(
                f"{type(self.problem).__name__}.reward returned shape {rewards.shape} for "
                f"{len(samples)} samples; a number each"
            )
        return np.where(np.isfinite(rewards), rewards, np.nan)

    def collect(self, prompts: Batch) -> Any:
        """Whole groups of fresh samples."""
        conditions = np.repeat(self.group_conditions(prompts["step"]), self.config.group)
        return self.sample(conditions, prompts["step"])

    def learn(self, batch: Any) -> Batch:
        """Advantages within groups, the reference's means, and updates."""
        batch = self.compute_advantages(batch)
        if "reference" in self.needed_roles(self.config):
            own = self.config
            means = self.reference.score_paths("path_means", batch, own.sample_steps, own.noise)
            batch = join(batch, reference_means=means)
        for minibatch in self.minibatches(batch):
            self.log(self.actor.update(minibatch))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """``advantages`` float32 [rows] of rows in groups, and ``row_mask``: those scored."""
        own = self.config
        rewards = np.asarray(batch["rewards"], np.float64).reshape(-1, own.group)
        known = ~np.isnan(rewards)
        count = np.maximum(known.sum(axis=1, keepdims=True), 1)
        filled = np.where(known, rewards, 0)
        mean = filled.sum(axis=1, keepdims=True) / count
        away = np.where(known, rewards - mean, 0)
        scale: Any = 1.0
        if own.normalise == "batch":
            scale = (np.std(rewards[known]) if known.any() else 0.0) + 1e-4
        elif own.normalise == "group":
            scale = np.sqrt((away**2).sum(axis=1, keepdims=True) / count) + 1e-4
        advantages = np.clip(away / scale, -own.advantage_clip, own.advantage_clip)
        return batch | {
            "advantages": advantages.reshape(-1).astype(np.float32),
            "row_mask": known.reshape(-1),
        }

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """``flow/evaluations``: of the network in sampling, since the start."""
        return {"flow/evaluations": float(self.evaluations)}

    def evaluate(self, held_out: Any) -> dict[str, float]:
        """See ``sample_metrics``."""
        return sample_metrics(self.actor, self.problem, self.config)

    def state(self) -> dict[str, Any]:
        """With the count of evaluations."""
        return super().state() | {"evaluations": self.evaluations}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        self.evaluations = state["evaluations"]


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
        found = join(self.buffer.look_up(conditions, step))
        fresh = self.sample(np.repeat(conditions, own.group - own.replayed), 2 * step)
        others = self._replayed(np.repeat(conditions, own.replayed), found, step)
        groups = len(conditions)

        def grouped(name: str) -> np.ndarray:
            parts = (fresh[name], others[name])
            each = [x.reshape(groups, -1, *x.shape[1:]) for x in parts]
            return np.concatenate(each, axis=1).reshape(-1, *fresh[name].shape[1:])

        batch = {name: grouped(name) for name in fresh if name in others}
        self._offer(batch, step)
        return batch

    def _replayed(self, conditions: np.ndarray, found: Batch, step: int) -> Batch:
        """Rows of the buffer, or fresh ones in their place where it has none."""
        there = found.pop("there")
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
