"""Flow matching, and GRPO over the denoising steps of a flow model (Flow-GRPO)."""

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
