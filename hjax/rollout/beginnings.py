"""Prompts of a rollout on their way into slots: beginnings that they share, chunks of long ones.

A system prompt or a few examples that a step's prompts begin with are read once, into blocks, and
each prompt from where its known beginning ends. While others are decoded, long prompts are read in
chunks, ahead of their slot. Blocks live for one rollout, as the next one has other weights.

What is done follows from the prompts alone, so that every process of a pool does the same, and a
resumed run what an undisturbed one does. Which programs there are follows from the prompts' length
alone, so that all can be compiled beforehand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from hjax.models.continuing import BLOCK, Blocks
from hjax.models.parameters import Weights
from hjax.rollout.engine import Engine
from hjax.rollout.prefixes import (
    Beginning,
    Piece,
    known_columns,
    known_columns_for,
    known_of,
    read_pieces,
    why_never,
)
from hjax.rollout.slots import Known
from hjax.rollout.work import NOBODY, Work

# Tokens of the longest prompt up to which prompts are read whole, each by itself.
SHORT = 256
# Tokens of a prompt that are read at a time; whole blocks.
CHUNK = 512
# Columns for what is new of prompts that are read together; the last are a chunk's.
NEW = (128, CHUNK)
# Tokens of prompts that are read at a time, of a device: others wait, rather than that memory is
# needed for all of them at once.
READING = 4096
# A beginning is read by itself where so many tokens are saved, in each data-parallel part.
PAYS = 512
# Room for shared beginnings, in prompts of the greatest length.
SHARED = 4
# Chunks between two dispatches at most, while others are decoded.
AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Shared:
    """A piece of prompts that several have, after what they have in common before it.

    Attributes:
      tokens: of these prompts, up to the piece's end.
      path: blocks that they are in.
      new: how many of these blocks are the piece's own, the last ones.
    """

    tokens: tuple[int, ...]
    path: tuple[int, ...]
    new: int


def shared(
    prompts: Sequence[Sequence[int]], room: int, parts: int = 1
) -> tuple[list[Shared], list[tuple[int, ...]]]:
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
    found: list[Shared] = []
    of: list[tuple[int, ...]] = [() for _ in prompts]
    waiting: list[tuple[list[int], tuple[int, ...]]] = [(list(range(len(prompts))), ())]
    used = 0
    while waiting:
        members, path = waiting.pop(0)
        at = len(path)
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
            if (len(some) // parts - 1) * (end - at) * BLOCK < PAYS:
                continue
            whole = (*path, *range(used, used + end - at))
            used += end - at
            for number in some:
                of[number] = (*of[number], len(found))
            found.append(Shared(tuple(prompts[some[0]][: end * BLOCK]), whole, end - at))
            waiting.append((some, whole))
    return found, of


def _in_blocks(prompt: Sequence[int]) -> list[bytes]:
    """Whole blocks of a prompt that leave a token of it."""
    count = max(len(prompt) - 1, 0) // BLOCK
    raw, size = np.asarray(prompt, np.int32).tobytes(), 4 * BLOCK
    return [raw[i * size : (i + 1) * size] for i in range(count)]


class Beginnings:
    """A rollout's prompts until they enter.

    Args:
      engine: that reads them.
      work: whose prompts they are.
      waiting: int [prompts], numbers of those that are to enter; None: all.

    Attributes:
      active: whether beginnings are kept and chunks read: where prompts may be longer than
        ``SHORT``, responses come whole, and the engine can. In parts each part reads anew what
        there is, prompts and responses together.
      known: int [prompts], tokens of each that it did not read, as another one of its
        data-parallel part had begun alike.
      blocks: what is known; None before ``begin`` and after ``end``.
    """

    def __init__(self, engine: Engine, work: Work, waiting: np.ndarray | None = None):
        self._engine, self._work = engine, work
        count, self._limit = work.prompts.shape
        self.active = self._limit > SHORT and not work.in_parts and not why_never(engine)
        self._chunk = min(CHUNK, -(-self._limit // BLOCK) * BLOCK)
        self._room = SHARED * (self.columns // BLOCK)
        self._length = work.mask.sum(axis=1)
        self._order = np.arange(count) if waiting is None else waiting
        self._next = 0
        self._reading = [NOBODY] * engine.parts
        self._path: list[tuple[int, ...]] = [()] * count
        self._pieces: list[tuple[int, ...]] = [()] * count
        self._shared: list[Shared] = []
        self._read_by: set[tuple[int, int]] = set()
        self.known = np.zeros(count, np.int32)
        self.blocks: Blocks | None = None

    # Sizes

    @property
    def columns(self) -> int:
        """Of a prompt in the state."""
        return -(-self._limit // BLOCK) * BLOCK if self.active else self._limit

    @property
    def count(self) -> int:
        """Blocks of a part: of what is shared, and of the prompt that is being read."""
        return self._room + self.columns // BLOCK

    @property
    def new(self) -> list[int]:
        """Columns in which what is new of prompts may be read; none: they are read whole."""
        return [n for n in NEW if n < self._limit] if self.active else []

    @property
    def in_chunks(self) -> bool:
        """Whether prompts may be longer than a chunk."""
        return self.active and self._limit > CHUNK

    @property
    def whole(self) -> bool:
        """Whether there is room to read prompts whole."""
        return not self.active or self._limit <= READING

    def together(self, beside: int = 0) -> int:
        """Prompts of a part that are read together at most, with so many more tokens of each."""
        return max(1, READING // (self._limit + beside))

    # Before the first

    def begin(self, params: Weights) -> None:
        """Read what is shared."""
        if not self.active:
            return
        prompts = [self._tokens(number).tolist() for number in range(len(self._order))]
        found, pieces = shared(prompts, self._room, self._engine.parts)
        for number, own in enumerate(pieces):
            path = found[own[-1]].path if own else ()
            # Others are read whole, so that what is known of them would be of no use.
            if own and (self.in_chunks or len(prompts[number]) - len(path) * BLOCK <= self.new[-1]):
                self._path[number], self._pieces[number] = path, own
        # Those that are read in as many columns together.
        sizes = np.searchsorted(self.new, [self._rest(number) for number in range(len(prompts))])
        self._order = np.argsort(sizes, kind="stable")
        self._shared = found
        self.blocks = self._engine.chunks.empty(self.count)
        for i in sorted({i for own in self._pieces for i in own}):
            piece = found[i]
            known = len(piece.path) - piece.new
            step = self._chunk // BLOCK
            for at in range(known, len(piece.path), step):
                end = min(at + step, len(piece.path))
                tokens = piece.tokens[at * BLOCK : end * BLOCK]
                some = Piece(tokens, piece.path[:at], piece.path[at:end])
                self._read_chunk(params, [some] * self._engine.parts)

    def warm(self, params: Weights) -> None:
        """Compile what reads chunks."""
        if not self.active:
            return
        self.blocks = self._engine.chunks.empty(self.count)
        for columns in self._chunk_columns():
            self._read_chunk(params, [None] * self._engine.parts, columns)
        self.end()

    def end(self) -> None:
        """Forget what is known."""
        self.blocks = None

    # Who is next

    @property
    def left(self) -> int:
        """Prompts that have not entered."""
        reading = sum(number != NOBODY for number in self._reading)
        return len(self._order) - self._next + reading

    def take(self, part: int, decoding: bool) -> int:
        """The prompt that enters a part next; NOBODY: none, or it is still being read.

        Args:
          part: where.
          decoding: whether others are decoded, so that long prompts are read in chunks.
        """
        number = self._reading[part]
        if number != NOBODY:
            if self._rest(number) > CHUNK:
                return NOBODY
            self._reading[part] = NOBODY
            return number
        if self._next == len(self._order):
            return NOBODY
        number = int(self._order[self._next])
        self._next += 1
        if self._by_chunks(number, decoding):
            self._reading[part] = number
            return NOBODY
        return number

    def read(self, params: Weights) -> bool:
        """Read a chunk of a prompt in each part; False: nothing is to be read."""
        if not self.in_chunks:
            return False
        for part, number in enumerate(self._reading):
            if number == NOBODY and self._next < len(self._order):
                following = int(self._order[self._next])
                if self._by_chunks(following, True):
                    self._reading[part] = following
                    self._next += 1
        some: list[Piece | None] = [None] * len(self._reading)
        for part, number in enumerate(self._reading):
            if number != NOBODY and self._rest(number) > CHUNK:
                path, tokens = self._path[number], self._tokens(number)
                at = len(path) * BLOCK
                first = self._room + at // BLOCK
                where = tuple(range(first, first + CHUNK // BLOCK))
                some[part] = Piece(tokens[at : at + CHUNK].tolist(), path, where)
                self._path[number] = (*path, *where)
        if not any(some):
            return False
        self._read_chunk(params, some)
        return True

    def _by_chunks(self, number: int, decoding: bool) -> bool:
        rest = self._rest(number)
        if not self.in_chunks or rest <= CHUNK:
            return False
        return decoding or not self.whole or len(self._path[number]) * BLOCK >= rest

    # How they enter

    def columns_for(self, taken: Sequence[Sequence[int]]) -> int:
        """Columns for what is new of these prompts, one of ``new``; 0: they are read whole."""
        most = max(self._rest(number) for some in taken for number in some)
        return next((n for n in self.new if n >= most), 0)

    def entering(
        self, taken: Sequence[Sequence[int]], each: int, new: int
    ) -> tuple[np.ndarray, np.ndarray, Known | None]:
        """Prompts as ``Admission`` has them: tokens, mask, and what is known.

        Args:
          taken: numbers, by part.
          each: entries of a part.
          new: columns, of ``columns_for``.
        """
        tokens = np.zeros((len(taken) * each, new or self._limit), np.int32)
        mask = np.zeros(tokens.shape, bool)
        mask[:, -1] = True  # an entry that fills up has a token too
        prompts: list[Sequence[int]] = [()] * len(mask)
        found = [Beginning()] * len(mask)
        for part, some in enumerate(taken):
            for i, number in enumerate(some):
                at, prompt = part * each + i, self._tokens(number)
                if new:
                    prompts[at], found[at] = prompt.tolist(), Beginning(self._path[number])
                    self._count(number, part)
                rest = prompt[found[at].tokens :]
                mask[at] = np.arange(mask.shape[1]) >= mask.shape[1] - len(rest)
                tokens[at, mask[at]] = rest
        return tokens, mask, known_of(prompts, found, self.columns) if new else None

    def _count(self, number: int, part: int) -> None:
        """Note what a prompt need not read; the first one of a part has it read."""
        for i in self._pieces[number]:
            if (i, part) in self._read_by:
                self.known[number] += self._shared[i].new * BLOCK
            self._read_by.add((i, part))

    def _tokens(self, number: int) -> np.ndarray:
        return self._work.prompts[number][self._work.mask[number]]

    def _rest(self, number: int) -> int:
        """Tokens of a prompt that are not known."""
        return int(self._length[number]) - len(self._path[number]) * BLOCK

    # Chunks

    def _chunk_columns(self) -> Iterator[int]:
        """All that a chunk and what is known before it may take."""
        yield from (n for n in known_columns(self._limit) if n >= self._chunk)

    def _read_chunk(
        self, params: Weights, some: Sequence[Piece | None], columns: int = 0
    ) -> None:
        """Read a piece in each part. ``columns``: as of ``read_pieces``; 0: as many as it takes."""
        assert self.blocks is not None
        most = (len(each.path) * BLOCK + len(each.tokens) for each in some if each is not None)
        columns = columns or known_columns_for(max(self._chunk, *most), self._limit)
        given = self._engine, params, self.blocks, some
        self.blocks = read_pieces(*given, chunk=self._chunk, columns=columns)
