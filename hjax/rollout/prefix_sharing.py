"""Prefix sharing within a rollout: shared prefixes are prefilled once, long prompts in chunks.

A system prompt or few-shot examples that several prompts of a step begin with are prefilled once,
into blocks; each prompt is prefilled from the end of its cached prefix. Long prompts are prefilled
in chunks while others decode, ahead of their slot. Blocks live for one rollout.

Decisions follow from the prompts alone, so all processes of a pool decide alike, and a resumed run
like an undisturbed one. The set of programs follows from the prompts' length alone, so all can be
compiled beforehand.
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

# If no prompt is longer than this, each is prefilled whole and by itself.
SHORT_PROMPT = 256
# Tokens of a prefill chunk; whole blocks.
PREFILL_CHUNK = 512
# Columns for uncached tokens of prompts that are prefilled together; the last are a chunk's.
PROMPT_COLUMNS = (128, PREFILL_CHUNK)
# Most tokens of a prefill batch per device, which bounds its memory.
MAX_PREFILL_TOKENS = 4096
# A prefix is prefilled once if that saves this many tokens in each data-parallel part.
MIN_SAVED_TOKENS = 512
# Room for shared prefixes, in prompts of the greatest length.
SHARED_PROMPTS = 4
# Most chunks between two dispatches, while others decode.
MAX_CHUNKS = 4


@dataclasses.dataclass(frozen=True)
class SharedPrefix:
    """A segment that several prompts share, after the segments that they share before it.

    Attributes:
      tokens: of these prompts, up to the segment's end.
      new: how many of these, the last ones, are the segment's own.
    """

    tokens: tuple[int, ...]
    new: int


def find_shared_prefixes(
    prompts: Sequence[Sequence[int]], room: int, parts: int = 1
) -> tuple[list[SharedPrefix], list[tuple[int, ...]]]:
    """The prefixes that are worth prefilling once for several prompts.

    Args:
      prompts: tokens of each.
      room: blocks for them.
      parts: data-parallel parts, each of which prefills them.

    Returns:
      the segments, each after those that it continues; and for each prompt the numbers of its
      segments. At least one token of every prompt is left over.
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
            found.append(SharedPrefix(tuple(prompts[some[0]][: end * BLOCK]), (end - at) * BLOCK))
            waiting.append((some, end))
    return found, of


def _in_blocks(prompt: Sequence[int]) -> list[bytes]:
    """Whole blocks of a prompt that leave at least one token of it."""
    count = max(len(prompt) - 1, 0) // BLOCK
    raw, size = np.asarray(prompt, np.int32).tobytes(), 4 * BLOCK
    return [raw[i * size : (i + 1) * size] for i in range(count)]


