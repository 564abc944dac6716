"""What a row teaches: a demonstration, a preference pair, an answer with its verdict, or steps."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hjax.data.dataset import Dataset
from hjax.data.invalid_rows import EQUAL_PAIR
from hjax.data.labels import PAIR_LABELS, check_labelled_steps, parse_label, parse_margin
from hjax.data.preference_pairs import RESPONSE_COLUMNS, SIDES, Messages, parse_response
from hjax.data.tasks import Task
from hjax.errors import DataError

LABEL_COLUMN = "label"
STEP_COLUMNS = ("completions", "labels")
EMPTY_ANSWER = "empty answer"


class RowAnswers(NamedTuple):
    """What a row teaches, before it is tokenised.

    Attributes:
      responses: one demonstration or answer, the chosen and the rejected one, or steps of one.
      labels: of a pair's responses, of an answer or of each step; empty where the data has none.
      margin: of a pair.
    """

    responses: Sequence[str | Messages]
    labels: Sequence[bool] = ()
    margin: float = 1.0


def answers_by_row(
    source: str, task: Task | None, data: Dataset, seed: int
) -> Callable[[int], RowAnswers] | None:
    """A function that reads the answers of a row by its position; None where the data has none.

    For a built-in task answers are made up: with equal chance a verdict's is a demonstration or a
    mistake.

    Args:
      source: what is learned from, see ``Algorithm.source``: `pairs`, `verdicts` (KTO) and `steps`;
        demonstrations with another.
      task: the built-in task, or None for a file's rows.
      data: the rows.
      seed: of the run.

    Returns:
      None, or the function, which raises DataError for a row that cannot be used.
    """
    if task is not None:
        return _task_answers(source, task, data, seed).__getitem__
    columns = data.columns
    if not has_answers(source, columns):
        return None
    readers = {"pairs": _read_pair, "verdicts": _read_verdict, "steps": _read_steps}
    parse = readers.get(source, _read_demonstration)
    return lambda i: parse({name: values[i] for name, values in columns.items()})


def has_answers(source: str, columns: Collection[str]) -> bool:
    """Whether a file with these columns has what is learned from (``source`` as above)."""
    response = next((name for name in RESPONSE_COLUMNS if name in columns), "")
    needed = {"pairs": SIDES, "verdicts": (response, LABEL_COLUMN), "steps": STEP_COLUMNS}
    return all(name in columns for name in needed.get(source, (response,)))


def _read_demonstration(row: Mapping[str, Any]) -> RowAnswers:
    found = [name for name in RESPONSE_COLUMNS if name in row]
    column = next((name for name in found if row[name] is not None), found[0])
    answer = parse_response(row[column], column)
    text = answer if isinstance(answer, str) else answer[0]["content"]
    if not text.strip() and (isinstance(answer, str) or len(answer[0]) == 2):  # nothing beside
        raise DataError(f"{column} is {text!r}, which teaches nothing", kind=EMPTY_ANSWER)
    return RowAnswers((answer,))


def _read_verdict(row: Mapping[str, Any]) -> RowAnswers:
    right = parse_label(row[LABEL_COLUMN], "the label")
    return _read_demonstration(row)._replace(labels=(right,))


def _read_pair(row: Mapping[str, Any]) -> RowAnswers:
    chosen, rejected = (parse_response(row[side], side) for side in SIDES)
    if chosen == rejected:
        raise DataError("chosen and rejected are equal: the pair says nothing", kind=EQUAL_PAIR)
    for side, answer in zip(SIDES, (chosen, rejected), strict=True):
        if answer == "":  # a blank one is published (hh-rlhf), and says less than the other
            raise DataError(f"{side} is empty", kind=EMPTY_ANSWER)
    known = all(name in row for name in PAIR_LABELS)
    labels = [parse_label(row[name], name) for name in PAIR_LABELS] if known else ()
    return RowAnswers((chosen, rejected), labels, parse_margin(row.get("margin", 1.0)))


def _read_steps(row: Mapping[str, Any]) -> RowAnswers:
    return RowAnswers(*check_labelled_steps(*(row[name] for name in STEP_COLUMNS)))


def _task_answers(source: str, task: Task, data: Dataset, seed: int) -> list[RowAnswers]:
    rng = np.random.default_rng([seed, {"pairs": 3, "verdicts": 4, "steps": 4}.get(source, 2)])
    made = []
    for record in task_records(data):
        if source == "pairs":
            made.append(RowAnswers(task.pair(record, rng), (True, False)))
        elif source == "steps":
            made.append(RowAnswers(*task.steps(record, rng)))
        elif source == "verdicts":
            right = bool(rng.integers(2))
            answer = task.demonstration(record, rng) if right else task.mistake(record, rng)
            made.append(RowAnswers((answer,), (right,)))
        else:
            made.append(RowAnswers((task.demonstration(record, rng),)))
    return made


def demonstration_texts(task: Task | None, data: Dataset, seed: int) -> list[str] | None:
    """A demonstration of each row, as text; None unless every row has one."""
    read = answers_by_row("demonstrations", task, data, seed)
    if data.prompt_text is None or read is None:
        return None
    try:
        answers = [read(i).responses[0] for i in range(len(data))]
    except DataError:
        return None
    return [text if isinstance(text, str) else text[0]["content"] for text in answers]


def task_records(data: Dataset) -> Iterator[dict[str, Any]]:
    """The records of a built-in task, one per row of its dataset."""
    for i, prompt in enumerate(data.prompt_text or []):
        yield {name: values[i] for name, values in data.columns.items()} | {"prompt": prompt}
