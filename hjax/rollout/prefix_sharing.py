"""Prompts of a rollout on their way into slots: beginnings that they share, chunks of long ones.

A system prompt or a few examples that a step's prompts begin with are read once, into blocks, and
each prompt from where its known beginning ends. While others are decoded, long prompts are read in
chunks, ahead of their slot. Blocks live for one rollout, as the next one has other weights.

What is done follows from the prompts alone, so that every process of a pool does the same, and a
resumed run what an undisturbed one does. Which programs there are follows from the prompts' length
alone, so that all can be compiled beforehand.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.models.append_attention import BLOCK
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.prefix_cache import CachedPrefix, PrefixCache, uncached_tokens, why_no_blocks
from hjax.rollout.rollout_job import EMPTY, RolloutJob
from hjax.rollout.slot_state import CachedPrompts

# Tokens of the longest prompt up to which prompts are read whole, each by itself.
SHORT_PROMPT = 256
# Tokens of a prompt that are read at a time; whole blocks.
PREFILL_CHUNK = 512
# Columns for what is new of prompts that are read together; the last are a chunk's.
PROMPT_COLUMNS = (128, PREFILL_CHUNK)
# Tokens of prompts that are read at a time, of a device: others wait, rather than that memory is
# needed for all of them at once.
MAX_PREFILL_TOKENS = 4096
# A beginning is read by itself where so many tokens are saved, in each data-parallel part.
MIN_SAVED_TOKENS = 512
# Room for shared beginnings, in prompts of the greatest length.
SHARED_PROMPTS = 4
# Chunks between two dispatches at most, while others are decoded.
MAX_CHUNKS = 4


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """A piece of prompts that several have, after what they have in common before it.

    Attributes:
      tokens: of these prompts, up to the piece's end.
      new: how many of these are the piece's own, the last ones.
    """

    tokens: tuple[int, ...]
    new: int


def find_shared_prefixes(
    prompts: Sequence[Sequence[int]], room: int, parts: int = 1
) -> tuple[list[SharedPrefix], list[tuple[int, ...]]]:
    """What is worth being read once for several prompts.

    Args:
      prompts: tokens of each.
      room: blocks for it.
      parts: data-parallel parts, each of which reads it.

    Returns:
      the pieces, each after those that it goes on from, and for each prompt the numbers of its
      pieces. They leave a token of every prompt at least.
    """
    blocks = [_in_blocks(prompt) for prompt in prompts]
    found: list[SharedPrefix] = []
    of: list[tuple[int, ...]] = [() for _ in prompts]
    waiting = [(list(range(len(prompts))), 0)]
    used = 0
    while waiting:
        members, at = waiting.pop(0)
        alike: dict[bytes, list[int]] = {}
        for number in members:
            if at < len(blocks[number]):
                alike.setdefault(blocks[number][at], []).append(number)
        for some in alike.values():
            first = blocks[some[0]]
            end = min(len(first), at + room - used)
            for other in (blocks[i] for i in some):
                unlike = (i for i in range(at, end) if other[i : i + 1] != first[i : i + 1])
                end = next(unlike, end)
            if (len(some) // parts - 1) * (end - at) * BLOCK < MIN_SAVED_TOKENS:
                continue
            used += end - at
            for number in some:
                of[number] = (*of[number], len(found))
            tokens = tuple(prompts[some[0]][: end * BLOCK])
            found.append(SharedPrefix(tokens, (end - at) * BLOCK))
            waiting.append((some, end))
    return found, of


def _in_blocks(prompt: Sequence[int]) -> list[bytes]:
    """Whole blocks of a prompt that leave a token of it."""
    count = max(len(prompt) - 1, 0) // BLOCK
    raw, size = np.asarray(prompt, np.int32).tobytes(), 4 * BLOCK
    return [raw[i * size : (i + 1) * size] for i in range(count)]


class PrefixSharing:
    """A rollout's prompts until they enter.

    Args:
      engine: that reads them.
      work: whose prompts they are.
      waiting: int [prompts], numbers of those that are to enter; None: all.

    Attributes:
      active: whether beginnings are kept and chunks read: where prompts may be longer than
        ``SHORT_PROMPT``, responses come whole, and the engine can. In parts each part reads
        anew what there is, prompts and responses together.
      known: int [prompts], tokens of each that it did not read, as another one of its
        data-parallel part had begun alike.
      prefixes: what is known; None before ``begin`` and after ``end``.
    """

    def __init__(self, engine: Engine, job: RolloutJob, waiting: np.ndarray | None = None):
        self._engine, self._job = engine, job
        count, self._limit = job.prompts.shape
        self.active = (
            self._limit > SHORT_PROMPT and not job.is_partial and not why_no_blocks(engine)
        )
        self._chunk = min(PREFILL_CHUNK, -(-self._limit // BLOCK) * BLOCK)
        self._shared_blocks = SHARED_PROMPTS * (self.columns // BLOCK)
        self._length = job.mask.sum(axis=1)
        self._order = np.arange(count) if waiting is None else waiting
        self._next = 0
        self._chunking = [EMPTY] * engine.parts
        self._path: list[tuple[int, ...]] = [()] * count
        self._pieces: list[tuple[int, ...]] = [()] * count
        self._shared: list[SharedPrefix] = []
        self._prefilled_by: set[tuple[int, int]] = set()
        self.cached_tokens = np.zeros(count, np.int32)
        self.cache: PrefixCache | None = None

    # Sizes

    @property
    def columns(self) -> int:
        """Of a prompt in the state."""
        return -(-self._limit // BLOCK) * BLOCK if self.active else self._limit

    @property
    def block_count(self) -> int:
        """Blocks of a part: of what is shared, and of the prompt that is being read."""
        return self._shared_blocks + self.columns // BLOCK

    @property
    def column_sizes(self) -> list[int]:
        """Columns in which what is new of prompts may be read; none: they are read whole."""
        return [n for n in PROMPT_COLUMNS if n < self._limit] if self.active else []

    @property
    def chunked(self) -> bool:
        """Whether prompts may be longer than a chunk."""
        return self.active and self._limit > PREFILL_CHUNK

    @property
    def fits_whole(self) -> bool:
        """Whether there is room to read prompts whole."""
        return not self.active or self._limit <= MAX_PREFILL_TOKENS

    def prefill_batch(self, beside: int = 0) -> int:
        """Prompts of a part that are read together at most, with so many more tokens of each."""
        return max(1, MAX_PREFILL_TOKENS // (self._limit + beside))

    # Before the first

    def prefill_shared(self, params: Weights) -> None:
        """Read what is shared."""
        if not self.active:
            return
        parts = self._engine.parts
        prompts = [self._tokens(number) for number in range(len(self._order))]
        found, pieces = find_shared_prefixes(prompts, self._shared_blocks, parts)
        for number, own in enumerate(pieces):
            path = len(found[own[-1]].tokens) if own else 0
            # Others are read whole, so that what is known of them would be of no use.
            if own and (self.chunked or len(prompts[number]) - path <= self.column_sizes[-1]):
                self._pieces[number] = own
        self._shared = found
        self.cache = PrefixCache(self._engine, self.block_count * BLOCK)
        # A token more, as what is looked for leaves one.
        texts = [(*piece.tokens, EMPTY) for piece in found]
        for i in sorted({i for own in self._pieces for i in own}):
            while self.cache.match(texts[i]).tokens < len(found[i].tokens):
                self.cache.prefill_chunk(params, [texts[i]] * parts, self._chunk, self._limit)
        for number, own in enumerate(self._pieces):
            if own:
                self._path[number] = self.cache.match(texts[own[-1]]).path
        # Those that are read in as many columns together.
        sizes = np.searchsorted(
            self.column_sizes, [self._uncached(number) for number in range(len(prompts))]
        )
        self._order = np.argsort(sizes, kind="stable")

    def precompile(self, params: Weights) -> None:
        """Compile what reads chunks."""
        if self.active:
            prefixes = PrefixCache(self._engine, self.block_count * BLOCK)
            prefixes.precompile_prefill(params, self._chunk, self._limit)

    def clear(self) -> None:
        """Forget what is known."""
        self.cache = None

    # Who is next

    @property
    def waiting_count(self) -> int:
        """Prompts that have not entered."""
        reading = sum(number != EMPTY for number in self._chunking)
        return len(self._order) - self._next + reading

    def next_prompt(self, part: int, decoding: bool) -> int:
        """The prompt that enters a part next; NOBODY: none, or it is still being read.

        Args:
          part: where.
          decoding: whether others are decoded, so that long prompts are read in chunks.
        """
        number = self._chunking[part]
        if number != EMPTY:
            if self._uncached(number) > PREFILL_CHUNK:
                return EMPTY
            self._chunking[part] = EMPTY
            return number
        if self._next == len(self._order):
            return EMPTY
        number = int(self._order[self._next])
        self._next += 1
        if self._needs_chunks(number, decoding):
            self._chunking[part] = number
            return EMPTY
        return number

    def prefill_chunk(self, params: Weights) -> bool:
        """Read a chunk of a prompt in each part; False: nothing is to be read."""
        if not self.chunked:
            return False
        for part, number in enumerate(self._chunking):
            if number == EMPTY and self._next < len(self._order):
                following = int(self._order[self._next])
                if self._needs_chunks(following, True):
                    self._chunking[part] = following
                    self._next += 1
        reads = {
            part: number
            for part, number in enumerate(self._chunking)
            if number != EMPTY and self._uncached(number) > PREFILL_CHUNK
        }
        if not reads or self.cache is None:
            return False
        texts = [
            self._tokens(reads[part]) if part in reads else None
            for part in range(len(self._chunking))
        ]
        self.cache.prefill_chunk(params, texts, PREFILL_CHUNK, self._limit)
        for part, number in reads.items():
            self._path[number] = self.cache.match(self._tokens(number), part).path
        return True

    def _needs_chunks(self, number: int, decoding: bool) -> bool:
        rest = self._uncached(number)
        if not self.chunked or rest <= PREFILL_CHUNK:
            return False
        return decoding or not self.fits_whole or len(self._path[number]) * BLOCK >= rest

    # How they enter

    def columns_for(self, taken: Sequence[Sequence[int]]) -> int:
        """Columns for what is new of these prompts, one of ``new``; 0: they are read whole."""
        most = max(self._uncached(number) for some in taken for number in some)
        return next((n for n in self.column_sizes if n >= most), 0)

    def admission_inputs(
        self, numbers: np.ndarray, new: int
    ) -> tuple[np.ndarray, np.ndarray, CachedPrompts | None]:
        """Prompts as ``Admission`` has them: tokens, mask, and what is known.

        Args:
          numbers: int [parts, each]; EMPTY: an entry that fills up.
          new: columns, of ``columns_for``.
        """
        prompts: list[Any] = [() if n == EMPTY else self._tokens(n) for n in numbers.ravel()]
        found = [CachedPrefix()] * len(prompts)
        if new:
            paths = [() if n == EMPTY else self._path[n] for n in numbers.ravel()]
            found = [CachedPrefix(path) for path in paths]
        for part, i in zip(*np.nonzero(numbers != EMPTY), strict=True):
            self._note_admitted(int(numbers[part, i]), int(part), bool(new))
        return uncached_tokens(prompts, found, new or self._limit, self.columns if new else 0)

    def _note_admitted(self, number: int, part: int, counts: bool) -> None:
        """Note what a prompt need not read, if that counts: the first one of a part has it read.
        What was read for it alone is known no more."""
        own = self._pieces[number]
        for i in own if counts else ():
            if (i, part) in self._prefilled_by:
                self.cached_tokens[number] += self._shared[i].new
            self._prefilled_by.add((i, part))
        find_shared_prefixes = len(self._shared[own[-1]].tokens) // BLOCK if own else 0
        if self.cache is not None:
            self.cache.remove(self._path[number][find_shared_prefixes:], part)

    def _tokens(self, number: int) -> list[int]:
        tokens: list[int] = self._job.prompts[number][self._job.mask[number]].tolist()
        return tokens

    def _uncached(self, number: int) -> int:
        """Tokens of a prompt that are not known."""
        return int(self._length[number]) - len(self._path[number]) * BLOCK
