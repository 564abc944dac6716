"""Bucketing: the few sizes that the programs of services and rollouts have.

Lengths and prefill batch sizes are rounded up to buckets, so that every program can be compiled
beforehand. Rows are counted per data-parallel part.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from hjax.kernels.cache_axis import TILE
from hjax.models.packed_prefill import packed_sizes
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.prefix_cache import bucketed_columns
from hjax.rollout.rollout_job import RolloutJob
from hjax.rollout.row_sampling import SamplingSizes
from hjax.rollout.slot_state import SlotSizes

# Prompts in a prefill batch. No more, so that running requests soon get their next tokens.
PREFILL_BATCHES = (1, 4, 8)
# Fewest columns for the uncached tokens of prompts; other buckets are powers of two times as many.
MIN_PROMPT_COLUMNS = 32
# Columns for new tokens of rows that stay in their slots, and packed tokens per row: few, as each
# compiles a program.
CONTINUATION_COLUMNS = (8, 64)
PACKED_PER_ROW = {8: (2, 3, 5), 64: (5, 20)}
# Most bytes of a layer's attention scores in the pass over these tokens.
CONTINUATION_BYTES = 1 << 28
# Tokens of a prefill chunk, a whole number of blocks. Short, for the same reason.
PREFILL_CHUNK = 512
# Columns of a rollout's new KV cache; each further bucket has twice as many.
MIN_COLUMNS = 64
# Rows over all devices below which halving saves nothing: reading the weights dominates.
MIN_ROWS = 8


@dataclasses.dataclass(frozen=True)
class ServiceBuckets:
    """Buckets of a service.

    Attributes:
      engine: the engine whose programs are bucketed.
      slots: requests that run at a time.
      limit: most tokens of a prompt and its response together.
      sampling_sizes: room for each request's own sampling options.
      batches: prompts in a prefill batch, over all parts.
    """

    engine: Engine
    slots: int
    limit: int
    sampling_sizes: SamplingSizes
    batches: tuple[int, ...] = PREFILL_BATCHES
    steps = 8  # tokens per dispatch; between dispatches requests enter and chunks go out

    @property
    def prefill_batches(self) -> list[int]:
        """Prompts of a data-parallel part in one prefill batch, ascending."""
        return sorted({max(n // self.engine.parts, 1) for n in self.batches})

    @property
    def rows(self) -> list[int]:
        """Rows that a state may have, ascending. Where a free row costs as much as a used one, the
        state shrinks to a half, an eighth or one row when few requests run."""
        parts = self.engine.parts
        if self.engine.uses_kernel:
            return [self.slots // parts]
        return sorted({1, *(-(-self.slots // (n * parts)) for n in (8, 2, 1))})

    @property
    def spare_columns(self) -> int:
        """Free columns of a new state, so that it is not resized often."""
        return 4 * self.steps + self.engine.draft_tokens

    @property
    def lengths(self) -> list[int]:
        """Columns that a state may have, ascending; the last is enough for the limit.

        Without the kernel every column is read. Buckets then grow so that at most half of the
        columns are unused up to 256, a quarter up to 1024, a third beyond. The kernel reads only
        filled columns, so one length is enough.
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
        """The lengths of a state with this many rows. Below half of the slots only powers of two
        and the last: few rows read few columns at any length."""
        if rows * self.engine.parts >= self.slots / 2:
            return self.lengths
        return [n for n in self.lengths if n & (n - 1) == 0 or n == self.lengths[-1]]

    def length_for(self, columns: int, rows: int) -> int:
        """Columns of a state of ``rows`` rows that has ``columns`` filled."""
        return next(n for n in self.lengths_for(rows) if n >= columns + self.spare_columns)

    def prompt_columns(self, tokens: int) -> int:
        """Columns for this many uncached tokens of prompts."""
        return bucketed_columns(tokens, self.limit, MIN_PROMPT_COLUMNS)

    def max_prompt_columns(self, known: int) -> int:
        """Most columns for uncached tokens; ``known``: columns of whole prompts, or 0."""
        chunk = self.prompt_columns(PREFILL_CHUNK)
        return min(known, chunk) if known else self.prompt_column_sizes[-1]

    def packed_sizes(self, each: int, new: int, known: int) -> list[int]:
        """Sizes of a packed prefill (prompts without padding), ascending; the last, 0, is padded.

        Args:
          each: prompts of a data-parallel part.
          new: columns of each.
          known: as in ``max_prompt_columns``.
        """
        if not self.engine.packs_prompts or each == 1:
            return [0]
        without = packed_sizes(each * new)
        # A smaller bucket has half the columns: more tokens than its packed sizes take this one.
        return [*without, 0] if new == self.max_prompt_columns(known) else [*without]

    def prefill_size(
        self, tokens: Sequence[Sequence[int]], each: int, known: int
    ) -> tuple[int, int]:
        """Columns for uncached tokens of a prefill batch, and its packed size (0: padded).

        Args:
          tokens: uncached tokens of each prompt, by data-parallel part.
          each, known: as in ``packed_sizes``.
        """
        longest = max(max(part, default=1) for part in tokens)
        # A padding entry has a token too.
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
        """All values of ``prompt_columns``, ascending."""
        return sorted({self.prompt_columns(n) for n in range(1, self.limit + 1)})

    def shares_prompts(self, rows: int) -> bool:
        """See ``SlotTableShapes``: each request has its own prompt."""
        return False

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """See ``SlotTableShapes``."""
        return first, self.length_for(column - first, rows)

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Sizes of a state with this many rows and columns."""
        text, rows = self.limit if self.engine.draft_tokens else 0, rows * self.engine.parts
        sampling = self.sampling_sizes
        return SlotSizes(rows, rows, 1, 0, length, text, sampling, sampling.penalties)


class TurnBuckets(ServiceBuckets):
    """Buckets of turns, of which all begin together: fewer than a service's, as a run compiles all
    of their programs before its first turn."""

    @property
    def rows(self) -> list[int]:
        """All rows, and a quarter of them where more than a few are used and none stay."""
        most = self.slots // self.engine.parts
        if self.engine.row_columns or self.slots <= MIN_ROWS:
            return [most]
        return sorted({-(-most // 4), most})

    @property
    def lengths(self) -> list[int]:
        """Powers of two from 128, and enough for the limit."""
        *less, most = super().lengths
        return [*(n for n in less if n >= 128 and n & (n - 1) == 0), most]

    def prompt_columns(self, tokens: int) -> int:
        """As of a service, with a quarter of the sizes."""
        return bucketed_columns(tokens, self.limit, MIN_PROMPT_COLUMNS, 4)

    def packed_sizes(self, each: int, new: int, known: int) -> list[int]:
        """Half of the padded columns, or padded."""
        packs = self.engine.packs_prompts and each > 1
        return [*packed_sizes(each * new)[: int(packs)], 0]

    @property
    def continuation_sizes(self) -> list[tuple[int, int]]:
        """Columns for the new tokens of a row that is continued, and packed sizes (0: padded),
        ascending. Scores of all columns at once are kept below ``CONTINUATION_BYTES``."""
        rows, heads = self.rows[-1], self.engine.network.config.heads
        few, many = CONTINUATION_COLUMNS
        scores = rows * self.engine.parts * heads * self.lengths[-1] * 4
        columns = [few, many] if many * scores <= CONTINUATION_BYTES else [few]
        return [
            (new, each * rows)
            for new in columns
            for each in (*(n for n in PACKED_PER_ROW[new] if rows > 1), 0)
        ]

    def continuation_size(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The smallest of ``continuation_sizes``.

        Args:
          tokens: new tokens of each row of the state, by data-parallel part.
        """
        longest, parts = max(tokens), self.engine.parts
        total = np.sum(np.reshape(tokens, (parts, -1)), axis=1).max()
        return next(
            (new, packed)
            for new, packed in self.continuation_sizes
            if longest <= new and (total <= packed or not packed)
        )


