"""The slot table: which sequence has which row of a state, and the state's rows and columns.

Training's scheduler and the service share it. They differ in who enters when
(``hjax.rollout.scheduler``, ``hjax.rollout.service``) and in the sizes there are
(``hjax.rollout.bucketing``).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from hjax.models.append_attention import CacheBlocks
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.rollout_job import EMPTY
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import Admission, ContinuedRows, DecodedTokens, SlotSizes


class SlotTableShapes(Protocol):
    """Sizes that a table's states may have; rows are those of a data-parallel part."""

    @property
    def steps(self) -> int:
        """Tokens that a row draws in a dispatch."""

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Sizes of a state."""

    def lengths_for(self, rows: int) -> list[int]:
        """Columns of states with this many rows, ascending."""

    def shares_prompts(self, rows: int) -> bool:
        """Whether samples share one copy of their prompt; else each row has its own."""

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """The next first column and number of columns, if all of ``length`` are taken up to
        ``column`` and no row attends to those before ``first``."""


class SlotTable:
    """Rows of a state that grows and shrinks with the sequences in it.

    Args:
      engine: whose state it is.
      buckets: rows and columns that a state may have.
      samples: sequences of a prompt, whose numbers are consecutive.

    Attributes:
      sequence_ids: int [parts, rows], the number of each row's sequence; EMPTY: it is free.
      prompt_ids: int [parts, groups], the number of each group's prompt, the last that it had.
      start: int [parts, rows], the column of each one's first token.
      state: of the engine; None before the first sequence.
      length: columns of the state.
      column: that the next token goes into.
    """

    def __init__(self, engine: Engine, buckets: SlotTableShapes, samples: int = 1):
        self.engine, self.buckets, self.samples = engine, buckets, samples
        self.sequence_ids = self.prompt_ids = np.full((engine.parts, 1), EMPTY)
        self.start = np.zeros(self.sequence_ids.shape, np.int64)
        self.length = self.column = 0
        self.state: Any = None

    def open(self, rows: int, length: int, column: int = 0) -> SlotTable:
        """Make a new, empty state."""
        parts, size = self.engine.parts, self.buckets.state_sizes(rows, length)
        self.sequence_ids = np.full((parts, rows), EMPTY)
        self.prompt_ids = np.full((parts, size.groups // parts), EMPTY)
        self.start = np.zeros(self.sequence_ids.shape, np.int64)
        self.length, self.column = length, column
        self.state = self.engine.empty(size, column)
        return self

    @property
    def live(self) -> np.ndarray:
        """bool [parts, rows], which rows have a sequence."""
        return self.sequence_ids != EMPTY

    @property
    def max_live_rows(self) -> int:
        """Live rows of the part that has most."""
        return int(self.live.sum(axis=1).max())

    def free_groups(self) -> list[np.ndarray]:
        """int [groups] by part: the groups of whose prompts no sequence is left."""
        pairs = zip(self.prompt_ids, self.sequence_ids // self.samples, strict=True)
        return [np.flatnonzero((g == EMPTY) | ~np.isin(g, own)) for g, own in pairs]

    def assign(self, part: int, group: int, ids: np.ndarray, before: int) -> np.ndarray:
        """Assign a free group to a prompt.

        Args:
          part, group: where.
          ids: int [samples], its sequences; EMPTY: one that does not enter.
          before: tokens of each that are in columns before the next.

        Returns:
          int [samples], their rows.
        """
        rows = group * self.samples + np.arange(self.samples)
        if self.samples > 1 and not self.engine.uses_kernel:
            rows = np.flatnonzero(~self.live[part])[: self.samples]
        self.prompt_ids[part, group] = ids.max() // self.samples
        self.sequence_ids[part, rows], self.start[part, rows] = ids, self.column - before
        return rows

    def release_rows(self, rows: np.ndarray) -> None:
        """Free rows; ``rows``: bool [parts, rows]."""
        self.sequence_ids[rows] = EMPTY

    def stop_rows(self, rows: np.ndarray) -> None:
        """Stop decoding rows; ``rows``: bool [parts, rows]."""
        if rows.any() and self.state is not None:
            self.state = self.engine.stop_rows(self.state, rows.ravel())

    def admit(
        self, sampling: SamplingParams, params: Weights, new: Admission, blocks: CacheBlocks | None
    ) -> DecodedTokens:
        """As ``Engine.admit``."""
        self.state, drawn = self.engine.admit(sampling, params, self.state, new, blocks)
        return drawn

    def decode(
        self,
        sampling: SamplingParams,
        params: Weights,
        steps: int,
        bitmask: Any = None,
        enough_live: int = 0,
        new: ContinuedRows | None = None,
    ) -> DecodedTokens:
        """As ``Engine.decode``, as far as there are columns."""
        engine, most = self.engine, self.buckets.steps + self.engine.draft_tokens
        if not engine.row_columns:
            steps = min(steps, self.length - self.column - engine.spare_columns)
        self.state, drawn = engine.decode(
            sampling, params, self.state, steps, most, bitmask, enough_live, new
        )
        self.column += drawn.steps
        return drawn

    # Rows

    def group_of_row(self) -> np.ndarray:
        """int32 [parts, rows]: the group of each row's prompt; 0 if the row is free."""
        prompts = self.sequence_ids // self.samples
        found = (self.prompt_ids[:, None] == prompts[:, :, None]).argmax(axis=2)
        return np.where(self.live, found, 0).astype(np.int32)

    def update_sharing(self) -> None:
        """Tell the engine which rows share which prompt."""
        members: Any = None
        place: Any = None
        parts, count = self.sequence_ids.shape
        if self.buckets.shares_prompts(count) and not self.engine.uses_kernel:
            groups, samples = self.prompt_ids.shape[1], self.samples
            members = np.full((parts, groups, samples), count, np.int32)
            place = np.zeros((parts, count), np.int32)
            part, row = np.nonzero(self.live)
            group, sample = self.group_of_row()[part, row], self.sequence_ids[part, row] % samples
            members[part, group, sample], place[part, row] = row, group * samples + sample
            members, place = members.reshape(-1, samples), place.ravel()
        self.state = self.engine.share_prompts(self.state, members, place)

    def shrink_rows(self, rows: int) -> None:
        """Compact: drop free rows, so that each part has ``rows``."""
        order = np.argsort(~self.live, axis=1, kind="stable")
        kept = np.sort(order[:, :rows], axis=1).astype(np.int32)
        groups = None
        if not self.buckets.shares_prompts(self.sequence_ids.shape[1]):
            groups = kept
        elif not self.buckets.shares_prompts(rows):  # each row gets its own copy of its prompt
            groups = np.take_along_axis(self.group_of_row(), kept, axis=1)
        self.state = self.engine.move(
            self.state, kept.ravel(), None if groups is None else groups.ravel()
        )
        self.sequence_ids = np.take_along_axis(self.sequence_ids, kept, axis=1)
        self.start = np.take_along_axis(self.start, kept, axis=1)
        if groups is not None:
            self.prompt_ids = np.take_along_axis(self.prompt_ids, groups, axis=1)

    def grow_rows(self, rows: int) -> None:
        """Grow to ``rows`` rows in each part, the old ones first; each has its own prompt."""
        parts, old = self.sequence_ids.shape
        numbers = np.tile(np.arange(rows, dtype=np.int32), parts)
        self.state = self.engine.move(self.state, numbers, numbers)
        more = (0, 0), (0, rows - old)
        self.sequence_ids, self.prompt_ids = (
            np.pad(x, more, constant_values=EMPTY) for x in (self.sequence_ids, self.prompt_ids)
        )
        self.start = np.pad(self.start, more)

    # Columns

    def move_columns(self, first: int, length: int) -> None:
        """Drop columns before ``first`` (negative: add some there), then have ``length``."""
        lengths = self.buckets.lengths_for(self.sequence_ids.shape[1])
        at, to = lengths.index(self.length), lengths.index(length)
        # From each length to the next: as few programs as there are lengths.
        between = range(at + 1, to + 1) if to > at else range(at - 1, to - 1, -1)
        ways = [(lengths[i], 0) for i in between]
        if first:
            ways.insert(len(ways) if first < 0 else 0, (0, first))
        for more, at_first in ways:
            self.state = self.engine.move(self.state, length=more, first=at_first)
        self.column, self.start = self.column - first, self.start - first
        self.length = length

    def ensure_columns(self, most: int) -> None:
        """Have at least a column for the next token, and drop first columns that no row attends to.

        Args:
          most: own tokens of the longest row, the last one drawn included.
        """
        engine, lengths = self.engine, self.buckets.lengths_for(self.sequence_ids.shape[1])
        if engine.uses_kernel:
            return
        if engine.row_columns:
            if most + engine.draft_tokens > self.length:
                self.move_columns(0, next(n for n in lengths if n >= most + engine.draft_tokens))
        elif self.column + engine.spare_columns >= self.length:
            first, rows = int(self.start[self.live].min()), self.sequence_ids.shape[1]
            first, length = self.buckets.next_columns(first, self.column, self.length, rows)
            self.move_columns(first, length)
