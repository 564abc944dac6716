"""Which prompts a step takes: ``Algorithm.choose``, and what it may remember of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hjax.algorithms.difficulty import DifficultyFilter
from hjax.algorithms.spec import AlgorithmSpec
from hjax.batches import CHOICE, sample_rows

Batch = dict[str, Any]


class PromptChoice(AlgorithmSpec):
    """The part of ``Algorithm`` that chooses prompts.

    Attributes:
      difficulty: the filter of the keys ``algorithm.difficulty...``; None: none.
      step_number: of the step in progress, or of the last.
    """

    difficulty: DifficultyFilter | None
    step_number: int

    def choose(self, order: Any, count: int) -> Batch:
        """Choose the prompts of the next batch.

        It may generate, and wait for what it calls: with asynchronous rollout it runs in the thread
        of ``collect``, and what it calls is of the weights that generate the batch. It must not
        change what later calls of it depend on: a resumed run chooses the prompts of batches that
        were in flight once more. What it says of a prompt goes into ``choice``, by name a list
        with one value per prompt; answers have it once per row, and means of numbers are metrics
        ``choice/<name>``.

        Args:
          order: the sampler's (``hjax.run.prompt_order.PromptOrder``): ``next(count)`` gives
            prompts, ``number`` is that of the batch, from 1, and ``version`` says how many steps
            the weights have learned from that generate it.
          count: how many prompts the batch has.

        Returns:
          so many prompts, as ``order.next`` gives them: by default the first, without those that
          ``algorithm.difficulty`` passes over.
        """
        if self.difficulty is None:
            return order.next(count)
        return self.difficulty.choose(order, count)

    def remember(self, batch: Batch) -> None:
        """Keep what ``choose`` needs of the batch that a step has learned from; called once after
        each, when ``step_number`` is the version of the weights."""
        if self.difficulty is not None:
            self.difficulty.add(self.step_number, batch)


def choice_metrics(batch: Mapping[str, Any]) -> dict[str, float]:
    """``choice/<name>``: means over samples of the numbers that ``choose`` has said of their
    prompts, but for the ``row`` of the data. NaN counts as nothing said."""
    chosen = batch.get(CHOICE)
    if not chosen:
        return {}
    rows, found = sample_rows(batch), {}
    for name, values in chosen.items():
        said = [values[i] for i in rows.tolist()]
        if name == "row" or not all(isinstance(value, int | float) for value in said):
            continue
        numbers = np.asarray(said, np.float64)
        if not np.isnan(numbers).all():
            found[f"choice/{name}"] = float(np.nanmean(numbers))
    return found
