"""What every algorithm shares: its roles by name, mini-batches, metrics and resumable state.

An algorithm is a dataflow: ``step`` calls worker groups, each call returns a future at once, and
``join`` waits for what the controller's own numerics need. It names no mesh, device or sharding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.kl import KL_KINDS, AdaptiveKL, FixedKL, KLController
from hjax.algorithms.losses import explained_variance
from hjax.controller import Future, join
from hjax.errors import RunError
from hjax.roles import Role, role_table
from hjax.rules import Rule, at_least, finite, one_of

Batch = dict[str, Any]

_explained_variance = jax.jit(explained_variance)


class Absent:
    """Stands for a role that this configuration does not need: its calls give nothing."""

    def __getattr__(self, name: str) -> Callable[..., Batch]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: {}


class Algorithm:
    """Base of every algorithm.

    Subclass it (or one of its subclasses) and override ``step`` or ``compute_advantages``; the
    worker groups of ``roles`` are attributes of their names.

    Args:
      config: the section ``algorithm`` of the run's config.
      groups: worker group by role.
      seed: of the run.
      samples: responses per prompt.
      demonstrations: returns the next batch of demonstrations, or None where there are none.
    """

    roles: ClassVar[tuple[str, ...]] = ("actor", "reference", "reward")
    # Name -> worker class (a subclass of hjax.workers.Worker) or hjax.Role: roles of your own, or
    # your own class for one of the roles above.
    workers: ClassVar[dict[str, Any]] = {}
    # Whether steps are made of rollouts (False: supervised training).
    generates: ClassVar[bool] = True

    def __init__(
        self,
        config: ConfigDict,
        groups: Mapping[str, Any],
        seed: int = 0,
        samples: int = 1,
        demonstrations: Callable[[], Batch] | None = None,
    ):
        self.config = config
        self.seed = seed
        self.samples = samples
        self.demonstrations = demonstrations
        self.step_number = 0
        for role in dict.fromkeys((*self.roles, *self.workers)):
            setattr(self, role, groups.get(role, Absent()))
        self.kl = self.make_kl_controller()
        self._logged: list[tuple[str, Any]] = []
        self._skipped: dict[str, int] = {}
        self._skipped_in_a_row: dict[str, int] = {}
        self.skipped_this_step = 0
        # The batch of the step in progress, to be kept if the step fails.
        self.batch: Batch = {}

    # Declared for type checkers; each is a worker group.
    actor: Any
    critic: Any
    reference: Any
    reward: Any
    cost: Any
    cost_critic: Any

    # What the keys of `default_config()` may be; where a class is silent its bases' rules hold.
    rules: ClassVar[Mapping[str, Rule]] = {
        "minibatch": at_least(0),
        "epochs": at_least(1),
        "kl_coef": at_least(0),
        "kl_in": one_of("reward", "loss"),
        "kl_estimator": one_of(*KL_KINDS),
        "kl_target": at_least(0),
        "kl_horizon": at_least(1),
        "entropy_coef": finite(),
        "aggregation": one_of("token", "sequence", "constant"),
        "max_skipped": at_least(0),
    }

    @classmethod
    def all_rules(cls) -> dict[str, Rule]:
        """What the algorithm's own keys may be: its rules and its bases'."""
        found: dict[str, Rule] = {}
        for base in reversed(cls.__mro__):
            found |= vars(base).get("rules", {})
        return found

    @classmethod
    def default_config(cls) -> ConfigDict:
        """The algorithm's own keys, which live under ``config.algorithm``."""
        config = ConfigDict()
        # Sequences per optimizer update; 0: the step's whole batch. Divides prompts * samples.
        config.minibatch = 0
        # Passes over each step's batch.
        config.epochs = 1
        # Weight of the KL to the reference; 0 needs no reference.
        config.kl_coef = 0.05
        # Where it enters: "reward" (k1, subtracted per token) or "loss".
        config.kl_in = "reward"
        # Estimator of the KL in the loss: k2, k3, k1+ or k3+ (docs/losses.md).
        config.kl_estimator = "k3"
        # Mean KL per token that an adaptive kl_coef aims at, in nats; 0: kl_coef is fixed.
        config.kl_target = 0.0
        # Sequences over which an error of 20 % or more changes kl_coef by 20 %.
        config.kl_horizon = 10000
        # Weight of the entropy bonus.
        config.entropy_coef = 0.0
        # How token losses are added up: "token", "sequence" or "constant" (docs/losses.md).
        config.aggregation = "token"
        # Optimizer updates in a row that may be skipped for not being finite; then the run stops.
        config.max_skipped = 5
        return config

    @classmethod
    def needed_roles(cls, config: ConfigDict) -> tuple[str, ...]:
        """The roles that a configuration uses: without a KL there is no reference."""
        roles = tuple(dict.fromkeys((*cls.roles, *cls.workers)))
        return roles if config.kl_coef else tuple(r for r in roles if r != "reference")

    @classmethod
    def role_table(cls, config: ConfigDict) -> dict[str, Role]:
        """What each role that a configuration uses is, by name.

        Raises:
          ConfigError: a role that is neither a standing one nor among ``workers``.
        """
        names = cls.needed_roles(config)
        own = {name: worker for name, worker in cls.workers.items() if name in names}
        return role_table(names, own, cls.__name__)

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The loss of each trained role, picklable: it travels to the role's worker."""
        raise NotImplementedError(f"{cls.__name__} must define losses")

    def step(self, prompts: Batch) -> Batch:
        """One step of the dataflow on a batch of prompts; returns the batch it trained on."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def compute_advantages(self, batch: Batch) -> Batch:
        """The batch (numpy arrays on the controller) with what the updates need added."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_advantages")

    def make_kl_controller(self) -> KLController:
        """The coefficient of the KL in the reward."""
        config = self.config
        if not config.get("kl_target"):
            return FixedKL(config.get("kl_coef", 0.0))
        return AdaptiveKL(config.kl_coef, config.kl_target, config.kl_horizon)

    def minibatches(self, batch: Batch) -> Iterator[Batch]:
        """Mini-batches of whole groups of samples, drawn anew in every epoch."""
        arrays = {k: v for k, v in join(batch).items() if isinstance(v, np.ndarray) and v.ndim}
        rows = arrays["response_mask"].shape[0]
        size = self.config.minibatch or rows
        samples = self.samples if rows % self.samples == 0 else 1
        for epoch in range(self.config.epochs):
            order = np.arange(rows).reshape(-1, samples)
            if size < rows:
                rng = np.random.default_rng([self.seed, self.step_number, epoch])
                order = rng.permutation(order)
            for chosen in order.reshape(-1, size):
                yield {k: v[chosen] for k, v in arrays.items()} if size < rows else arrays

    def log(self, metrics: Future | Mapping[str, Any], role: str = "") -> None:
        """Keep an update's metrics for this step's row; does not wait for a future."""
        if isinstance(metrics, Future):
            role = role or metrics.label.split(".")[0]
        self._logged.append((role, metrics))

    def run_step(self, prompts: Batch, step: int) -> tuple[Batch, dict[str, float]]:
        """Run ``step`` and collect its metrics. Called by the trainer.

        Raises:
          RunError: too many updates in a row were not finite.
        """
        self.step_number = step
        self._logged = []
        self.skipped_this_step = 0
        self.batch = {}
        self.batch = join(self.step(prompts))
        metrics = self.batch_metrics(self.batch) if self.generates else {}
        return self.batch, metrics | self._update_metrics()

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics read off the batch: rewards, KL, lengths."""
        rewards = np.asarray(batch["rewards"], np.float64)
        scored = rewards[~np.isnan(rewards)]
        mask = np.asarray(batch["response_mask"], bool)
        metrics = {
            "reward/mean": float(scored.mean()) if scored.size else math.nan,
            "reward/std": float(scored.std()) if scored.size else math.nan,
            "reward/unscored": 1.0 - scored.size / max(rewards.size, 1),
            "response/length_mean": float(mask.sum(axis=1).mean()),
            "response/truncated": float(np.mean(batch["truncated"])),
        }
        if "ref_logprobs" in batch:
            difference = np.asarray(batch["old_logprobs"]) - np.asarray(batch["ref_logprobs"])
            metrics["kl/reference"] = float(difference[mask].astype(np.float64).mean())
            metrics["kl/coefficient"] = self.kl.coef
        if "values" in batch:
            explained = _explained_variance(batch["values"], batch["returns"], scored_mask(batch))
            metrics["critic/explained_variance"] = float(explained)
        for outcome, count in batch.get("reward_outcomes", {}).items():
            if outcome != "ok" and count:
                metrics[f"reward/{outcome}"] = float(count)
        return metrics

    def _update_metrics(self) -> dict[str, float]:
        by_role: dict[str, list[dict[str, float]]] = {}
        for role, logged in self._logged:
            by_role.setdefault(role, []).append(
                {key: float(x) for key, x in join(logged).items() if np.ndim(x) == 0}
            )
        self._logged = []
        metrics: dict[str, float] = {}
        for role, updates in by_role.items():
            taken = [u for u in updates if not u.get("skipped")]
            for key in updates[0]:
                if key == "token_prob_error":
                    # Only before the first update are the parameters those that generated.
                    metrics["rollout/token_prob_error"] = updates[0][key]
                elif key != "skipped":
                    values = [u[key] for u in taken or updates if key in u]
                    metrics[f"{role}/{key}"] = float(np.mean(values))
            self._count_skipped(role, updates)
            metrics[f"{role}/skipped"] = float(self._skipped.get(role, 0))
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
            if in_a_row >= self.config.max_skipped:
                raise RunError(
                    f"{in_a_row} updates of the {role} in a row were skipped: the last one's loss "
                    f"is {update['loss']} and its gradient norm {update['grad_norm']}; lower "
                    f"{role}.learning_rate, or look at the batch kept in skipped/"
                )

    def state(self) -> dict[str, Any]:
        """What decides the next step beside the workers' arrays, as plain JSON."""
        return {
            "kl": self.kl.state(),
            "skipped": dict(self._skipped),
            "skipped_in_a_row": dict(self._skipped_in_a_row),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        self.kl.restore(state["kl"])
        self._skipped = dict(state["skipped"])
        self._skipped_in_a_row = dict(state["skipped_in_a_row"])


def old_logprobs(batch: Batch) -> Any:
    """The log-probs that ratios are taken against: tempered, not truncated by top-k or top-p."""
    return batch.get("policy_logprobs", batch["logprobs"])


def scored_mask(batch: Batch) -> np.ndarray:
    """bool [rows, length]: response tokens of the rows that have a reward."""
    scored = ~np.isnan(np.asarray(batch["rewards"]))
    return np.asarray(batch["response_mask"], bool) & scored[:, None]
