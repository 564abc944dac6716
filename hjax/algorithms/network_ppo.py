"""PPO for networks of any kind that play JAX environments."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.controller import join
from hjax.roles import Role
from hjax.rules import Key, above, at_least, between

# Keys of every algorithm that plays JAX environments by perceptrons.
PLAYING_KEYS: Mapping[str, Key] = {
    "environment": Key(
        "cartpole", "JAX environment: cartpole, pendulum, or your own as path.py:Class"
    ),
    "environments": Key(16, "environments that are played side by side", at_least(1)),
    "hidden_size": Key(64, "width of the perceptrons' hidden layers", at_least(1)),
    "hidden_layers": Key(2, "hidden layers of the perceptrons", at_least(1)),
    "gamma": Key(0.99, "discount per step", between(0, 1)),
    "eval_steps": Key(500, "most steps of an evaluation's episodes", at_least(1)),
}


@dataclasses.dataclass(frozen=True)
class ActionLoss:
    """PPO's clipped loss of actions (Schulman et al. 2017, arXiv 1707.06347), a number per row."""

    clip: float
    entropy_coef: float
    needs = ("observations", "actions", "logprobs", "advantages")

    def __call__(self, worker: Any, model: Any, batch: Batch, keys: Any) -> Any:
        """Losses and statistics [rows] of a worker with ``log_prob`` and ``entropy``."""
        logprobs = worker.log_prob(model, batch["observations"], batch["actions"])
        log_ratio = logprobs - batch["logprobs"]
        ratio, advantages = jnp.exp(jnp.minimum(log_ratio, 20.0)), batch["advantages"]
        clipped = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
        losses = -jnp.minimum(ratio * advantages, clipped * advantages)
        entropy = worker.entropy(model, batch["observations"])
        return losses - self.entropy_coef * entropy, {
            "entropy": entropy,
            "clip_fraction": (jnp.abs(ratio - 1) > self.clip).astype(jnp.float32),
            "kl": ratio - 1 - log_ratio,
        }


@dataclasses.dataclass(frozen=True)
class ReturnLoss:
    """Half the squared error of predicted returns."""

    needs = ("observations", "value_targets")

    def __call__(self, worker: Any, model: Any, batch: Batch, keys: Any) -> jax.Array:
        """Losses [rows] of a worker with ``value``."""
        error = worker.value(model, batch["observations"]) - batch["value_targets"]
        return 0.5 * error**2


class NetworkPPO(Algorithm):
    """PPO with a policy and a value network, both perceptrons unless ``workers`` says otherwise.

    A subclass with other classes for ``actor`` (a ``PlayingWorker`` with ``log_prob`` and
    ``entropy``) and ``critic`` (a ``NetworkWorker`` with ``value``) has any other networks.
    """

    sequences = False
    workers = {
        "actor": Role("hjax.workers:MLPPolicy", trained=True),
        "critic": Role("hjax.workers:MLPValue", trained=True),
    }
    shared_keys = ("minibatch", "epochs", "entropy_coef", "max_skipped")
    keys = {
        **PLAYING_KEYS,
        "play_steps": Key(64, "steps of each environment in a training step", at_least(1)),
        "gae_lambda": Key(0.95, "lambda of generalised advantage estimation", between(0, 1)),
        "clip": Key(0.2, "how far a ratio may be from 1", above(0)),
    }
    defaults = {"minibatch": 128, "epochs": 4}

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """The clipped loss, and the squared error of returns."""
        return {"actor": ActionLoss(config.clip, config.entropy_coef), "critic": ReturnLoss()}

    @classmethod
    def updates_per_step(cls, config: ConfigDict) -> Mapping[str, int]:
        """As many of the actor as of the critic."""
        rows = config.environments * config.play_steps
        updates = config.epochs * max(rows // (config.minibatch or rows), 1)
        return {"actor": updates, "critic": updates}

    @classmethod
    def describe_step(cls, config: ConfigDict) -> dict[str, int]:
        """Steps of environments, and updates."""
        rows = config.environments * config.play_steps
        updates = cls.updates_per_step(config)["actor"]
        return {"environment_steps": rows, "updates_per_step": updates}

    def collect(self, prompts: Batch) -> Any:
        """Play."""
        return self.actor.play(prompts["step"], self.config.play_steps)

    def learn(self, batch: Any) -> Batch:
        """Advantages, then updates of mini-batches of single steps of environments."""
        values = self.critic.run("value", self.critic.apply(_observations, batch))
        after = self.critic.run("value", self.critic.apply(_next_observations, batch))
        batch = self.compute_advantages(join(batch, values=values, next_values=after))
        for minibatch in self.minibatches(batch):
            self.log(self.critic.update(minibatch))
            self.log(self.actor.update(minibatch))
        return batch

    def compute_advantages(self, batch: Batch) -> Batch:
        """Advantages (GAE, Schulman et al. 2016, arXiv 1506.02438) and targets of the critic.

        Where an episode is cut by its limit, the value of its last state stands for the rest.

        Args:
          batch: arrays [environments, steps, ...].

        Returns:
          arrays [environments * steps, ...], with ``advantages`` of mean 0 and standard deviation 1
          and ``value_targets``.
        """
        config, live = self.config, 1.0 - batch["terminated"]
        goes_on = 1.0 - (batch["terminated"] | batch["truncated"])
        errors = batch["rewards"] + config.gamma * live * batch["next_values"] - batch["values"]
        advantages, later = np.zeros_like(errors), np.zeros_like(errors[:, 0])
        for t in reversed(range(errors.shape[1])):
            later = errors[:, t] + config.gamma * config.gae_lambda * goes_on[:, t] * later
            advantages[:, t] = later
        targets = advantages + batch["values"]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        made = batch | {"advantages": advantages, "value_targets": targets}
        return {
            key: np.asarray(x, x.dtype if x.dtype != np.float64 else np.float32).reshape(
                -1, *x.shape[2:]
            )
            for key, x in made.items()
        }

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """``reward/mean``: mean return of the episodes that ended in this step."""
        return episode_metrics(batch["returns"]) | {
            "critic/explained_variance": float(
                1 - np.var(batch["value_targets"] - batch["values"])
                / max(float(np.var(batch["value_targets"])), 1e-12)
            )
        }  # fmt: skip

    def evaluate(self, held_out: Any) -> dict[str, float]:
        """``eval/reward``: mean return of an episode in each environment, without exploration."""
        returns = join(self.actor.evaluate_episodes(self.config.eval_steps))["returns"]
        return {"reward": float(np.mean(returns, dtype=np.float64))}


def _observations(batch: Batch) -> Any:
    return batch["observations"]


def _next_observations(batch: Batch) -> Any:
    return batch["next_observations"]


def episode_metrics(returns: np.ndarray) -> dict[str, float]:
    """Mean and standard deviation of the returns of episodes that ended; NaN where none did.

    Args:
      returns: float, NaN where no episode ended.
    """
    ended = np.asarray(returns, np.float64)[~np.isnan(returns)]
    mean, std = (float(ended.mean()), float(ended.std())) if ended.size else (np.nan, np.nan)
    return {
        "reward/mean": mean,
        "reward/std": std,
        "reward/unscored": 0.0,
        "episode/ended": float(ended.size),
    }
