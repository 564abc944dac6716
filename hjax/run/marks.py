"""What is known of examples beside their tokens: labels and margins, by place in a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hjax.data.labels import pair_labels, pair_margins
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, DataError

Examples = list[tuple[list[int], ...]]
# By the name of its array, for each example and each of its rows, values by place: the number of
# response tokens before it.
Marks = dict[str, list[tuple[dict[int, float], ...]]]
# What stands where nothing is known.
FILL = {"labels": np.nan, "margins": 0.0}


def pair_marks(
    config: ConfigDict, columns: Mapping[str, Sequence[Any]] | None, pairs: Examples
) -> Marks:
    """Labels of pairs at their responses' ends, and their margins at those of the chosen ones.

    Args:
      config: of the run.
      columns: of its data; None: a built-in task's, whose chosen responses are good and others bad.
      pairs: tokens of prompt, chosen and rejected response.

    Raises:
      ConfigError: labels are to be learned, and the data has none.
      DataError: a label or a margin that is none.
    """
    labels = [(True, False)] * len(pairs) if columns is None else pair_labels(columns)
    if labels is None and config.algorithm.get("label_coef"):
        raise ConfigError(
            f"config.algorithm.label_coef={config.algorithm.label_coef}: {config.data.path} has no "
            "columns `chosen_label` and `rejected_label` (1 good or safe, 0 not); add them, or set "
            "label_coef=0"
        )
    margins = pair_margins(columns or {}, len(pairs))
    each = zip(pairs, margins, strict=True)
    marks: Marks = {"margins": [({len(chosen): margin}, {}) for (_, chosen, _), margin in each]}
    marks["labels"] = [({}, {})] * len(pairs)
    if labels is not None:
        marks["labels"] = [
            tuple({len(x): float(label)} for x, label in zip(responses, known, strict=True))
            for (_, *responses), known in zip(pairs, labels, strict=True)
        ]
    return marks


def step_examples(
    config: ConfigDict,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[list[int], str]],
    rows: Sequence[tuple[list[str], list[bool]]],
) -> tuple[Examples, Marks]:
    """A prompt and its response for each row, and a label at the end of each step.

    Steps are tokenised one by one, with ``algorithm.separator`` after each.

    Args:
      config: of the run.
      tokenizer: of the actor.
      prompts: tokens, and how each is called in errors.
      rows: of each its steps and which are right.

    Raises:
      DataError: a response that is too long.
    """
    separator = tokenizer.encode(config.algorithm.separator, add_special=False)
    end = [tokenizer.eos_id] if tokenizer.eos_id is not None else []
    limit = config.rollout.max_response_length
    examples: Examples = []
    marks: Marks = {"labels": []}
    for (prompt, shown), (steps, labels) in zip(prompts, rows, strict=True):
        tokens: list[int] = []
        places: dict[int, float] = {}
        for step, label in zip(steps, labels, strict=True):
            tokens += tokenizer.encode(step, add_special=False) + separator
            places[len(tokens)] = float(label)
        tokens += end
        if len(tokens) > limit:
            raise DataError(
                f"the completions of {shown} have {len(tokens)} tokens, more than "
                f"rollout.max_response_length={limit}; raise it"
            )
        examples.append((prompt, tokens))
        marks["labels"].append((places,))
    return examples, marks
