"""Labels of responses and of their steps: good or bad, right or wrong, by how much."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.data.preference_pairs import SIDES
from hjax.errors import DataError

# Where a row without a pair has its text.
TEXT_COLUMNS = ("text", "response")
PAIR_LABELS = tuple(f"{side}_label" for side in SIDES)


def label_of(value: Any, what: str) -> bool:
    """A label as 1 or 0, true or false.

    Args:
      value: of a column.
      what: names it in the error.

    Raises:
      DataError: it is something else.
    """
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise DataError(f"{what} is {value!r}; a label is 1 or 0, true or false")


def labelled_pairs(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Pairs of texts of which the one is labelled 1 and the other 0; other rows as they are.

    The first text with a label of 1 stands beside the first with 0, and so on: as many pairs as
    the rarer label has, every text in one of them at most.

    Args:
      rows: (where, row) of a file.

    Returns:
      rows with ``prompt`` (empty), ``chosen``, ``rejected`` and their labels.

    Raises:
      DataError: a label that is none, a prompt, or texts that all have the same label.
    """
    if any("label" not in row or any(side in row for side in SIDES) for _, row in rows):
        return list(rows)
    by_label: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for where, row in rows:
        text = next((row[name] for name in TEXT_COLUMNS if row.get(name)), None)
        if not isinstance(text, str):
            raise DataError(f"{where}: a row with a label needs its text in the column `text`")
        if row.get("prompt"):
            raise DataError(
                f"{where}: a labelled text is learned from whole, and this one has a prompt; put "
                "both into `text`, or give pairs as `chosen` and `rejected`"
            )
        by_label[label_of(row["label"], f"{where}: the label")].append((where, text))
    for label, texts in by_label.items():
        if not texts:
            raise DataError(f"no text is labelled {int(label)}: one of each label makes a pair")
    labels = dict(zip(PAIR_LABELS, (1, 0)))
    return [
        (where, {"prompt": "", "chosen": good, "rejected": bad} | labels)
        for (where, good), (_, bad) in zip(by_label[True], by_label[False])
    ]


def pair_labels(columns: Mapping[str, Sequence[Any]]) -> list[tuple[bool, bool]] | None:
    """(of the chosen, of the rejected response) of each pair; None: the data has none.

    Raises:
      DataError: a label that is none.
    """
    if any(name not in columns for name in PAIR_LABELS):
        return None
    of_side = [
        [label_of(value, f"{name} of pair {i}") for i, value in enumerate(columns[name])]
        for name in PAIR_LABELS
    ]
    return list(zip(*of_side, strict=True))


def pair_margins(columns: Mapping[str, Sequence[Any]], count: int) -> list[float]:
    """The margin of each of ``count`` pairs: 1 where the data has no column ``margin``.

    Raises:
      DataError: one that is no finite number of 0 or more.
    """
    margins = list(columns.get("margin", [1.0] * count))
    for i, margin in enumerate(margins):
        number = isinstance(margin, int | float) and math.isfinite(margin)
        if not number or margin < 0:
            raise DataError(f"the margin of pair {i} is {margin!r}; it must be a number, 0 or more")
    return [float(margin) for margin in margins]


def labelled_steps(steps: Any, labels: Any, shown: str) -> tuple[list[str], list[bool]]:
    """The steps of a response and which are right, as TRL's stepwise supervision has them.

    Args:
      steps: of the column ``completions``: texts, none empty.
      labels: of the column ``labels``, as many.
      shown: which row it is, for the error.

    Raises:
      DataError: they are something else, or not as many.
    """
    texts = isinstance(steps, Sequence) and not isinstance(steps, str)
    if not texts or not steps or not all(isinstance(step, str) and step for step in steps):
        raise DataError(
            f"the completions of {shown} are {steps!r}; they must be a list of texts, none empty"
        )
    if not isinstance(labels, Sequence) or len(labels) != len(steps):
        raise DataError(
            f"{shown} has {len(steps)} completions and the labels {labels!r}; there must be a "
            "label for each"
        )
    return list(steps), [label_of(x, f"a label of {shown}") for x in labels]
