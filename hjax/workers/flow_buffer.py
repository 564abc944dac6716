"""OP-GRPO's replay buffer: the best paths of each condition, ageing, saved with the checkpoint."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hjax.environments.flow_problems import find_problem
from hjax.sharding.protocols import protocol
from hjax.workers.replay import ReplayBuffer
from hjax.workers.worker import WorkerContext


class BestPaths(ReplayBuffer):
    """Keeps ``algorithm.replayed`` rows for each condition, those of the best rewards.

    A reward counts ``decay`` to the power of its age (in steps) when a new row asks for its place;
    a row older than ``algorithm.max_age`` is no longer there.
    """

    def __init__(self, context: WorkerContext):
        self.per_condition = int(context.options.algorithm.replayed)
        super().__init__(context)
        self.max_age = int(context.options.algorithm.max_age)
        self.decay = float(context.options.algorithm.decay)

    def places(self) -> int:
        """So many for each of the problem's conditions."""
        return find_problem(self.context.options.algorithm.problem).conditions * self.per_condition

    @protocol("ALL_TO_ALL")
    def offer(self, batch: Mapping[str, Any], now: int, kind: str = "") -> int:
        """Admit rows that are better than the worst of their condition; returns how many.

        Args:
          batch: rows with ``conditions`` int32, ``rewards`` float and ``versions`` int32 (the step
            that made them), best rows first where several are offered for a place.
          now: number of the step.
          kind: see ``store``.
        """
        arrays = {name: np.asarray(x) for name, x in batch.items() if np.ndim(x)}
        if not len(arrays["conditions"]):
            return 0
        self._check_alike(arrays, {}, kind)
        self.kind = kind
        for name, x in arrays.items():
            if name not in self.arrays:
                self.arrays[name] = np.zeros((self.capacity, *x.shape[1:]), x.dtype)
        if not self.stored:
            self.arrays["versions"][:] = -(2**30)  # places that nothing holds
        admitted = 0
        for row, condition in enumerate(arrays["conditions"]):
            places = self._places(int(condition))
            age = now - self.arrays["versions"][places]
            worth = self.arrays["rewards"][places] * self.decay ** np.minimum(age, self.max_age)
            worth = np.where(age > self.max_age, -np.inf, worth)
            worst = places[int(worth.argmin())]
            if arrays["rewards"][row] >= worth.min():
                for name, x in arrays.items():
                    self.arrays[name][worst] = x[row]
                admitted += 1
        self.stored += admitted
        return admitted

    def _places(self, condition: int) -> np.ndarray:
        return condition * self.per_condition + np.arange(self.per_condition)

    @protocol("ALL_TO_ALL")
    def look_up(self, conditions: np.ndarray, now: int) -> dict[str, Any]:
        """The rows that are there for conditions, and which of them are.

        Args:
          conditions: int [rows], each asked for its rows: [rows * replayed] come back, row by row.
          now: number of the step.

        Returns:
          ``there`` bool [rows * replayed], and, once there is any row, the arrays of all.
        """
        places = np.concatenate([self._places(int(c)) for c in conditions])
        if not self.stored:
            return {"there": np.zeros(len(places), bool)}
        there = now - self.arrays["versions"][places] <= self.max_age
        return {"there": there, **self.take(places)}
