"""Verdicts: responses that are each right or wrong, without a counterpart (TRL: unpaired)."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.data.preference_pairs import RESPONSE_COLUMNS, answer_text
from hjax.data.tasks import Task
from hjax.errors import DataError

LABEL = "label"


def read_verdicts(
    seed: int, task: Task | None, data: Dataset
) -> tuple[list[str], list[bool]] | None:
    """The responses of a dataset's rows and whether each is right; None: there are none.

    Of a built-in task half of them are demonstrations and half have a mistake, drawn by the seed.

    Args:
      seed: of the run.
      task: built in, or None for a file's rows.
      data: with the columns of the rows.

    Raises:
      DataError: a label that is neither true nor false, or a response that is no text.
    """
    if task is not None:
        rng = np.random.default_rng([seed, 4])
        texts, labels = [], []
        for record in records_of(data):
            right = bool(rng.integers(2))
            texts.append(task.demonstration(record, rng) if right else task.mistake(record, rng))
            labels.append(right)
        return texts, labels
    name = next((name for name in RESPONSE_COLUMNS if name in data.columns), None)
    if name is None or LABEL not in data.columns:
        return None
    texts, labels = [], []
    for i, (text, label) in enumerate(zip(data.columns[name], data.columns[LABEL], strict=True)):
        row = f"the prompt {data.prompt_text[i][:60]!r}" if data.prompt_text else "a prompt"
        if not (isinstance(label, bool | np.bool_) or label in (0, 1)):
            raise DataError(f"the label of {row} is {label!r}; it must be true or false")
        texts.append(answer_text(text, name, row))
        labels.append(bool(label))
    return texts, labels


def records_of(data: Dataset) -> Iterator[dict[str, Any]]:
    """The rows of a built-in task."""
    for i, prompt in enumerate(data.prompt_text or []):
        yield {name: values[i] for name, values in data.columns.items()} | {"prompt": prompt}