class PrefixSharing:
    """A rollout's prompts until they enter slots.

    Args:
      engine: the engine that prefills them.
      job: the rollout whose prompts they are.
      waiting: int [prompts], numbers of those that are to enter; None: all.

    Attributes:
      active: whether prefixes are shared and chunks prefilled: if prompts may be longer than
        ``SHORT_PROMPT``, responses come whole, and the engine can. A partial rollout prefills
        prompts and responses together again in each part.
      cached_tokens: int [prompts], tokens of each that it did not prefill, as an earlier prompt of
        its data-parallel part shares them.
      cache: the prefix cache; None before ``prefill_shared`` and after ``clear``.
    """

    def __init__(self, engine: Engine, job: RolloutJob, waiting: np.ndarray | None = None):
        self._engine, self._job = engine, job
        count, self._limit = job.prompts.shape
        whole = self._limit <= SHORT_PROMPT or job.is_partial
        self.active = not whole and not why_no_blocks(engine)
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
        """Columns of a prompt in the state."""
        return -(-self._limit // BLOCK) * BLOCK if self.active else self._limit

    @property
    def block_count(self) -> int:
        """Blocks of a part: for shared prefixes, and for the prompt that is being chunked."""
        return self._shared_blocks + self.columns // BLOCK

    @property
    def column_sizes(self) -> list[int]:
        """Columns in which uncached tokens may be prefilled; empty: prompts are prefilled whole."""
        return [n for n in PROMPT_COLUMNS if n < self._limit] if self.active else []

    @property
    def chunked(self) -> bool:
        """Whether prompts may be longer than a chunk."""
        return self.active and self._limit > PREFILL_CHUNK

    @property
    def fits_whole(self) -> bool:
        """Whether there is room to prefill prompts whole."""
        return not self.active or self._limit <= MAX_PREFILL_TOKENS

    def prefill_batch(self, beside: int = 0) -> int:
        """Most prompts of a part in one prefill batch, if each has ``beside`` more tokens."""
        return max(1, MAX_PREFILL_TOKENS // (self._limit + beside))

    # Before the first

    def prefill_shared(self, params: Weights) -> None:
        """Find the shared prefixes and prefill them."""
        if not self.active:
            return
        parts = self._engine.parts
        prompts = [self._tokens(number) for number in range(len(self._order))]
        found, pieces = find_shared_prefixes(prompts, self._shared_blocks, parts)
        for number, own in enumerate(pieces):
            path = len(found[own[-1]].tokens) if own else 0
            # Prompts that are prefilled whole have no use for a cached prefix.
            if own and (self.chunked or len(prompts[number]) - path <= self.column_sizes[-1]):
                self._pieces[number] = own
        self._shared = found
        self.cache = PrefixCache(self._engine, self.block_count * BLOCK)
        # One token more, as a match always leaves one.
        texts = [(*piece.tokens, EMPTY) for piece in found]
        for i in sorted({i for own in self._pieces for i in own}):
            while self.cache.match(texts[i]).tokens < len(found[i].tokens):
                self.cache.prefill_chunk(params, [texts[i]] * parts, self._chunk, self._limit)
        for number, own in enumerate(self._pieces):
            if own:
                self._path[number] = self.cache.match(texts[own[-1]]).path
        # Prompts of one column bucket enter together.
        uncached = [self._uncached(number) for number in range(len(prompts))]
        self._order = np.argsort(np.searchsorted(self.column_sizes, uncached), kind="stable")

    def precompile(self, params: Weights) -> None:
        """Compile chunked prefill."""
        if self.active:
            prefixes = PrefixCache(self._engine, self.block_count * BLOCK)
            prefixes.precompile_prefill(params, self._chunk, self._limit)

    def clear(self) -> None:
        """Drop the cache."""
        self.cache = None

    # Who is next

    @property
    def waiting_count(self) -> int:
        """Prompts that have not entered."""
        return len(self._order) - self._next + sum(number != EMPTY for number in self._chunking)

    def next_prompt(self, part: int, decoding: bool) -> int:
        """The prompt that enters a part next; EMPTY: none, or it is still being chunked.

        Args:
          part: where it enters.
          decoding: whether others decode, so that long prompts are prefilled in chunks.
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
        """Prefill a chunk of a prompt in each part; False: there was none to prefill."""
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
        """Columns for uncached tokens of these prompts, of ``column_sizes``; 0: prefilled whole."""
        most = max(self._uncached(number) for some in taken for number in some)
        return next((n for n in self.column_sizes if n >= most), 0)

    def admission_inputs(
        self, numbers: np.ndarray, new: int
    ) -> tuple[np.ndarray, np.ndarray, CachedPrompts | None]:
        """Prompts as ``Admission`` has them: tokens, mask, and what is cached.

        Args:
          numbers: int [parts, each]; EMPTY: a padding entry.
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
        """Count the tokens that a prompt need not prefill (the first prompt of a part does prefill
        them), and drop the blocks that only this prompt had."""
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
        """Number of uncached tokens of a prompt."""
        return int(self._length[number]) - len(self._path[number]) * BLOCK
