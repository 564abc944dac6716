"""Radix tree of the prefix cache: which block holds which tokens, with LRU eviction.

An edge of the tree is a block of tokens. Plain Python; ``hjax.rollout.prefix_cache`` has the
blocks' keys and values (the idea: RadixAttention, Zheng et al., arXiv 2312.07104).
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

ROOT = -1
Path = list[int]


@dataclasses.dataclass
class _Block:
    parent: int
    tokens: tuple[int, ...]
    ref_count: int = 0


class RadixTree:
    """Blocks by the tokens that lead to them; the least recently used are evicted.

    Args:
      blocks: number of blocks, numbered from 0.
      block_size: tokens of a block.
    """

    def __init__(self, blocks: int, size: int):
        self.blocks, self.block_size = blocks, size
        self.clear()

    def clear(self) -> None:
        """Forget everything, blocks in use included."""
        self._free = list(range(self.blocks))[::-1]
        self._child: dict[tuple[int, tuple[int, ...]], int] = {}
        # Least recently used first. A block stands after its children: the first unused is a leaf.
        self._blocks: collections.OrderedDict[int, _Block] = collections.OrderedDict()

    @property
    def used(self) -> int:
        """Number of blocks that hold tokens."""
        return len(self._blocks)

    def match(self, tokens: Sequence[int]) -> Path:
        """Numbers of the blocks of the longest cached prefix."""
        path: Path = []
        parent = ROOT
        for piece in self._split(tokens):
            number = self._child.get((parent, piece))
            if number is None:
                break
            path.append(number)
            parent = number
        self._touch(path)
        return path

    def insert(self, tokens: Sequence[int]) -> tuple[Path, Path]:
        """Insert a sequence's whole blocks, as far as there is room.

        Returns:
          its path, acquired for the caller (see ``release``); and the new blocks of the path, its
          last ones, which the caller has to fill.
        """
        path = self.match(tokens)
        self.acquire(path)
        new: Path = []
        for piece in list(self._split(tokens))[len(path) :]:
            number = self._allocate_or_evict()
            if number is None:
                break
            parent = path[-1] if path else ROOT
            self._child[parent, piece] = number
            self._blocks[number] = _Block(parent, piece, ref_count=1)
            path.append(number)
            new.append(number)
        self._touch(path)
        return path, new

    def acquire(self, path: Iterable[int]) -> None:
        """Keep these blocks from eviction until they are released as often as acquired."""
        for number in path:
            self._blocks[number].ref_count += 1

    def release(self, path: Iterable[int]) -> None:
        """See ``acquire``."""
        for number in path:
            self._blocks[number].ref_count -= 1

    def remove(self, path: Sequence[int]) -> None:
        """Remove the last blocks of a sequence, which nobody else has found."""
        for number in reversed(path):
            block = self._blocks.pop(number)
            del self._child[block.parent, block.tokens]
            self._free.append(number)

    def _split(self, tokens: Sequence[int]) -> Iterable[tuple[int, ...]]:
        size = self.block_size
        for at in range(len(tokens) // size):
            yield tuple(tokens[at * size : (at + 1) * size])

    def _touch(self, path: Path) -> None:
        for number in reversed(path):
            self._blocks.move_to_end(number)

    def _allocate_or_evict(self) -> int | None:
        """A free block, or the least recently used one without references; None: none."""
        if self._free:
            return self._free.pop()
        for number, block in self._blocks.items():
            if not block.ref_count:
                del self._blocks[number], self._child[block.parent, block.tokens]
                return number
        return None
