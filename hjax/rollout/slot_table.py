"""Who has which row of an engine's state, and how many rows and columns it has.

One table for a rollout's schedule and for a service: what differs is who enters when
(``hjax.rollout.scheduler``, ``hjax.rollout.service``), and which sizes there are
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
from hjax.rollout.slot_state import Admission, DecodedTokens, SlotSizes


class SlotTableShapes(Protocol):
    """Sizes that a table's states may have; rows are those of a data-parallel part."""

    @property
    def steps(self) -> int:
        """Tokens that a row draws in a dispatch."""

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Of a state."""

    def lengths_for(self, rows: int) -> list[int]:
        """Columns of states of so many rows, growing."""

    def shares_prompts(self, rows: int) -> bool:
        """Whether prompts stand once for their samples; else each row has its own."""

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """The column that is to be the first, and how many there are to be, where all of
        ``length`` are taken up to ``column`` and nobody sees those before ``first``."""


class SlotTable:
    """Rows of a state that grows with who comes, and shrinks with who goes.

    Args:
      engine: whose state it is.
      shapes: rows and columns that a state may have.
      samples: sequences of a prompt, whose numbers follow one another.

    Attributes:
      who: int [parts, rows], the number of each row's sequence; NOBODY: it is free.
      group: int [parts, groups], the number of each group's prompt, the last that it had.
      start: int [parts, rows], the column of each one's first token.
      state: of the engine; None before anybody comes.
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
        """A new state, where nobody is."""
        parts, size = self.engine.parts, self.buckets.state_sizes(rows, length)
        self.sequence_ids = np.full((parts, rows), EMPTY)
        self.prompt_ids = np.full((parts, size.groups // parts), EMPTY)
        self.start = np.zeros(self.sequence_ids.shape, np.int64)
        self.length, self.column = length, column
        self.state = self.engine.empty(size, column)
        return self

    @property
    def live(self) -> np.ndarray:
        """bool [parts, rows], which somebody has."""
        return self.sequence_ids != EMPTY

    @property
    def max_live_rows(self) -> int:
        """Rows of the part that has most of these."""
        return int(self.live.sum(axis=1).max())

    def free_groups(self) -> list[np.ndarray]:
        """int [groups] by part, those of whose prompts no sequence is left."""
        prompts = self.sequence_ids // self.samples
        pairs = zip(self.prompt_ids, prompts, strict=True)
        return [np.flatnonzero((g == EMPTY) | ~np.isin(g, own)) for g, own in pairs]

    def assign(self, part: int, group: int, ids: np.ndarray, before: int) -> np.ndarray:
        """Give a free group to a prompt.

        Args:
          part, group: where.
          ids: int [samples], its sequences; NOBODY: one that does not enter.
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
        """Those that ``rows``, bool [parts, rows], has are free."""
        self.sequence_ids[rows] = EMPTY

    def stop_rows(self, rows: np.ndarray) -> None:
        """Draw no more for the rows that ``rows``, bool [parts, rows], has."""
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
        token_bitmask: Any = None,
        enough_live: int = 0,
    ) -> DecodedTokens:
        """As ``Engine.decode``, as far as there are columns."""
        engine, most = self.engine, self.buckets.steps + self.engine.draft_tokens
        if not engine.per_row_columns:
            steps = min(steps, self.length - self.column - engine.spare_columns)
        self.state, drawn = engine.decode(
            sampling, params, self.state, steps, most, token_bitmask, enough_live
        )
        self.column += drawn.steps
        return drawn

    # Rows

    def group_of_row(self) -> np.ndarray:
        """int32 [parts, rows]: the group that each row's prompt is in; 0 where it is free."""
        prompts = self.sequence_ids // self.samples
        found = (self.prompt_ids[:, None] == prompts[:, :, None]).argmax(axis=2)
        return np.where(self.live, found, 0).astype(np.int32)

    def update_sharing(self) -> None:
        """Tell the engine who shares which prompt."""
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
        """Leave rows behind that nobody has, so that each part has so many."""
        order = np.argsort(~self.live, axis=1, kind="stable")
        kept = np.sort(order[:, :rows], axis=1).astype(np.int32)
        groups = None
        if not self.buckets.shares_prompts(self.sequence_ids.shape[1]):
            groups = kept
        elif not self.buckets.shares_prompts(rows):  # each takes its prompt along
            groups = np.take_along_axis(self.group_of_row(), kept, axis=1)
        self.state = self.engine.move(
            self.state, kept.ravel(), None if groups is None else groups.ravel()
        )
        self.sequence_ids, self.start = (
            np.take_along_axis(x, kept, 1) for x in (self.sequence_ids, self.start)
        )
        if groups is not None:
            self.prompt_ids = np.take_along_axis(self.prompt_ids, groups, axis=1)

    def grow_rows(self, rows: int) -> None:
        """Have so many rows in each part, the old ones first; each with a prompt of its own."""
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
        """Give up columns before ``first``, or put some there, and have so many."""
        lengths = self.buckets.lengths_for(self.sequence_ids.shape[1])
        at, to = lengths.index(self.length), lengths.index(length)
        # From each to the next: as few programs as there are lengths.
        between = range(at + 1, to + 1) if to > at else range(at - 1, to - 1, -1)
        ways = [(lengths[i], 0) for i in between]
        if first:
            ways.insert(len(ways) if first < 0 else 0, (0, first))
        for more, at_first in ways:
            self.state = self.engine.move(self.state, length=more, first=at_first)
        self.column, self.start = self.column - first, self.start - first
        self.length = length

    def ensure_columns(self, most: int) -> None:
        """A column at least for the next token, and none at the beginning that nobody sees.

        Args:
          most: tokens of the row that has most among its own, the last one drawn included.
        """
        engine, lengths = self.engine, self.buckets.lengths_for(self.sequence_ids.shape[1])
        if engine.uses_kernel:
            return
        if engine.per_row_columns:
            if most + engine.draft_tokens > self.length:
                self.move_columns(0, next(n for n in lengths if n >= most + engine.draft_tokens))
        elif self.column + engine.spare_columns >= self.length:
            first, rows = int(self.start[self.live].min()), self.sequence_ids.shape[1]
            self.move_columns(*self.buckets.next_columns(first, self.column, self.length, rows))
