"""The prompts that a run's next batch is chosen from, in the sampler's order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hjax.batches import CHOICE
from hjax.data.dataset import PromptSampler
from hjax.data.mixing import MixedSampler
from hjax.run.inputs import Inputs, prompt_batch


class PromptOrder:
    """What ``Algorithm.choose`` takes the prompts of a batch from.

    Args:
      inputs: of the run, whose training rows these are.
      sampler: their order.
      number: of the batch, from 1; it seeds the sampling.
      version: returns the version of the weights that generate the batch, and waits until they are
        there.
      first: sequences that the batch has already, if further prompts are asked for.

    Attributes:
      number: of the batch.
    """

    def __init__(
        self,
        inputs: Inputs,
        sampler: PromptSampler | MixedSampler,
        number: int,
        version: Callable[[], int],
        first: int = 0,
    ):
        self.number = number
        self._inputs, self._sampler, self._first = inputs, sampler, first
        self._find_version = version

    @functools.cached_property
    def version(self) -> int:
        """How many steps the weights have learned from that generate the batch."""
        return self._find_version()

    def next(self, count: int) -> dict[str, Any]:
        """The next prompts of the order, as ``Algorithm.collect`` takes them.

        Args:
          count: how many.

        Returns:
          the batch of docs/design.md; ``choice`` has their ``row`` of the training data.
        """
        rows: np.ndarray = self._sampler.next(count)
        made = prompt_batch(self._inputs.train.rows(rows), self._inputs.prompt_length, self.number)
        made |= {CHOICE: {"row": rows.tolist()}}
        return made | ({"first": self._first} if self._first else {})
