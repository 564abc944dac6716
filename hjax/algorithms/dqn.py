"""DQN by operators over futures: store what is played, replay it, train."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from hjax.algorithms.algorithm import Algorithm, Batch
from hjax.algorithms.flow import calls, concurrently, replay, store
from hjax.algorithms.network_ppo import PLAYING_KEYS, episode_metrics
from hjax.controller import join
from hjax.roles import Role
from hjax.rules import Key, at_least, between


@dataclasses.dataclass(frozen=True)
class QLoss:
    """Huber's loss of the temporal difference (Mnih et al. 2015)."""

    needs = ("observations", "actions", "targets")

    def __call__(self, worker: Any, model: Any, batch: Batch, keys: Any) -> Any:
        """Losses and the mean value of the actions taken, [rows]."""
        every = worker.action_values(model, batch["observations"])
        taken = jnp.take_along_axis(every, batch["actions"][:, None], axis=1)[:, 0]
        error = jnp.abs(taken - batch["targets"])
        losses = jnp.where(error < 1, 0.5 * error**2, error - 0.5)
        return losses, {"action_value": taken}


def transitions(batch: Batch) -> Batch:
    """Rows [environments * steps, ...] of what ``play`` returns, as a buffer keeps them."""
    names = ("observations", "actions", "next_observations", "rewards", "terminated")
    return {name: batch[name].reshape(-1, *batch[name].shape[2:]) for name in names}


def q_targets(batch: Batch, values: jax.Array, gamma: float) -> Batch:
    """What the values of a batch's actions should be, by the target network's.

    Args:
      batch: with ``observations``, ``actions``, ``rewards`` and ``terminated``, [rows, ...].
      values: float [rows, actions], of the next observations.
      gamma: discount.

    Returns:
      ``observations``, ``actions`` and ``targets`` float [rows].
    """
    live = 1.0 - batch["terminated"]
    targets = batch["rewards"] + gamma * live * jnp.max(values, axis=1)
    return {"observations": batch["observations"], "actions": batch["actions"], "targets": targets}


class DQN(Algorithm):
    """Deep Q-learning (Mnih et al. 2015, Nature 518) with a replay buffer and a target network.

    A step is ``rounds`` rounds of ``concurrently``: one call of ``play`` whose rows are stored,
    then ``updates`` updates on replayed rows.
    """

    sequences = False
    workers = {
        "actor": Role("hjax.workers:MLPQFunction", trained=True),
        "target": Role("hjax.workers:MLPQFunction", starts_from="actor"),
        "buffer": Role("hjax.workers:ReplayBuffer", host=True),
    }
    keys = {
        **PLAYING_KEYS,
        "play_steps": Key(4, "steps of each environment in a round", at_least(1)),
        "rounds": Key(50, "rounds in a training step", at_least(1)),
        "updates": Key(4, "updates in a round", at_least(1)),
        "replay_batch": Key(128, "rows of an update", at_least(1)),
        "replay_capacity": Key(50000, "rows that the replay buffer keeps", at_least(1)),
        "warm_up_rounds": Key(
            10, "first rounds, which act at random and are stored alone", at_least(1)
        ),
        "target_every": Key(25, "rounds between moves of the target network", at_least(1)),
        "target_share": Key(1.0, "how far it moves to the trained network", between(0, 1)),
        "epsilon": Key(0.05, "chance of a random action once it has fallen", between(0, 1)),
        "epsilon_rounds": Key(1000, "rounds over which it falls from 1", at_least(1)),
    }

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        own = self.config
        self.played = store(calls(self._play), self.buffer)
        self.trained = replay(self.buffer, own.replay_batch)
        self.rounds = concurrently(self.played, self.trained, weights=[1, own.updates])

    @classmethod
    def losses(cls, config: ConfigDict, max_response_length: int) -> dict[str, Any]:
        """Huber's loss."""
        return {"actor": QLoss()}

    @classmethod
    def updates_per_step(cls, config: ConfigDict) -> Mapping[str, int]:
        """Of a step after the warm-up."""
        return {"actor": config.rounds * config.updates}

    @classmethod
    def describe_step(cls, config: ConfigDict) -> dict[str, int]:
        """Steps of environments, and updates."""
        rows = config.environments * config.play_steps * config.rounds
        return {"environment_steps": rows, "updates_per_step": config.rounds * config.updates}

    def _play(self, number: int) -> Any:
        """The future of the rows of a round, numbered from 0."""
        own = self.config
        fallen = min(max(number - own.warm_up_rounds, 0) / own.epsilon_rounds, 1.0)
        epsilon = 1.0 - (1.0 - own.epsilon) * fallen
        batch = self.actor.play(number, own.play_steps, epsilon=epsilon)
        self.returns.append(self.actor.apply(_returns, batch))
        return self.actor.apply(transitions, batch)

    def _train(self, batch: Any) -> None:
        """One update on a replayed batch."""
        values = self.target.run("action_values", self.target.apply(_next, batch))
        self.log(self.actor.update(self.actor.apply(q_targets, batch, values, self.config.gamma)))

    def step(self, prompts: Batch) -> Batch:
        """So many rounds."""
        self.returns: list[Any] = []
        own = self.config
        for _ in range(own.rounds):
            if self.played.position < own.warm_up_rounds:
                next(self.played)
                continue
            _, *replayed = next(self.rounds)
            for batch in replayed:
                self._train(batch)
            if self.rounds.position % own.target_every == 0:
                self.target.interpolate_weights(self.actor.weights(), own.target_share).result()
        return {"returns": jnp.concatenate([x["returns"] for x in map(join, self.returns)])}

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """``reward/mean``: mean return of the episodes that ended in this step."""
        return episode_metrics(batch["returns"])

    def evaluate(self, held_out: Any) -> dict[str, float]:
        """``eval/reward``: mean return of an episode in each environment, without exploration."""
        returns = join(self.actor.evaluate_episodes(self.config.eval_steps))["returns"]
        return {"reward": float(returns.mean())}

    def state(self) -> dict[str, Any]:
        """Positions of the flows."""
        flows = {"played": self.played.state(), "rounds": self.rounds.state()}
        return super().state() | flows

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        self.rounds.restore(state["rounds"])
        self.played.restore(state["played"])


def _returns(batch: Batch) -> Batch:
    return {"returns": batch["returns"].reshape(-1)}


def _next(batch: Batch) -> Any:
    return batch["next_observations"]
