"""The sizes that a service's programs have: few, so that all can be compiled beforehand.

Lengths are rounded up to these, and so is how many prompts are read together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hjax.kernels.cache_axis import TILE
from hjax.models.flat import rooms
from hjax.rollout.engine import Engine
from hjax.rollout.prefixes import columns_for
from hjax.rollout.row_sampling import Sizes
from hjax.rollout.slots import Size, State

# Tokens between two looks at who waits and who listens.
STEPS = 8
# Prompts that are read together: not more, so that others do not wait long for their next tokens.
TOGETHER = (1, 4, 8)
# Columns for what is new of prompts at least; others are powers of two times as many.
NEW = 32
# Tokens of a prompt that are read at a time, for the same reason; whole blocks.
CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Of a service.

    Attributes:
      engine: its programs.
      slots: requests that are answered at a time.
      limit: tokens of a prompt and its response together.
      own: room for options of each request's own.
    """

    engine: Engine
    slots: int
    limit: int
    own: Sizes

    @property
    def together(self) -> list[int]:
        """Prompts of a data-parallel part that may be read together, growing."""
        return sorted({max(n // self.engine.parts, 1) for n in TOGETHER})

    @property
    def rows(self) -> list[int]:
        """Slots that a state may have, growing: where a free one costs as much as another, half as
        many requests have half, few have few, and one alone has its own."""
        parts = self.engine.parts
        if self.engine.by_kernel:
            return [self.slots]
        return sorted({parts, *(-(-self.slots // (n * parts)) * parts for n in (8, 2, 1))})

    @property
    def spare(self) -> int:
        """Columns that a state has more than are taken, so that it need not be moved often."""
        return 4 * STEPS + self.engine.lookup

    @property
    def lengths(self) -> list[int]:
        """Columns that a state may have, growing; the last is enough for the limit.

        Where every column is read, up to 256 half of them may be too many, then a quarter, beyond
        1024 a third. The kernel reads what is filled: one length is enough.
        """
        most = -(-(self.limit + self.spare) // TILE) * TILE
        if self.engine.by_kernel:
            return [most]
        made, length = [], 64
        while length < most:
            made.append(length)
            octave = 1 << (length.bit_length() - 1)
            length += octave if length < 256 else octave // (4 if length < 1024 else 2)
        return [*made, most]

    def lengths_of(self, rows: int) -> list[int]:
        """Those of a state of so many slots: of less than half, powers of two and the last, as few
        slots read few columns whatever there are."""
        if rows >= self.slots / 2:
            return self.lengths
        return [n for n in self.lengths if n & (n - 1) == 0 or n == self.lengths[-1]]

    def longer(self, columns: int, rows: int) -> int:
        """Columns of a state of so many slots in which so many are taken."""
        return next(n for n in self.lengths_of(rows) if n >= columns + self.spare)

    def new(self, tokens: int) -> int:
        """Columns for so many new tokens of prompts."""
        return columns_for(tokens, self.limit, NEW)

    def most_new(self, known: int) -> int:
        """Columns for new tokens at most, beside ``known`` for the whole prompts; 0: nothing is
        known of any."""
        return min(known, self.new(CHUNK)) if known else self.news[-1]

    def flat(self, each: int, new: int, known: int) -> list[int]:
        """Rooms for the tokens of prompts that are read together without padding, growing; 0, the
        last: with it.

        Args:
          each: prompts of a data-parallel part.
          new: columns of each.
          known: as of ``most_new``.
        """
        if not self.engine.reads_flat or each == 1:
            return [0]
        without = rooms(each * new)
        # Else the columns of all are half of those of twice as long ones.
        return [*without, 0] if new == self.most_new(known) else [*without]

    def room(self, tokens: Sequence[Sequence[int]], each: int, known: int) -> tuple[int, int]:
        """Columns for new tokens of prompts, and room for them without padding.

        Args:
          tokens: that are new of each prompt, by data-parallel part.
          each, known: as of ``flat``.
        """
        longest = max(max(part, default=1) for part in tokens)
        # An entry that fills up has a token too.
        total = max(sum(part) + each - len(part) for part in tokens)
        return next(
            (new, flat)
            for new in self.news
            if longest <= new
            for flat in self.flat(each, new, known)
            if total <= (flat or each * new)
        )

    @property
    def news(self) -> list[int]:
        """All that ``new`` may say, growing."""
        return sorted({self.new(n) for n in range(1, self.limit + 1)})

    def narrowed(self, state: State, kept: np.ndarray) -> State:
        """A state with fewer slots, int [parts, rows] of each data-parallel part."""
        numbers = kept.ravel().astype(np.int32)
        return self.engine.move(state, numbers, numbers)

    def widened(self, state: State, rows: int) -> State:
        """A state with more slots, the old ones first in each data-parallel part."""
        parts = self.engine.parts
        numbers = np.tile(np.arange(rows // parts, dtype=np.int32), parts)
        return self.engine.move(state, numbers, numbers)

    def size(self, rows: int, length: int) -> Size:
        """Of a state of so many slots and columns."""
        text = self.limit if self.engine.lookup else 0
        return Size(rows, rows, 1, 0, length, text, self.own, self.own.penalties)
