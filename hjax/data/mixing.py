"""Mixing prompts of several data sources by weight."""

from collections.abc import Mapping, Sequence

import numpy as np

from hjax.data.dataset import PromptSampler, check_sampler_state
from hjax.errors import ConfigError, DataError


class MixedSampler:
    """Draws each step's prompts so that every data source keeps its share.

    The next prompt comes from the source that is furthest behind its share, so every step is close
    to the shares. Each source is shuffled by a `PromptSampler` of its own, so a small source
    repeats more often.

    Args:
      sources: the source of each prompt of the dataset.
      weights: by source, above 0; a source's share is its weight over their sum.
      per_step: prompts per step.
      seed: of the shuffles.

    Raises:
      ConfigError: a source of the data without a weight, or a weight without a source.
    """

    def __init__(
        self, sources: Sequence[str], weights: Mapping[str, float], per_step: int, seed: int
    ):
        there = list(dict.fromkeys(map(str, sources)))
        for name in there:
            if name not in weights:
                raise ConfigError(f"config.data.weights has no weight for data_source {name!r}")
        for name in weights:
            if name not in there:
                raise ConfigError(
                    f"config.data.weights: no row has data_source {name!r}; there are "
                    f"{', '.join(there)}"
                )
        self.size, self.per_step, self.seed = len(sources), per_step, seed
        total = sum(weights.values())
        self._shares = np.array([weights[name] / total for name in there])
        of = np.array([there.index(str(name)) for name in sources])
        self._rows = [np.flatnonzero(of == i) for i in range(len(there))]
        self._orders = [PromptSampler(len(rows), 1, seed + i) for i, rows in enumerate(self._rows)]

    @property
    def position(self) -> int:
        """Prompts taken since the start."""
        return sum(order.position for order in self._orders)

    def next(self) -> np.ndarray:
        """Indices of the next step's prompts, int64 [per_step]."""
        taken = np.array([order.position for order in self._orders], float)
        found = []
        for number in range(self.position + 1, self.position + 1 + self.per_step):
            source = int(np.argmax(self._shares * number - taken))  # the one furthest behind
            taken[source] += 1
            [index] = self._orders[source].next()
            found.append(self._rows[source][index])
        return np.array(found)

    def state(self) -> dict[str, int]:
        """The samplers' positions for a checkpoint: plain ints."""
        return {"size": self.size, "seed": self.seed} | {
            f"position_{i}": order.position for i, order in enumerate(self._orders)
        }

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue from a `state`; DataError if its sources, data size or seed differ."""
        mine = self.state()
        same = not isinstance(state, Mapping) or state.keys() == mine.keys()
        if same:
            found = check_sampler_state(state, list(mine))
        if not same or any(found[key] != mine[key] for key in ("size", "seed")):
            raise DataError(
                "the checkpoint's prompt order is of other sources or another seed; resume with "
                "the same data and seed, or use a new workdir"
            )
        for i, order in enumerate(self._orders):
            order.position = found[f"position_{i}"]
