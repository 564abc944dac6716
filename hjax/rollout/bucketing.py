"""The sizes that programs of services and rollouts have: few, so that all can be compiled before.

Lengths are rounded up to these, and so is how many prompts are read together. Rows are those of a
data-parallel part.
"""

import dataclasses
from collections.abc import Sequence

from hjax.kernels.cache_axis import TILE
from hjax.models.packed_prefill import packed_sizes
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.prefix_cache import bucketed_columns
from hjax.rollout.rollout_job import RolloutJob
from hjax.rollout.row_sampling import SamplingSizes
from hjax.rollout.slot_state import SlotSizes

# Prompts that are read together: not more, so that others do not wait long for their next tokens.
PREFILL_BATCHES = (1, 4, 8)
# Columns for what is new of prompts at least; others are powers of two times as many.
MIN_PROMPT_COLUMNS = 32
# Tokens of a prompt that are read at a time, for the same reason; whole blocks.
PREFILL_CHUNK = 512
# Columns of a rollout's new cache; each further one has twice as many.
MIN_COLUMNS = 64
# Rows of all devices below which halving them saves nothing: weights are what is read.
MIN_ROWS = 8


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
    sampling_sizes: SamplingSizes
    steps = 8  # tokens between two looks at who waits and who listens

    @property
    def prefill_batches(self) -> list[int]:
        """Prompts of a data-parallel part that may be read together, growing."""
        return sorted({max(n // self.engine.parts, 1) for n in PREFILL_BATCHES})

    @property
    def rows(self) -> list[int]:
        """Rows that a state may have, growing: where a free one costs as much as another, half as
        many requests have half, few have few, and one alone has its own."""
        parts = self.engine.parts
        if self.engine.uses_kernel:
            return [self.slots // parts]
        return sorted({1, *(-(-self.slots // (n * parts)) for n in (8, 2, 1))})

    @property
    def spare_columns(self) -> int:
        """Columns that a state has more than are taken, so that it need not be moved often."""
        return 4 * self.steps + self.engine.draft_tokens

    @property
    def lengths(self) -> list[int]:
        """Columns that a state may have, growing; the last is enough for the limit.

        Where every column is read, up to 256 half of them may be too many, then a quarter, beyond
        1024 a third. The kernel reads what is filled: one length is enough.
        """
        most = -(-(self.limit + self.spare_columns) // TILE) * TILE
        if self.engine.uses_kernel:
            return [most]
        made, length = [], 64
        while length < most:
            made.append(length)
            octave = 1 << (length.bit_length() - 1)
            length += octave if length < 256 else octave // (4 if length < 1024 else 2)
        return [*made, most]

    def lengths_for(self, rows: int) -> list[int]:
        """Those of a state of so many rows: of less than half, powers of two and the last, as few
        rows read few columns whatever there are."""
        if rows * self.engine.parts >= self.slots / 2:
            return self.lengths
        return [n for n in self.lengths if n & (n - 1) == 0 or n == self.lengths[-1]]

    def length_for(self, columns: int, rows: int) -> int:
        """Columns of a state of so many rows in which so many are taken."""
        return next(n for n in self.lengths_for(rows) if n >= columns + self.spare_columns)

    def prompt_columns(self, tokens: int) -> int:
        """Columns for so many new tokens of prompts."""
        return bucketed_columns(tokens, self.limit, MIN_PROMPT_COLUMNS)

    def max_prompt_columns(self, known: int) -> int:
        """Columns for new tokens at most, beside ``known`` for the whole prompts; 0: nothing is
        known of any."""
        return (
            min(known, self.prompt_columns(PREFILL_CHUNK))
            if known
            else self.prompt_column_sizes[-1]
        )

    def packed_sizes(self, each: int, new: int, known: int) -> list[int]:
        """Rooms for the tokens of prompts that are read together without padding, growing; 0, the
        last: with it.

        Args:
          each: prompts of a data-parallel part.
          new: columns of each.
          known: as of ``most_new``.
        """
        if not self.engine.packs_prompts or each == 1:
            return [0]
        without = packed_sizes(each * new)
        # Else the columns of all are half of those of twice as long ones.
        return [*without, 0] if new == self.max_prompt_columns(known) else [*without]

    def prefill_size(
        self, tokens: Sequence[Sequence[int]], each: int, known: int
    ) -> tuple[int, int]:
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
            for new in self.prompt_column_sizes
            if longest <= new
            for flat in self.packed_sizes(each, new, known)
            if total <= (flat or each * new)
        )

    @property
    def prompt_column_sizes(self) -> list[int]:
        """All that ``new`` may say, growing."""
        return sorted({self.prompt_columns(n) for n in range(1, self.limit + 1)})

    def shares_prompts(self, rows: int) -> bool:
        """As of ``SlotTableShapes``: each request has its own prompt."""
        return False

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """As of ``SlotTableShapes``."""
        return first, self.length_for(column - first, rows)

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Of a state of so many rows and columns."""
        text, rows = self.limit if self.engine.draft_tokens else 0, rows * self.engine.parts
        return SlotSizes(
            rows, rows, 1, 0, length, text, self.sampling_sizes, self.sampling_sizes.penalties
        )


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
    length = MIN_COLUMNS
    while length < most:
        made.append(length)
        length *= 2
    return [*made, most]


def halved_rows(rows: int, parts: int) -> list[int]:
    """Rows of a data-parallel part that a rollout's state may have, falling."""
    made = [rows]
    while made[-1] % 2 == 0 and made[-1] * parts // 2 >= MIN_ROWS:
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

    def __init__(self, engine: Engine, job: RolloutJob, prompt: int):
        self.engine, self.job, self._prompt = engine, job, prompt
        parts, samples, slots = engine.parts, job.samples, job.config.slots
        # A mini-batch, of which the dry run describes an update, may have fewer prompts than parts.
        self.groups = max(job.prompts.shape[0] // parts, 1)
        if slots:
            self.groups = min(self.groups, max(slots // (samples * parts), 1))
        self.refills = self.groups * parts < job.prompts.shape[0]
        self.drops_columns = self.refills and not engine.per_row_columns
        self.resumed_tokens = 0 if job.resumed is None else job.resumed.start
        self.rows = [self.groups * samples]
        # Of all parts of responses the same, so that these share their programs.
        every = [job.limit]
        if not engine.uses_kernel:
            self.rows = halved_rows(self.rows[0], parts)
            every = lengths(job.limit + engine.draft_tokens, self.drops_columns)
        enough = job.end + engine.draft_tokens + 4 * STEPS * self.drops_columns
        last = next((i for i, n in enumerate(every) if n >= enough), len(every) - 1)
        self.lengths = [n for n in every[: last + 1] if n > self.resumed_tokens] or every[-1:]
        self.states = [
            (rows, length)
            for i, rows in enumerate(self.rows)
            for length in self.lengths
            if i <= every.index(length) + 1 or length == every[-1]
        ]

    def fewer_rows(self, rows: int, length: int) -> int:
        """The rows that follow these; 0: the state stays as it is."""
        made = self.rows[self.rows.index(rows) + 1 :][:1]
        return made[0] if made and (made[0], length) in self.states else 0

    def next_length(self, length: int) -> int:
        """The columns that follow these, or the last again."""
        return next((n for n in self.lengths if n > length), length)

    def lengths_for(self, rows: int) -> list[int]:
        """As of ``SlotTableShapes``."""
        return self.lengths

    def shares_prompts(self, rows: int) -> bool:
        """As of ``SlotTableShapes``; few rows have each its own prompt."""
        return self.job.samples > 1 and (rows > self.groups or self.engine.uses_kernel)

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """As of ``SlotTableShapes``."""
        longer = self.next_length(length)
        if column - first > length - STEPS and longer != length:
            return 0, longer
        return first, length

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Of a state of so many rows and columns."""
        job, parts = self.job, self.engine.parts
        return SlotSizes(
            parts * rows,
            parts * min(self.groups, rows),
            job.samples if self.shares_prompts(rows) else 1,
            self._prompt,
            length,
            job.prompts.shape[1] + job.limit if self.engine.draft_tokens else 0,
            counted=job.config.sampling.penalised,
        )
