"""Unpaired preferences (KTO): single responses, each labelled right or wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.data.preference_pairs import RESPONSE_COLUMNS, parse_response
from hjax.data.tasks import Task
from hjax.errors import DataError

LABEL_COLUMN = "label"


def read_unpaired(
    seed: int, task: Task | None, data: Dataset
) -> tuple[list[str], list[bool]] | None:
    """The response of each row and whether it is right; None where the data has no such columns.

    For a built-in task each response is, with equal chance, a demonstration or a mistake.

    Args:
      seed: of the run.
      task: the built-in task, or None for a file's rows.
      data: the rows.

    Raises:
      DataError: a label that is neither true nor false, or a response that is no text.
    """
    if task is not None:
        rng = np.random.default_rng([seed, 4])
        texts, labels = [], []
        for record in task_records(data):
            right = bool(rng.integers(2))
            texts.append(task.demonstration(record, rng) if right else task.mistake(record, rng))
            labels.append(right)
        return texts, labels
    name = next((name for name in RESPONSE_COLUMNS if name in data.columns), None)
    if name is None or LABEL_COLUMN not in data.columns:
        return None
    texts, labels = [], []
    rows = zip(data.columns[name], data.columns[LABEL_COLUMN], strict=True)
    for i, (text, label) in enumerate(rows):
        row = f"the prompt {data.prompt_text[i][:60]!r}" if data.prompt_text else "a prompt"
        if not (isinstance(label, bool | np.bool_) or label in (0, 1)):
            raise DataError(f"the label of {row} is {label!r}; it must be true or false")
        texts.append(parse_response(text, name, row))
        labels.append(bool(label))
    return texts, labels


def task_records(data: Dataset) -> Iterator[dict[str, Any]]:
    """The records of a built-in task, one per row of its dataset."""
    for i, prompt in enumerate(data.prompt_text or []):
        yield {name: values[i] for name, values in data.columns.items()} | {"prompt": prompt}
