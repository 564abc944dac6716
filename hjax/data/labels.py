"""Labels of preference pairs and of reasoning steps, and the margins of pairs."""

import math
from collections.abc import Sequence
from typing import Any

from hjax.data.invalid_rows import InvalidRows
from hjax.data.preference_pairs import SIDES
from hjax.errors import DataError

# Columns that may hold the text of a row without a pair, in order of preference.
TEXT_COLUMNS = ("text", "response")
PAIR_LABELS = tuple(f"{side}_label" for side in SIDES)


def parse_label(value: Any, what: str) -> bool:
    """Parse a binary label: 1 or 0, true or false.

    Args:
      value: the column's value.
      what: names it in the error.

    Raises:
      DataError: the value is something else.
    """
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    raise DataError(f"{what} is {value!r}; a label is 1 or 0, true or false")


def pair_labelled_texts(
    rows: Sequence[tuple[str, dict[str, Any]]], invalid: InvalidRows
) -> list[tuple[str, dict[str, Any]]]:
    """Pair texts labelled 1 with texts labelled 0; rows that are not single texts stay as they are.

    The n-th text labelled 1 is paired with the n-th labelled 0. So there are as many pairs as the
    rarer label has texts, and each text is in at most one pair.

    Args:
      rows: (location, row) pairs of a file.
      invalid: checks the rows: an invalid label, no text, or a prompt.

    Returns:
      rows with ``prompt`` (empty), ``chosen``, ``rejected`` and their labels.

    Raises:
      DataError: only one of the two labels.
    """
    if any("label" not in row or any(side in row for side in SIDES) for _, row in rows):
        return list(rows)
    by_label: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for where, row in rows:
        with invalid.checking(where, "unusable labelled text"):
            text = next((row[name] for name in TEXT_COLUMNS if row.get(name)), None)
            if not isinstance(text, str):
                raise DataError("a row with a label needs its text in the column `text`")
            if row.get("prompt"):
                raise DataError(
                    "a labelled text is learned from whole, and this one has a prompt; put both "
                    "into `text`, or give pairs as `chosen` and `rejected`"
                )
            by_label[parse_label(row["label"], "the label")].append((where, text))
    for label, texts in by_label.items():
        if not texts:
            raise DataError(f"no text is labelled {int(label)}: one of each label makes a pair")
    labels = dict(zip(PAIR_LABELS, (1, 0)))
    return [
        (where, {"prompt": "", "chosen": good, "rejected": bad} | labels)
        for (where, good), (_, bad) in zip(by_label[True], by_label[False])
    ]


def parse_margin(value: Any) -> float:
    """Parse the margin of a pair.

    Raises:
      DataError: it is negative or not a finite number.
    """
    number = isinstance(value, int | float) and math.isfinite(value)
    if not number or value < 0:
        raise DataError(f"the margin is {value!r}; it must be a number, 0 or more")
    return float(value)


def check_labelled_steps(steps: Any, labels: Any) -> tuple[list[str], list[bool]]:
    """Validate a response's steps and their correctness labels (TRL's stepwise supervision format).

    Args:
      steps: of the column ``completions``: non-empty texts.
      labels: of the column ``labels``, one per step.

    Raises:
      DataError: wrong types, an empty step, or a different number of labels.
    """
    texts = isinstance(steps, Sequence) and not isinstance(steps, str)
    if not texts or not steps or not all(isinstance(step, str) and step for step in steps):
        raise DataError(f"completions are {steps!r}; they must be a list of texts, none empty")
    if not isinstance(labels, Sequence) or len(labels) != len(steps):
        raise DataError(
            f"there are {len(steps)} completions and the labels {labels!r}; there must be a label "
            "for each"
        )
    return list(steps), [parse_label(x, "a label") for x in labels]