def lengths(limit: int, refills: bool) -> list[int]:
    """Columns that a rollout's state may have, ascending; the last is enough for ``limit`` tokens.

    Args:
      limit: most tokens of a sequence.
      refills: whether sequences enter while others run. Then there are spare columns, so that dead
        ones are not dropped after every few tokens.
    """
    most = limit + 4 * STEPS if refills else limit
    made = []
    length = MIN_COLUMNS
    while length < most:
        made.append(length)
        length *= 2
    return [*made, most]


def halved_rows(rows: int, parts: int) -> list[int]:
    """Rows of a data-parallel part that a rollout's state may have, descending."""
    made = [rows]
    while made[-1] % 2 == 0 and made[-1] * parts // 2 >= MIN_ROWS:
        made.append(made[-1] // 2)
    return made


class RolloutBuckets:
    """Buckets of a rollout's states.

    Args:
      engine: the engine whose programs are bucketed.
      job: what is drawn.
      prompt: columns of a prompt.

    Attributes:
      groups: prompts of a data-parallel part at a time.
      refills: whether further prompts wait for slots.
      resumed_tokens: tokens that each response has as it enters.
      rows: rows that a state may have, descending.
      lengths: columns that a state may have, ascending: those of whole responses between the tokens
        there are now and those there will be.
      states: (rows, columns) of all states. Few rows get no program of their own before the tail.
      drops_columns: whether columns that no row attends to any more are dropped.
    """

    steps = STEPS

    def __init__(self, engine: Engine, job: RolloutJob, prompt: int):
        self.engine, self.job, self._prompt = engine, job, prompt
        parts, samples, slots = engine.parts, job.samples, job.config.slots
        # The dry run describes updates by a mini-batch, which may have fewer prompts than parts.
        self.groups = max(job.prompts.shape[0] // parts, 1)
        if slots:
            self.groups = min(self.groups, max(slots // (samples * parts), 1))
        self.refills = self.groups * parts < job.prompts.shape[0]
        self.drops_columns = self.refills and not engine.row_columns
        self.resumed_tokens = 0 if job.resumed is None else job.resumed.start
        self.rows = [self.groups * samples]
        # The same buckets in all parts of a partial rollout, so that these share programs.
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
        """The next smaller number of rows; 0: the state does not shrink."""
        made = self.rows[self.rows.index(rows) + 1 :][:1]
        return made[0] if made and (made[0], length) in self.states else 0

    def next_length(self, length: int) -> int:
        """The next larger number of columns, or the last again."""
        return next((n for n in self.lengths if n > length), length)

    def lengths_for(self, rows: int) -> list[int]:
        """See ``SlotTableShapes``."""
        return self.lengths

    def shares_prompts(self, rows: int) -> bool:
        """See ``SlotTableShapes``; in a small state each row has its own prompt."""
        return self.job.samples > 1 and (rows > self.groups or self.engine.uses_kernel)

    def next_columns(self, first: int, column: int, length: int, rows: int) -> tuple[int, int]:
        """See ``SlotTableShapes``."""
        longer = self.next_length(length)
        if column - first > length - STEPS and longer != length:
            return 0, longer
        return first, length

    def state_sizes(self, rows: int, length: int) -> SlotSizes:
        """Sizes of a state with this many rows and columns."""
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
