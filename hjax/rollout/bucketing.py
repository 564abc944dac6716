"""The sizes that programs of services and rollouts have: few, so that all can be compiled before.

Lengths are rounded up to these, and so is how many prompts are read together. Rows are those of a
data-parallel part.
"""

import dataclasses
from collections.abc import Sequence

from hjax.kernels.cache_axis import TILE
from hjax.models.packed_prefill import packed_sizes
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.prefix_cache import columns_for
from hjax.rollout.rollout_job import RolloutJob
from hjax.rollout.row_sampling import SamplingSizes
from hjax.rollout.slot_state import SlotSizes

# Prompts that are read together: not more, so that others do not wait long for their next tokens.
TOGETHER = (1, 4, 8)
# Columns for what is new of prompts at least; others are powers of two times as many.
NEW = 32
# Tokens of a prompt that are read at a time, for the same reason; whole blocks.
CHUNK = 512
# Columns of a rollout's new cache; each further one has twice as many.
COLUMNS = 64
# Rows of all devices below which halving them saves nothing: weights are what is read.
FEWEST = 8


@dataclasses.dataclass(frozen=True)
class ServiceBuckets:
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
    own: SamplingSizes
    steps = 8  # tokens between two looks at who waits and who listens

    @property
    def together(self) -> list[int]:
        """Prompts of a data-parallel part that may be read together, growing."""
        return sorted({max(n // self.engine.parts, 1) for n in TOGETHER})

    @property
    def rows(self) -> list[int]:
        """Rows that a state may have, growing: where a free one costs as much as another, half as
        many requests have half, few have few, and one alone has its own."""
        parts = self.engine.parts
        if self.engine.by_kernel:
            return [self.slots // parts]
        return sorted({1, *(-(-self.slots // (n * parts)) for n in (8, 2, 1))})

    @property
    def spare(self) -> int:
        """Columns that a state has more than are taken, so that it need not be moved often."""
        return 4 * self.steps + self.engine.lookup

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
        """Those of a state of so many rows: of less than half, powers of two and the last, as few
        rows read few columns whatever there are."""
        if rows * self.engine.parts >= self.slots / 2:
            return self.lengths
        return [n for n in self.lengths if n & (n - 1) == 0 or n == self.lengths[-1]]

    def longer(self, columns: int, rows: int) -> int:
        """Columns of a state of so many rows in which so many are taken."""
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
        without = packed_sizes(each * new)
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

    def shared(self, rows: int) -> bool:
        """As of ``SlotTableShapes``: each request has its own prompt."""
        return False

    def after(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """As of ``SlotTableShapes``."""
        return first, self.longer(column - first, rows)

    def size(self, rows: int, length: int) -> SlotSizes:
        """Of a state of so many rows and columns."""
        text, rows = self.limit if self.engine.lookup else 0, rows * self.engine.parts
        return SlotSizes(rows, rows, 1, 0, length, text, self.own, self.own.penalties)


def lengths(limit: int, refills: bool) -> list[int]:
    """Columns that a rollout's state may have, growing; the last is enough for sequences of
    ``limit``.

    Args:
      limit: tokens of a sequence.
      refills: whether sequences enter while others run: then some columns more, so that those
        which nobody sees any more are not given up after every few tokens.
    """
    most = limit + 4 * STEPS if refills else limit
    made = []
    length = COLUMNS
    while length < most:
        made.append(length)
        length *= 2
    return [*made, most]


def halves(rows: int, parts: int) -> list[int]:
    """Rows of a data-parallel part that a rollout's state may have, falling."""
    made = [rows]
    while made[-1] % 2 == 0 and made[-1] * parts // 2 >= FEWEST:
        made.append(made[-1] // 2)
    return made


class RolloutBuckets:
    """Of a rollout's states.

    Args:
      engine: its programs.
      work: what is drawn.
      prompt: columns of a prompt.

    Attributes:
      groups: prompts of a part at a time.
      refills: whether others wait.
      before: tokens that each response has as it enters.
      rows: that a state may have, falling.
      lengths: columns that it may have, growing: of those of whole responses, from what is there to
        what will be.
      pairs: rows and columns of all states: few rows are not worth a program before the tail.
      drops_columns: whether columns that nobody sees any more are given up.
    """

    steps = STEPS

    def __init__(self, engine: Engine, work: RolloutJob, prompt: int):
        self.engine, self.work, self._prompt = engine, work, prompt
        parts, samples, slots = engine.parts, work.samples, work.config.slots
        # A mini-batch, of which the dry run describes an update, may have fewer prompts than parts.
        self.groups = max(work.prompts.shape[0] // parts, 1)
        if slots:
            self.groups = min(self.groups, max(slots // (samples * parts), 1))
        self.refills = self.groups * parts < work.prompts.shape[0]
        self.drops_columns = self.refills and not engine.by_row
        self.before = 0 if work.begun is None else work.begun.start
        self.rows = [self.groups * samples]
        # Of all parts of responses the same, so that these share their programs.
        every = [work.limit]
        if not engine.by_kernel:
            self.rows = halves(self.rows[0], parts)
            every = lengths(work.limit + engine.lookup, self.drops_columns)
        enough = work.end + engine.lookup + 4 * STEPS * self.drops_columns
        last = next((i for i, n in enumerate(every) if n >= enough), len(every) - 1)
        self.lengths = [n for n in every[: last + 1] if n > self.before] or every[-1:]
        self.pairs = [
            (rows, length)
            for i, rows in enumerate(self.rows)
            for length in self.lengths
            if i <= every.index(length) + 1 or length == every[-1]
        ]

    def fewer(self, rows: int, length: int) -> int:
        """The rows that follow these; 0: the state stays as it is."""
        made = self.rows[self.rows.index(rows) + 1 :][:1]
        return made[0] if made and (made[0], length) in self.pairs else 0

    def longer(self, length: int) -> int:
        """The columns that follow these, or the last again."""
        return next((n for n in self.lengths if n > length), length)

    def lengths_of(self, rows: int) -> list[int]:
        """As of ``SlotTableShapes``."""
        return self.lengths

    def shared(self, rows: int) -> bool:
        """As of ``SlotTableShapes``; few rows have each its own prompt."""
        return self.work.samples > 1 and (rows > self.groups or self.engine.by_kernel)

    def after(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """As of ``SlotTableShapes``."""
        longer = self.longer(length)
        if column - first > length - STEPS and longer != length:
            return 0, longer
        return first, length

    def size(self, rows: int, length: int) -> SlotSizes:
        """Of a state of so many rows and columns."""
        work, parts = self.work, self.engine.parts
        return SlotSizes(
            parts * rows,
            parts * min(self.groups, rows),
            work.samples if self.shared(rows) else 1,
            self._prompt,
            length,
            work.prompts.shape[1] + work.limit if self.engine.lookup else 0,
            counted=work.config.sampling.penalised,
        )
