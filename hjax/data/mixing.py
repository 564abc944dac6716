"""Mixing prompts, or examples, of several data sources by weight."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from hjax.data.dataset import Dataset, PromptSampler, check_sampler_state
from hjax.data.read_options import parse_mixture, parse_source_weights
from hjax.data.sources import MIXTURE
from hjax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Mixing:
    """Which source each row of the data has, and the sources' weights.

    Attributes:
      sources: of the rows.
      weights: by source, above 0.
      key: of the config, that has the weights.
    """

    sources: Sequence[str]
    weights: Mapping[str, float]
    key: str

    @classmethod
    def from_config(cls, data: Any, dataset: Dataset) -> Self | None:
        """The mixing of the config's section `data`; None if all rows are equally frequent.

        Raises:
          ConfigError: `data.weights` without the column `data_source`, or a source of the data
            without a weight, or a weight without a source.
        """
        if data.mixture:
            weights, column = parse_mixture(data.mixture)[1], MIXTURE
        elif data.weights:
            weights, column = parse_source_weights(data.weights), "data_source"
        else:
            return None
        if column not in dataset.columns:
            raise ConfigError(
                f"config.data.weights={data.weights!r} weighs the column data_source, which "
                f"this data has not; it has {', '.join(dataset.columns)} (config.data.columns "
                "renames)"
            )
        key = "config.data.mixture" if data.mixture else "config.data.weights"
        return cls(list(map(str, dataset.columns[column])), weights, key).checked()

    def checked(self) -> Self:
        """Itself, if its sources are those that have weights."""
        there = list(dict.fromkeys(self.sources))
        for name in there:
            if name not in self.weights:
                raise ConfigError(f"{self.key} has no weight for data_source {name!r}")
        for name in self.weights:
            if name not in there:
                raise ConfigError(
                    f"{self.key}: no row has data_source {name!r}; there are {', '.join(there)}"
                )
        return self

    def select(self, rows: Sequence[int]) -> Self:
        """The mixing of some rows, in the shares of the sources that they have."""
        sources = [self.sources[i] for i in rows]
        weights = {name: weight for name, weight in self.weights.items() if name in sources}
        return dataclasses.replace(self, sources=sources, weights=weights)

    def describe(self) -> str:
        """Each source's share of what is drawn, and its rows."""
        total = sum(self.weights.values())
        return "drawn from " + ", ".join(
            f"{name} {100 * self.weights[name] / total:.3g}% ({self.sources.count(name)} rows)"
            for name in dict.fromkeys(self.sources)
        )


def make_sampler(
    rows: int, per_step: int, seed: int, mixing: Mixing | None
) -> "PromptSampler | MixedSampler":
    """The sampler of each step's rows, mixed where there are weights."""
    if mixing is None:
        return PromptSampler(rows, per_step, seed)
    return MixedSampler(mixing, per_step, seed)


class MixedSampler:
    """Draws each step's prompts so that every data source keeps its share.

    The next prompt comes from the source that is furthest behind its share, so every step is close
    to the shares. Each source is shuffled by a `PromptSampler` of its own, so a small source
    repeats more often.

    Args:
      mixing: a source's share is its weight over their sum.
      per_step: prompts per step.
      seed: of the shuffles.
    """

    def __init__(self, mixing: Mixing, per_step: int, seed: int):
        sources, weights = mixing.sources, mixing.weights
        there = list(dict.fromkeys(sources))
        self.size, self.per_step, self.seed = len(sources), per_step, seed
        total = sum(weights.values())
        self._shares = np.array([weights[name] / total for name in there])
        of = np.array([there.index(name) for name in sources])
        self._rows = [np.flatnonzero(of == i) for i in range(len(there))]
        self._orders = [PromptSampler(len(rows), 1, seed + i) for i, rows in enumerate(self._rows)]

    @property
    def position(self) -> int:
        """Prompts taken since the start."""
        return sum(order.position for order in self._orders)

    def next(self, count: int | None = None) -> np.ndarray:
        """Indices of the next step's prompts, int64 [per_step]; or of the next ``count``."""
        wanted = self.per_step if count is None else count
        taken = np.array([order.position for order in self._orders], float)
        found = []
        for number in range(self.position + 1, self.position + 1 + wanted):
            source = int(np.argmax(self._shares * number - taken))  # the one furthest behind
            taken[source] += 1
            [index] = self._orders[source].next()
            found.append(self._rows[source][index])
        return np.array(found)

    def restart(self) -> None:
        """Begin from the start."""
        for order in self._orders:
            order.restart()

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
