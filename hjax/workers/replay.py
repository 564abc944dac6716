"""A replay buffer as a worker on the host: rows of batches, bounded, saved with the checkpoint."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import ConfigError, DataError, RunError
from hjax.files import to_json
from hjax.models.checkpoint import restore_params
from hjax.sharding.global_arrays import is_array, to_numpy
from hjax.sharding.protocols import control, protocol
from hjax.workers.worker import Worker, WorkerContext

_KIND = "buffer"


class ReplayBuffer(Worker):
    """Keeps the newest ``algorithm.replay_capacity`` rows, and draws of them uniformly.

    Give it a role of its own, ``hjax.Role(ReplayBuffer, host=True)``. Arrays keep a row per
    example; lists (texts) and dicts of lists (columns) keep one entry per row; scalars are dropped.
    Arrays of sequences may differ in length: shorter ones are padded with zeros on the right.
    """

    def __init__(self, context: WorkerContext):
        super().__init__(context)
        self.capacity = self.places()
        if self.capacity < 1:
            raise ConfigError(f"{self.role}: a replay buffer of {self.capacity} rows: 1 or more")
        self.arrays: dict[str, np.ndarray] = {}
        self.texts: dict[str, list[Any]] = {}
        self.stored = 0  # rows so far; row n is at n % capacity
        self.kind = ""

    def places(self) -> int:
        """Most rows that are kept."""
        return int(self.context.options.algorithm.replay_capacity)

    def __len__(self) -> int:
        return min(self.stored, self.capacity)

    @protocol("ALL_TO_ALL")
    def store(self, batch: Mapping[str, Any], kind: str = "") -> int:
        """Add a batch's rows, in the place of the oldest; returns the number of rows there are.

        Args:
          batch: entries with a row per example.
          kind: of what made the rows, such as a model's shapes or a grid; all rows of a buffer have
            the same.

        Raises:
          RunError: rows of another kind, or with other entries or shapes, than those there are.
        """
        arrays, texts = _rows_of(batch)
        entries: dict[str, Any] = {**arrays, **texts}
        counts = {name: len(x) for name, x in entries.items()}
        if len(set(counts.values())) != 1:
            raise RunError(
                f"{self.role}: entries of a batch with different numbers of rows: {counts}"
            )
        self._check_alike(arrays, texts, kind)
        self.kind = kind
        rows = next(iter(counts.values()))
        kept = np.arange(max(rows - self.capacity, 0), rows)
        places = (self.stored + kept) % self.capacity
        for name, x in arrays.items():
            where: Any = (places, *map(slice, x.shape[1:2]))
            self._array_for(name, x)[where] = x[kept]
        for name, values in texts.items():
            own = self.texts.setdefault(name, [None] * self.capacity)
            for place, row in zip(places, kept, strict=True):
                own[place] = values[row]
        self.stored += rows
        return len(self)

    def _array_for(self, name: str, x: np.ndarray) -> np.ndarray:
        """The buffer's array of an entry, wide enough; its rows that come are zeros."""
        own = self.arrays.get(name)
        if own is None:
            own = np.zeros((self.capacity, *x.shape[1:]), x.dtype)
        elif x.ndim > 1 and x.shape[1] > own.shape[1]:
            more = [(0, 0)] * own.ndim
            more[1] = (0, x.shape[1] - own.shape[1])
            own = np.pad(own, more)
        elif x.ndim > 1 and x.shape[1] < own.shape[1]:
            places = (self.stored + np.arange(min(len(x), self.capacity))) % self.capacity
            own[places] = 0
        self.arrays[name] = own
        return own

    def _check_alike(self, arrays: Mapping[str, Any], texts: Mapping[str, Any], kind: str) -> None:
        if not self.stored:
            return
        if kind != self.kind:
            raise RunError(
                f"{self.role}: its rows are of {self.kind or 'no kind'}, and these are of "
                f"{kind or 'no kind'}; rows of another model or grid need a buffer of their own"
            )
        names, own = {*arrays, *texts}, {*self.arrays, *self.texts}
        if names != own:
            raise RunError(
                f"{self.role}: a batch with {', '.join(sorted(names))} for rows with "
                f"{', '.join(sorted(own))}; store batches with the same entries"
            )
        for name, x in arrays.items():
            mine = self.arrays[name]
            if x.dtype != mine.dtype or x.ndim != mine.ndim or x.shape[2:] != mine.shape[2:]:
                raise RunError(
                    f"{self.role}: {name} is {x.dtype}{list(x.shape[1:])} a row, and its rows are "
                    f"{mine.dtype}{list(mine.shape[1:])}"
                )

    @protocol("ALL_TO_ALL")
    def sample(self, rows: int, number: int, seed: int = 0) -> dict[str, Any]:
        """Draw rows, uniformly and each as often as it comes.

        Args:
          rows: how many.
          number: of the draw: equal numbers of equal contents draw the same.
          seed: of the draws, beside the run's.

        Raises:
          RunError: the buffer is empty.
        """
        if not self.stored:
            raise RunError(f"{self.role}: nothing to replay yet; store a batch before")
        rng = np.random.default_rng([self.context.seed, seed, number])
        return self.take(rng.integers(len(self), size=rows))

    def take(self, places: np.ndarray) -> dict[str, Any]:
        """The rows at places of the buffer, as a batch."""
        batch: dict[str, Any] = {name: x[places] for name, x in self.arrays.items()}
        for name, values in self.texts.items():
            column, _, inner = name.partition("/")
            picked = [values[place] for place in places]
            if inner:
                batch.setdefault(column, {})[inner] = picked
            else:
                batch[name] = picked
        return batch

    def state(self) -> dict[str, Any]:
        """Rows and what is known of them; ``load_state`` reads them whatever their shapes."""
        known = to_json({"stored": self.stored, "kind": self.kind, "texts": self.texts})
        text = np.frombuffer(json.dumps(known).encode(), np.uint8)
        arrays = {"arrays": dict(self.arrays)} if self.arrays else {}
        return {_KIND: {"known": text, **arrays}}

    @control
    def load_state(self, folder: str) -> None:
        """Continue from what ``save_state`` wrote.

        Raises:
          DataError: it is damaged, or of another capacity.
        """
        read = restore_params(Path(folder), self.role, _KIND)
        if read is None:
            raise DataError(f"{folder}: no rows of {self.role} were saved")
        try:
            known = json.loads(bytes(read["known"]))
            self.arrays = dict(read.get("arrays", {}))
            self.texts, self.stored, self.kind = known["texts"], known["stored"], known["kind"]
            entries: list[Any] = [*self.arrays.values(), *self.texts.values()]
            sizes = {len(x) for x in entries}
            if type(self.stored) is not int or self.stored < bool(entries):
                raise ValueError(f"{self.stored!r} rows stored")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            what = f"the rows of {self.role} cannot be read ({error})"
            raise DataError(f"{folder}: {what}") from error
        if sizes - {self.capacity}:
            raise DataError(
                f"{folder}: {self.role} has {min(sizes)} places, and "
                f"algorithm.replay_capacity={self.capacity}"
            )


def _rows_of(batch: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, list[Any]]]:
    """A batch's arrays, and its lists; those of a dict of lists are named ``column/name``."""
    arrays: dict[str, np.ndarray] = {}
    texts: dict[str, list[Any]] = {}
    for name, value in batch.items():
        if is_array(value):
            if np.ndim(value):
                arrays[name] = to_numpy(value)
        elif isinstance(value, list):
            texts[name] = value
        elif isinstance(value, Mapping):
            texts |= {
                f"{name}/{inner}": list(x) for inner, x in value.items() if isinstance(x, list)
            }
    if not arrays and not texts:
        raise RunError("a replay buffer was given a batch without rows")
    return arrays, texts
