"""Online difficulty filtering: prompts that are always or never solved are passed over.

A group of equal rewards has no gradient, and a prompt whose groups were so is likely to give such a
group again. Running averages of each prompt's rewards say which those are; nothing is generated
for a prompt that is passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hjax.batches import CHOICE, concatenate_batches, sample_rows, select_rows
from hjax.errors import ConfigError, RunError
from hjax.rules import Key, Rule, at_least, below_one

# Most prompts that are looked at for one that is taken.
LOOKED_AT = 8

KEYS = {
    "difficulty": Key(
        (),
        "two bounds: prompts whose running average reward is not between them are passed over when "
        "prompts are drawn; `(0.0, 1.0)` drops what is always wrong or always right; empty: none",
        Rule("empty, or two numbers in rising order", lambda x: not x or _bounds(x)),
    ),
    "difficulty_decay": Key(
        0.5, "share of a prompt's running average that its next rewards leave", below_one()
    ),
    "difficulty_again": Key(
        50,
        "steps after which a prompt that was passed over is answered again, as the policy has "
        "changed; 0: never",
        at_least(0),
    ),
}


def _bounds(given: Any) -> bool:
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        return False
    return low < high


class PromptRewards(NamedTuple):
    """Rewards of the prompts that a step has learned from.

    Attributes:
      version: of the weights after it.
      rows: of the training data, one per prompt.
      means: of each prompt's scored responses.
    """

    version: int
    rows: list[int]
    means: list[float]


class DifficultyFilter:
    """Running averages of rewards by prompt, and the choice of prompts by them.

    What a step has learned counts for prompts that later weights answer. So a batch that is
    generated ahead of learning is chosen by what its weights have learned from, and an interrupted
    run chooses as one that was not.

    Args:
      low, high: bounds of the averages; prompts at a bound or beyond are passed over.
      decay, again: the keys ``difficulty_decay`` and ``difficulty_again``.
    """

    def __init__(self, low: float, high: float, decay: float, again: int):
        self._low, self._high, self._decay, self._again = low, high, decay, again
        # By row of the data: average, and the version at which it was last answered.
        self._averages: dict[int, tuple[float, int]] = {}
        self._later: list[PromptRewards] = []  # not counted yet, by rising version
        self._lock = threading.Lock()

    def add(self, version: int, batch: Mapping[str, Any]) -> None:
        """Count the rewards of a step's batch.

        Args:
          version: of the weights after the step.
          batch: with ``rewards`` and ``choice``.

        Raises:
          RunError: one of the two is missing.
        """
        found = rewards_by_prompt(batch, "algorithm.difficulty")
        means = {row: float(np.mean(x)) for row, x in found.items() if len(x)}
        with self._lock:
            self._later.append(PromptRewards(version, list(means), list(means.values())))

    def choose(self, order: Any, count: int) -> dict[str, Any]:
        """The next prompts of the order that are not passed over.

        After ``LOOKED_AT`` times as many have been looked at, those that were passed over first
        fill up the batch.

        Returns:
          ``count`` prompts, whose ``choice`` says ``version`` and how many were ``easy`` and
          ``hard``: passed over for this batch.
        """
        version = order.version
        averages = self._at(version)
        taken: list[dict[str, Any]] = []
        passed: list[dict[str, Any]] = []
        found, looked_at, sides = 0, 0, {"easy": 0, "hard": 0}
        while found < count and looked_at < LOOKED_AT * count:
            pool = order.next(count - found)
            verdicts = [self._side(averages.get(row), version) for row in pool[CHOICE]["row"]]
            for side in sides:
                sides[side] += verdicts.count(side)
            keep = np.array([not verdict for verdict in verdicts])
            taken.append(select_rows(pool, np.flatnonzero(keep)))
            passed.append(select_rows(pool, np.flatnonzero(~keep)))
            found, looked_at = found + int(keep.sum()), looked_at + len(keep)
        made = select_rows(concatenate_batches(taken + passed), np.arange(count))
        said: dict[str, float] = {"version": version, **sides, "filled": count - found}
        return made | {CHOICE: made[CHOICE] | {k: [v] * count for k, v in said.items()}}

    def _side(self, known: tuple[float, int] | None, version: int) -> str:
        """``easy`` or ``hard`` of a prompt that is passed over, else empty."""
        if known is None or (self._again and version - known[1] >= self._again):
            return ""
        return "hard" if known[0] <= self._low else "easy" if known[0] >= self._high else ""

    def _at(self, version: int) -> dict[int, tuple[float, int]]:
        """The averages of what the weights of a version have learned from. Versions rise."""
        with self._lock:
            while self._later and self._later[0].version <= version:
                step = self._later.pop(0)
                for row, mean in zip(step.rows, step.means, strict=True):
                    before = self._averages.get(row, (mean, 0))[0]
                    average = self._decay * before + (1 - self._decay) * mean
                    self._averages[row] = average, step.version
            return dict(self._averages)

    def state(self) -> dict[str, Any]:
        """The averages for a checkpoint, as plain JSON."""
        with self._lock:
            rows = {str(row): list(known) for row, known in self._averages.items()}
            return {"averages": rows, "later": [list(step) for step in self._later]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a ``state()``."""
        with self._lock:
            known = state["averages"].items()
            self._averages = {int(row): (float(mean), int(at)) for row, (mean, at) in known}
            self._later = [PromptRewards(*step) for step in state["later"]]


def make_difficulty_filter(config: ConfigDict) -> DifficultyFilter | None:
    """The filter of an algorithm's keys; None without bounds."""
    if not config.get("difficulty"):
        return None
    try:
        low, high = map(float, config.difficulty)
    except (TypeError, ValueError):
        raise ConfigError(
            f"config.algorithm.difficulty={config.difficulty}: must be two numbers, or empty"
        ) from None
    return DifficultyFilter(low, high, config.difficulty_decay, config.difficulty_again)


def rewards_by_prompt(batch: Mapping[str, Any], what: str) -> dict[int, list[float]]:
    """By row of the training data the scored rewards of its responses, in the batch's order.

    Args:
      batch: of a step, with ``rewards`` and ``choice``.
      what: needs them, for the error message.

    Raises:
      RunError: one of the two is missing.
    """
    rows = (batch.get(CHOICE) or {}).get("row")
    missing = "choice" if rows is None else "" if "rewards" in batch else "rewards"
    if rows is None or missing:
        raise RunError(
            f"{what} counts rewards by prompt, and the batch that `learn` has returned lacks "
            f"{missing!r}: keep that entry of what was generated"
        )
    rewards = np.asarray(batch["rewards"], np.float64)
    found: dict[int, list[float]] = {}
    for at in sample_rows(batch).tolist():
        known = found.setdefault(int(rows[at]), [])
        if not np.isnan(rewards[at]):
            known.append(float(rewards[at]))
    return found
