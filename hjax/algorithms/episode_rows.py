"""Episodes of several rows: algorithms see each as one row, and what they compute is split again.

An episode has several rows where an observation replaced the history. Its tokens are joined in
their order, so that returns and advantages run on from row to row, and it is one sample of a
baseline.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hjax.batches import LENGTHS, NO_EPISODE, NO_TOKEN, response_lengths, select_rows

Batch = dict[str, Any]
ROW_LENGTHS = "row_lengths"


class EpisodeRows(NamedTuple):
    """Which rows of a batch are of which episode.

    Attributes:
      rows: int [episodes, most], the rows of each in order; -1 behind its last.
      places: int [rows, 2], of each row its episode and its place there; -1 where it has none.
    """

    rows: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "EpisodeRows | None":
        """The episodes of a batch, in the order of their first rows; None: a row is a sample."""
        numbers = batch.get("episode")
        if numbers is None:
            return None
        numbers = np.asarray(numbers)
        order = list(dict.fromkeys(numbers[numbers != NO_EPISODE].tolist()))
        if len(order) == len(numbers):
            return None
        index = {number: i for i, number in enumerate(order)}
        places = np.full((len(numbers), 2), NO_EPISODE)
        counts = [0] * len(order)
        for row, number in enumerate(numbers.tolist()):
            if number != NO_EPISODE:
                episode = index[number]
                places[row] = episode, counts[episode]
                counts[episode] += 1
        # Few sizes, as programs read this form: twice the batch's rows per episode.
        most = 1
        while most < max(counts, default=1) or most * len(order) < 2 * len(numbers):
            most *= 2
        rows = np.full((len(order), most), NO_EPISODE)
        there = np.flatnonzero(places[:, 0] >= 0)
        rows[tuple(places[there].T)] = there
        return cls(rows, places)

    def join(self, batch: Mapping[str, Any]) -> Batch:
        """The batch with a row per episode: its rows' tokens one after another, each row as wide as
        before; of what rows have once the first row's. With ``row_lengths``, int [episodes, most]:
        ``response_lengths`` of each row."""
        first = self.rows[:, 0]
        joined = select_rows(batch, first)
        for key, value in batch.items():
            if self._has_tokens(batch, key):
                tokens = np.asarray(value)[np.maximum(self.rows, 0)]
                empty = (self.rows < 0).reshape(*self.rows.shape, *[1] * (tokens.ndim - 2))
                tokens = np.where(empty, tokens.dtype.type(NO_TOKEN.get(key, 0)), tokens)
                joined[key] = tokens.reshape(len(first), -1, *tokens.shape[3:])
        lengths = np.asarray(response_lengths(batch))[np.maximum(self.rows, 0)]
        joined[ROW_LENGTHS] = np.where(self.rows < 0, 0, lengths)
        joined[LENGTHS] = joined[ROW_LENGTHS].sum(axis=1, dtype=np.int32)
        return joined

    def split(self, found: Mapping[str, Any], joined: Mapping[str, Any], batch: Batch) -> Batch:
        """The batch with what was added to or changed in its ``joined`` form, by row; zero in rows
        of no episode."""
        made = dict(batch)
        episodes, most = self.rows.shape
        width = batch["response_mask"].shape[1]
        there = self.places[:, 0] >= 0
        for key, value in found.items():
            if key == ROW_LENGTHS or (key in joined and value is joined[key]):
                continue
            array: Any = np.asarray(value)
            if array.ndim == 0:
                made[key] = value
                continue
            if array.ndim > 1 and array.shape[1] == most * width:
                array = array.reshape(episodes, most, width, *array.shape[2:])
                array = array[np.maximum(self.places[:, 0], 0), np.maximum(self.places[:, 1], 0)]
            else:
                array = array[np.maximum(self.places[:, 0], 0)]
            array[~there] = 0
            made[key] = array
        return made

    def of_groups(self, groups: np.ndarray, samples: int, size: int) -> np.ndarray:
        """Rows of these groups of episodes, in order, and then one of no episode, as often as it
        takes to have ``size`` rows, or that times a power of two."""
        rows = self.rows.reshape(-1, samples * self.rows.shape[1])[groups].ravel()
        rows = rows[rows >= 0]
        while size <= len(rows):
            size *= 2
        fill = np.flatnonzero(self.places[:, 0] < 0)[:1]
        return np.concatenate([rows, np.repeat(fill, size - len(rows))])

    @staticmethod
    def _has_tokens(batch: Mapping[str, Any], key: str) -> bool:
        shape: tuple[int, ...] = ()
        if not isinstance(batch[key], Mapping | list):
            shape = np.shape(batch[key])
        prompt = key in ("prompts", "prompt_mask")
        return len(shape) > 1 and shape[1] == batch["response_mask"].shape[1] and not prompt


def episode_minibatches(
    groups: np.ndarray, episodes: np.ndarray, order: np.ndarray, count: int
) -> list[np.ndarray]:
    """Rows of each mini-batch: those of whole groups, filled up to equal sizes.

    Args:
      groups: int [rows], the group (prompt) of each; ``episodes``: int [rows], -1 of a row that
        only fills up.
      order: of the groups, a permutation of their numbers from 0.
      count: groups of a mini-batch.

    Returns:
      int [size] each; sizes are those of the groups' episodes times a power of two, and at least
      their share of the batch's rows.
    """
    there = np.flatnonzero(episodes != NO_EPISODE)
    names = list(dict.fromkeys(groups[there].tolist()))
    by_group = [there[groups[there] == name] for name in names]
    parts = [
        np.concatenate([by_group[i] for i in order[at : at + count]])
        for at in range(0, len(order), count)
    ]
    least = max(len(np.unique(episodes[part])) for part in parts)
    size = least
    of_episode = len(episodes) // len(np.unique(episodes[there]))
    while size < max(map(len, parts)) or size < least * of_episode:
        size *= 2
    fill = np.flatnonzero(episodes == NO_EPISODE)[:1]
    return [np.concatenate([part, np.repeat(fill, size - len(part))]) for part in parts]
