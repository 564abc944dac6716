"""Batches as every part reads them: how many tokens their rows have, and rows taken from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LENGTHS = "response_lengths"
# Of rows that only fill up a batch of episodes.
NO_EPISODE = -1
# What entries with a value per token have where there is no token; others have 0.
NO_TOKEN = {"turn": -1, "anchor": -1}
# Entries of prompts that their answers have too, dicts of lists: the data's columns, and what
# ``Algorithm.choose`` has said of each prompt.
REPEATED = COLUMNS, CHOICE = "columns", "choice"
# The batch entry with counts over all rows; all others have one entry per row.
OUTCOME_COUNTS = "reward_outcomes"


def response_lengths(batch: Mapping[str, Any]) -> Any:
    """int32 [rows]: the tokens after each row's prompt.

    ``response_mask`` says which of them the policy drew. Those of an environment lie between them,
    and ``response_lengths`` counts them too; a batch without that entry has none of these, and the
    mask's sums are the lengths.

    Args:
      batch: of NumPy arrays or JAX's; so is the result.
    """
    if batch.get(LENGTHS) is not None:
        return batch[LENGTHS]
    return batch["response_mask"].sum(axis=1, dtype=np.int32)


def response_places(batch: Mapping[str, Any]) -> Any:
    """bool [rows, length]: where responses have a token, whoever wrote it."""
    mask = batch["response_mask"]
    if batch.get(LENGTHS) is None:
        return mask
    return np.arange(mask.shape[1]) < response_lengths(batch)[:, None]


def sample_rows(batch: Mapping[str, Any]) -> np.ndarray:
    """int [samples]: the first row of each sample. A sample is a row, or an episode of one or more
    (``episode``, -1 of rows that only fill up the batch)."""
    numbers = batch.get("episode")
    if numbers is None:
        return np.arange(len(batch["response_mask"]))
    _, first = np.unique(np.asarray(numbers), return_index=True)
    return np.sort(first[np.asarray(numbers)[first] != NO_EPISODE])


def real_rows(batch: Mapping[str, Any]) -> np.ndarray:
    """int [rows]: the rows without those that only fill up a batch of episodes."""
    if "episode" not in batch:
        return np.arange(len(batch["response_mask"]))
    return np.flatnonzero(np.asarray(batch["episode"]) != NO_EPISODE)


def repeat_columns(prompts: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """``columns`` (there always) and ``choice`` (where prompts have it) of these rows."""
    return {
        key: {name: [values[i] for i in rows] for name, values in prompts.get(key, {}).items()}
        for key in REPEATED
        if key == COLUMNS or key in prompts
    }


def select_rows(batch: Mapping[str, Any], rows: Sequence[int] | np.ndarray) -> dict[str, Any]:
    """Select rows of a batch of arrays, lists and dicts of lists."""
    made: dict[str, Any] = {}
    for key, value in batch.items():
        if key == OUTCOME_COUNTS or not (isinstance(value, Mapping | list) or np.ndim(value)):
            made[key] = value  # one entry for all rows
        elif isinstance(value, Mapping):
            made[key] = select_rows(value, rows)
        else:
            made[key] = [value[i] for i in rows] if isinstance(value, list) else value[rows]
    return made


def _same_names(values: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Dicts of columns with all names in each: NaN where one lacks a metric."""
    names = dict.fromkeys(name for value in values for name in value)
    rows = [len(next(iter(value.values()), ())) for value in values]
    return [
        {name: value.get(name, np.full(count, np.nan, np.float32)) for name in names}
        for value, count in zip(values, rows, strict=True)
    ]


def concatenate_batches(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate the rows of batches; responses are padded on the right to the longest."""
    made: dict[str, Any] = {}
    for key, first in batches[0].items():
        values = [batch[key] for batch in batches]
        if key == OUTCOME_COUNTS:
            names = dict.fromkeys(name for value in values for name in value)
            made[key] = {name: sum(value.get(name, 0) for value in values) for name in names}
        elif isinstance(first, Mapping):
            made[key] = concatenate_batches(_same_names(values))
        elif isinstance(first, list):
            made[key] = [x for value in values for x in value]
        elif not np.ndim(first):
            made[key] = first
        else:
            arrays = [np.asarray(value) for value in values]
            if arrays[0].ndim == 2:
                longest = max(x.shape[1] for x in arrays)
                empty = NO_TOKEN.get(key, 0)
                arrays = [
                    np.pad(x, ((0, 0), (0, longest - x.shape[1])), constant_values=empty)
                    for x in arrays
                ]
            made[key] = np.concatenate(arrays)
    return made
