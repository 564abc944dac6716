"""The sizes that a service's programs have: few, so that all can be compiled beforehand.

Lengths are rounded up to these, and so is how many prompts are read together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from hjax.models.continuing import BLOCK
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.prefixes import Beginning, Prefixes, columns_for, known_columns, known_of
from hjax.rollout.row_sampling import Sizes
from hjax.rollout.slots import Admission, How, Known, Prompts, Running, Size, State

# Tokens between two looks at who waits and who listens.
STEPS = 8
# Prompts that are read together: not more, so that others do not wait long for their next tokens.
TOGETHER = (1, 2, 8)
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
        """Slots that a state may have, growing: where a free one costs as much as another, few
        requests have few."""
        parts = self.engine.parts
        few = self.slots if self.engine.by_kernel else -(-self.slots // (8 * parts)) * parts
        return sorted({few, self.slots})

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
        most = -(-(self.limit + self.spare) // BLOCK) * BLOCK
        if self.engine.by_kernel:
            return [most]
        made, length = [], 64
        while length < most:
            made.append(length)
            octave = 1 << (length.bit_length() - 1)
            length += octave if length < 256 else octave // (4 if length < 1024 else 2)
        return [*made, most]

    def longer(self, columns: int) -> int:
        """Columns of a state in which so many are taken."""
        return next(n for n in self.lengths if n >= columns + self.spare)

    def new(self, tokens: int) -> int:
        """Columns for so many new tokens of prompts."""
        return columns_for(tokens, self.limit, NEW)

    def widened(self, state: State, rows: int) -> State:
        """A state with more slots, the old ones first in each data-parallel part."""
        parts = self.engine.parts
        numbers = np.tile(np.arange(rows // parts, dtype=np.int32), parts)
        return self.engine.move(state, numbers, numbers)

    def size(self, rows: int, length: int) -> Size:
        """Of a state of so many slots and columns."""
        text = self.limit if self.engine.lookup else 0
        return Size(rows, rows, 1, 0, length, text, self.own)


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Compiles every program that requests may need, whatever their lengths.

    Attributes:
      shapes: of the service.
      params: of its model.
      prefixes: what it keeps; None: nothing.
      nobody: an admission of so many entries and columns, of which nobody is there.
    """

    shapes: Shapes
    params: Weights
    prefixes: Prefixes | None
    nobody: Callable[[int, int, Known | None], Admission]

    def run(self, told: Callable[[str], None]) -> None:
        """``told`` is what is compiled next, in a few words."""
        read = []
        for each in self.shapes.together:
            told(f"prompts, {each * self.shapes.engine.parts} at a time")
            read += list(self._prompts(each * self.shapes.engine.parts))
        for rows in self.shapes.rows:
            for length in self.shapes.lengths:
                told(f"{rows} slots of {length} tokens")
                self._slots(rows, length, read)
        if self.prefixes is not None:
            told("long prompts")
            self.prefixes.warm_up_reading(self.params, CHUNK, self.shapes.limit)

    def _prompts(self, entries: int) -> Iterator[tuple[Prompts, Running]]:
        """So many, read together, once for each number of columns."""
        limit = self.shapes.limit
        news = {self.shapes.new(n) for n in range(1, limit + 1)}
        if self.prefixes is None:
            for new in sorted(news):
                yield self._read(entries, new, None)
            return
        for columns in known_columns(limit):
            made = None
            for new in sorted(n for n in news if n <= min(columns, self.shapes.new(CHUNK))):
                nothing = [Beginning()] * entries
                made = self._read(
                    entries, new, known_of([()] * entries, nothing, columns)
                )
            if made is not None:
                yield made

    def _read(self, entries: int, new: int, known: Known | None) -> tuple[Prompts, Running]:
        asked = self.nobody(entries, new, known)
        blocks = None if self.prefixes is None else self.prefixes.blocks
        counted = self.shapes.own.penalties
        engine = self.shapes.engine
        prompts, rows, _ = engine.prefill(How(), self.params, asked, 1, counted, blocks)
        return prompts, rows

    def _slots(self, rows: int, length: int, read: list[tuple[Prompts, Running]]) -> None:
        engine, lengths = self.shapes.engine, self.shapes.lengths
        state = engine.empty(self.shapes.size(rows, length), length)
        for prompts, running in read:
            nowhere = np.full(running.drawn.shape, rows, np.int32)
            state = engine.insert(state, prompts, running, nowhere, nowhere)
        state, _ = engine.decode(How(), self.params, state, 0, STEPS + engine.lookup)
        state = engine.halt(state, np.zeros(rows, bool))
        if self.prefixes is not None:
            self.prefixes.warm_up_keeping(state)
        at = lengths.index(length)
        if len(lengths) > 1 and not engine.by_row:
            state = engine.move(state, first=1)
        for near in (at - 1, at + 1):
            if 0 <= near < len(lengths):
                state = engine.move(state, length=lengths[near])
                state = engine.move(state, length=length)
        if rows < self.shapes.slots:
            self.shapes.widened(state, self.shapes.slots)
