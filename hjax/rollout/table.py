"""Who has which row of an engine's state, and how many rows and columns it has."""

from __future__ import annotations

import numpy as np

from hjax.rollout.engine import Engine
from hjax.rollout.requests import Ticket
from hjax.rollout.shapes import STEPS, Shapes
from hjax.rollout.slots import State


class Table:
    """Rows of a state that grows with who comes, and shrinks with who goes.

    Args:
      engine: whose state it is.
      shapes: rows and columns that a state may have.
      max_tokens: of a prompt and its response together.

    Attributes:
      rows: of each row who has it.
      start: int64 like it, the column of its first token.
      state: None before anybody comes.
      length: columns of the state.
      column: that the next token goes into.
    """

    def __init__(self, engine: Engine, shapes: Shapes, max_tokens: int):
        self.engine, self.shapes, self.max_tokens = engine, shapes, max_tokens
        self.rows: list[Ticket | None] = [None] * shapes.rows[0]
        self.start = np.zeros(len(self.rows), np.int64)
        self.length = self.column = 0
        self.state: State | None = None

    @property
    def busy(self) -> bool:
        """Whether anybody has a row."""
        return any(row is not None for row in self.rows)

    def give_up(self, tickets: set[Ticket]) -> None:
        """Their rows are free."""
        self.rows = [None if row in tickets else row for row in self.rows]

    def halt(self, rows: np.ndarray) -> None:
        """Draw no more for the rows that ``rows``, bool [rows], has."""
        if rows.any() and self.state is not None:
            self.state = self.engine.halt(self.state, rows)

    def taken(self) -> np.ndarray:
        """int [parts], rows that somebody has, of each data-parallel part."""
        there = np.array([row is not None for row in self.rows])
        return there.reshape(self.engine.parts, -1).sum(axis=1)

    def seat(self, entering: list[Ticket], each: int) -> tuple[list[Ticket | None], np.ndarray]:
        """Give rows to as many as there are free ones for, by turns of the parts.

        Args:
          entering: who.
          each: entries of each part in what the engine is given.

        Returns:
          who enters, by entry, and of each entry its row within its part, one beyond for nobody.
        """
        parts = self.engine.parts
        here = len(self.rows) // parts
        free = np.array([row is None for row in self.rows]).reshape(parts, here)
        rows = [np.flatnonzero(free[part]) for part in range(parts)]
        seats = [(part, rows[part][i]) for i in range(each) for part in range(parts)
                 if i < len(rows[part])]  # fmt: skip
        entries: list[Ticket | None] = [None] * (parts * each)
        where = np.full(parts * each, here, np.int32)
        used = [0] * parts
        for ticket, (part, row) in zip(entering, seats[: len(entering)], strict=True):
            at = part * each + used[part]
            used[part] += 1
            entries[at], where[at] = ticket, row
            place = part * here + int(row)
            self.rows[place] = ticket
            self.start[place] = self.column - len(ticket.request.prompt)
        return entries, where

    def ready(self, tokens: int, rows: int) -> None:
        """A state of so many rows at least, where prompts of so many tokens may end in the next
        column, or begin."""
        engine, shapes = self.engine, self.shapes
        if self.state is None:
            self.column = tokens
            # For the kernel all that a row may ever need.
            self.length = shapes.longer(self.max_tokens if engine.by_kernel else tokens, rows)
            self.state = engine.empty(shapes.size(rows, self.length), tokens)
            self._widen(rows, new=True)
            return
        if rows > len(self.rows):
            self.state = shapes.widened(self.state, rows)
            self._widen(rows)
        if engine.by_row and not engine.by_kernel:
            self._move(0, max(self.length, self._longer(tokens)))
        elif tokens > self.column and not engine.by_row:
            length = max(self.length, self._longer(tokens))
            # Further than is asked, as the next prompt is likely to be longer still.
            further = min(2 * STEPS, length - shapes.spare - tokens)
            self._move(self.column - tokens - further, length)

    def _widen(self, rows: int, new: bool = False) -> None:
        """Who has which row, of a state of more rows, or of a new one, where nobody is."""
        parts = self.engine.parts
        here, old = rows // parts, 0 if new else len(self.rows) // parts
        held: list[Ticket | None] = [None] * rows
        start = np.zeros(rows, np.int64)
        for part in range(parts):
            to, of = (slice(part * n, part * n + old) for n in (here, len(self.rows) // parts))
            held[to], start[to] = self.rows[of], self.start[of]
        self.rows, self.start = held, start

    def narrow(self) -> None:
        """Leave slots behind that nobody has, where a state may have so few."""
        parts, taken = self.engine.parts, int(self.taken().max())
        rows = next(n for n in self.shapes.rows if n // parts >= taken)
        if self.state is None or rows >= len(self.rows):
            return
        length = next(n for n in self.shapes.lengths_of(rows) if n >= self.length)
        if length > self.length:
            self._move(0, length)
        free = np.array([row is None for row in self.rows]).reshape(parts, -1)
        kept = np.sort(np.argsort(free, axis=1, kind="stable")[:, : rows // parts], axis=1)
        self.state = self.shapes.narrowed(self.state, kept)
        at = (kept + np.arange(parts)[:, None] * free.shape[1]).ravel()
        self.rows, self.start = [self.rows[i] for i in at], self.start[at]

    def _longer(self, columns: int) -> int:
        return self.shapes.longer(columns, len(self.rows))

    def _move(self, first: int, length: int) -> None:
        """Give up columns before ``first``, or put some there, and have so many."""
        assert self.state is not None
        lengths = self.shapes.lengths_of(len(self.rows))
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

    def make_room(self) -> None:
        """A column at least, and none at the beginning that nobody sees."""
        live = [(at, row) for at, row in enumerate(self.rows) if row is not None]
        if self.engine.by_row:
            most = max(len(row.request.prompt) + len(row.tokens) for _, row in live)
            if most + self.engine.lookup > self.length:
                self._move(0, self._longer(most))
        elif self.column == self.length:
            first = int(min(self.start[at] for at, _ in live))
            self._move(first, self._longer(self.column - first))
