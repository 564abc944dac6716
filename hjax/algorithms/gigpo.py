"""GiGPO: actions that were taken in the same state are compared with each other.

Feng et al. 2025, arXiv 2505.10978. A second advantage beside GRPO's, without a critic and without
further rollouts; docs/algorithms/episodes.md has the formulas and where implementations differ.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from hjax.algorithms.advantages import token_rewards
from hjax.algorithms.algorithm import Batch
from hjax.algorithms.grpo import GRPO
from hjax.algorithms.turn_credit import turn_returns
from hjax.errors import ConfigError, RunError
from hjax.rules import Key, at_least, one_of

_LOG = logging.getLogger(__name__)
# Share of turns with others of their state below which a step's comparison is thin, and for how
# many steps in a row before it is said.
FEW_SHARED, SAID_AFTER = 0.2, 5
STATISTICS = ("trajectories", "turns")
# One program: by themselves its loops would be compiled anew in every step.
_turn_returns = jax.jit(turn_returns, static_argnames="gamma")


class GiGPO(GRPO):
    """GRPO's advantage of the episode, plus one among turns of the group in the same state."""

    keys = {
        "step_weight": Key(
            1.0, "weight of the advantage among turns in the same state; 0: GRPO", at_least(0)
        ),
        "invalid_penalty": Key(
            0.1,
            "taken from the score and the return of a turn whose action the environment called not "
            "valid, in rewards; after discounting",
            at_least(0),
        ),
        "statistics": Key(
            "trajectories",
            "of what the episodes' mean and deviation are: of trajectories, one value each, or of "
            "turns, so that long episodes weigh more (verl-agent)",
            one_of(*STATISTICS),
        ),
    }
    defaults = {"turn_discount": 0.95, "normalise": "none", "kl_coef": 0.01}

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._anchor_metrics: dict[str, float] = {}
        self._thin, self._counted = 0, 0

    @classmethod
    def check(cls, config: ConfigDict) -> None:
        """Refuse what compares no turns."""
        super().check(config)
        if config.turn_discount < 0 or config.baseline != "group":
            raise ConfigError(
                f"config.algorithm.turn_discount={config.turn_discount}, baseline="
                f"{config.baseline!r}: {cls.__name__} compares discounted returns of turns within "
                "their group: use turn_discount from 0 to 1 (0.95), and baseline='group'"
            )

    def _advantages(
        self, batch: Batch, scores: np.ndarray, kl: np.ndarray | None, rows: np.ndarray
    ) -> Any:
        config = self.config
        turns = Turns.of(batch, self.samples)
        dense: Any = self.token_scores(batch)
        by_token: Any = turns.by_token
        own_scores: Any = scores
        rewards = token_rewards(own_scores, batch["response_mask"], dense=dense)
        returns = np.asarray(_turn_returns(rewards, by_token, gamma=config.turn_discount))
        options: dict[str, Any] = {
            "deviation": config.normalise == "std",
            "epsilon": config.epsilon,
        }
        found = turns.episode_advantages(
            scores,
            penalty=config.invalid_penalty,
            by_turn=config.statistics == "turns",
            **options,
        )
        found = found + config.step_weight * turns.state_advantages(
            turns.values(returns) - config.invalid_penalty * turns.invalid,
            scored=~np.isnan(scores),
            **options,
        )
        self._anchor_metrics = turns.metrics()
        self._notice(self._anchor_metrics)
        return turns.spread(found)

    def _notice(self, metrics: Mapping[str, float]) -> None:
        """Say it, once, where states hardly meet or their anchors look like step counters."""
        thin = metrics["anchor/shared"] < FEW_SHARED
        self._thin = self._thin + 1 if thin else 0
        if self._thin == SAID_AFTER:
            _LOG.warning(
                "in %d steps in a row less than %.0f %% of the turns (anchor/shared, now %.3g) met "
                "a state that another turn of the group met: their comparison hardly counts; "
                "Observation.anchor should be the state without history, counters and hints, and "
                "rollout.samples larger",
                SAID_AFTER, 100 * FEW_SHARED, metrics["anchor/shared"],
            )  # fmt: skip
        counted = metrics.get("anchor/turn_numbers") == 1 and metrics["anchor/shared"] > 0
        self._counted = self._counted + 1 if counted else 0
        if self._counted == SAID_AFTER:
            _LOG.warning(
                "in %d steps in a row no anchor was met at two different turns: does "
                "Observation.anchor hold a step counter? Then the same state at another turn is "
                "not compared; leave the counter out",
                SAID_AFTER,
            )

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """``anchor/shared``, the share of turns in a state that another turn of the group met, and
        ``anchor/turn_numbers``, at how many different turns such a state was met, on average."""
        return super().batch_metrics(batch) | self._anchor_metrics

    def state(self) -> dict[str, Any]:
        """With how long what is warned of has lasted."""
        return super().state() | {"anchors": {"thin": self._thin, "counted": self._counted}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        super().restore(state)
        self._thin, self._counted = (int(state["anchors"][name]) for name in ("thin", "counted"))


class Turns:
    """The turns of a batch of episodes, one after another.

    Args:
      by_token: int [episodes, length], the turn of each drawn token, else -1.
      anchor: int [episodes, length], the state in which that turn was taken, numbered within the
        group; -1: none.
      invalid: bool [episodes, length], whether its action was not valid.
      samples: episodes of a group, adjacent rows.

    Attributes:
      episode: int [turns], its episode; ``number``: int [turns], its number there.
      state: int [turns], equal for turns of one group in the same state; -1: no state.
      invalid: float [turns], 1 where the action was not valid.
    """

    def __init__(self, by_token: np.ndarray, anchor: np.ndarray, invalid: np.ndarray, samples: int):
        self.by_token, self._samples = by_token, samples
        self._tokens = np.nonzero(by_token >= 0)
        names = np.stack([self._tokens[0], by_token[self._tokens]], axis=1)
        found, first, self._turn = np.unique(names, axis=0, return_index=True, return_inverse=True)
        self._turn = self._turn.reshape(-1)
        self.episode, self.number = found[:, 0], found[:, 1]
        self._first = tuple(axis[first] for axis in self._tokens)
        self.invalid = invalid[self._first].astype(np.float64)
        anchors = anchor[self._first]
        most = int(anchors.max(initial=0)) + 1
        self.state = np.where(anchors < 0, -1, self.episode // samples * most + anchors)

    @classmethod
    def of(cls, batch: Mapping[str, Any], samples: int) -> Turns:
        """The turns of a batch with a row per episode.

        Raises:
          RunError: it has no episodes, or no turn of it has an anchor.
        """
        missing = [key for key in ("turn", "anchor", "invalid_action") if key not in batch]
        if missing:
            raise RunError(
                f"GiGPO compares turns of episodes, and the batch lacks {', '.join(missing)}: set "
                "environment.function, or a data.task that is played over several turns"
            )
        drawn = np.asarray(batch["response_mask"], bool)
        turn = np.where(drawn, np.asarray(batch["turn"]), -1)
        anchor = np.asarray(batch["anchor"])
        if not (anchor[turn >= 0] >= 0).any():
            raise RunError(
                "GiGPO compares turns in the same state, and the environment says no state: give "
                "its observations an anchor (hjax.Observation)"
            )
        return cls(turn, anchor, np.asarray(batch["invalid_action"], bool), samples)

    def values(self, by_token: np.ndarray) -> np.ndarray:
        """float64 [turns], of an array [episodes, length] that is equal on a turn's tokens."""
        return np.asarray(by_token)[self._first].astype(np.float64)

    def spread(self, by_turn: np.ndarray) -> np.ndarray:
        """float32 [episodes, length]: of each drawn token what its turn has; 0 elsewhere."""
        made = np.zeros(self.by_token.shape, np.float32)
        made[self._tokens] = by_turn[self._turn]
        return made

    def episode_advantages(
        self, scores: np.ndarray, *, penalty: float, by_turn: bool, deviation: bool, epsilon: float
    ) -> np.ndarray:
        """(R - mean) / F of each turn: R is its episode's score, less the penalty of its action.

        Args:
          scores: float [episodes], NaN unscored: these get 0 and leave the statistics.
          penalty: of actions that are not valid.
          by_turn: whether mean and deviation are over all turns of the group; else over its
            episodes, each with the mean of its turns.
          deviation: F is the standard deviation (over n - 1) plus epsilon; else 1.

        Returns:
          float64 [turns]; 0 in groups of fewer than two scored episodes.
        """
        own = np.asarray(scores, np.float64)[self.episode] - penalty * self.invalid
        scored = ~np.isnan(own)
        group = self.episode // self._samples
        values, groups = own[scored], group[scored]
        count = np.bincount(self.episode[scored], minlength=len(scores))
        if not by_turn:
            sums = np.bincount(self.episode[scored], own[scored], len(scores))
            played = np.flatnonzero(count)
            values, groups = sums[played] / count[played], played // self._samples
        episodes = np.bincount(np.flatnonzero(count) // self._samples, minlength=group.max() + 1)
        options: dict[str, Any] = {"deviation": deviation, "epsilon": epsilon}
        found = _compared(np.nan_to_num(own), group, values, groups, **options)
        return np.where(scored & (episodes[group] >= 2), found, 0.0)

    def state_advantages(
        self, returns: np.ndarray, *, scored: np.ndarray, deviation: bool, epsilon: float
    ) -> np.ndarray:
        """(G - mean) / F of each turn among those of its group in the same state.

        Args:
          returns: float [turns], G.
          scored: bool [episodes]; others leave the statistics and get 0.
          deviation, epsilon: as of ``episode_advantages``.

        Returns:
          float64 [turns]; 0 where no other turn was taken in that state.
        """
        there = (self.state >= 0) & scored[self.episode]
        if not there.any():
            return np.zeros(len(returns))
        own, state = returns[there], self.state[there]
        found = np.zeros(len(returns))
        options: dict[str, Any] = {"deviation": deviation, "epsilon": epsilon}
        found[there] = _compared(own, state, own, state, **options)
        return found

    def metrics(self) -> dict[str, float]:
        """``anchor/shared`` and, where states are met again, ``anchor/turn_numbers``."""
        _, of, counts = np.unique(self.state, return_inverse=True, return_counts=True)
        shared = (counts[of] >= 2) & (self.state >= 0)
        found = {"anchor/shared": float(shared.mean()) if shared.size else 0.0}
        if shared.any():
            pairs = np.stack([self.state[shared], self.number[shared]], axis=1)
            states = len(np.unique(self.state[shared]))
            found["anchor/turn_numbers"] = len(np.unique(pairs, axis=0)) / states
        return found


def _compared(
    own: np.ndarray,
    of: np.ndarray,
    values: np.ndarray,
    groups: np.ndarray,
    *,
    deviation: bool,
    epsilon: float,
) -> np.ndarray:
    """(own - mean) / F, of the ``values`` of each one's group; F is 1 where these are all equal.

    Args:
      own: float [n], of the groups ``of`` int [n]; ``values`` float [m], of ``groups`` int [m].
    """
    size = int(max(of.max(initial=0), groups.max(initial=0))) + 1
    count = np.bincount(groups, minlength=size)
    mean = np.bincount(groups, values, size) / np.maximum(count, 1)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, groups, values)
    np.maximum.at(high, groups, values)
    mean = np.where(low == high, low, mean)  # which may be rounded
    above = own - mean[of]
    if not deviation:
        return above
    squares = np.bincount(groups, (values - mean[groups]) ** 2, size)
    spread = np.sqrt(squares / np.maximum(count - 1, 1)) + epsilon
    return above / np.where(low == high, 1.0, spread)[of]
