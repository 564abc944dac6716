"""Which blocks a TPU's attention kernels compute, listed before they start: of a row's ``Sight``
each pair of blocks of which something is seen, and inside those seen in part, strip by strip of
queries, the keys that some query of the strip may see. So the half of a diagonal block that nobody
sees, and what is outside a window, is left out in steps of ``STRIP``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from hjax.kernels.attention import Sight

STRIP = 128  # queries of a strip, and keys of a step: the width of a register
WHOLE, FIRST, LAST, LAST_KEYS, FIRST_KEYS = 1, 2, 4, 8, 16  # what a visit is, see ``Visits.kind``


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Pairs of blocks in the order in which they are computed, queries by queries.

    Attributes:
      queries, keys: int32 [visits], numbers of the blocks.
      kind: int32 [visits], a sum: ``WHOLE``, every query sees every key; ``FIRST`` and ``LAST``
        visit of its block of queries; ``FIRST_KEYS`` and ``LAST_KEYS`` of its block of keys.
      first, count: int32 [visits], its entries in ``strips``.
      done: int32 [visits], of the blocks of keys whose last visit this is or is yet to come the
        one that is next.
      strips: int32 [entries], ``strip_of`` reads them; of each visit's strips of queries runs of
        keys, of a whole one all.
      block: places of a block.
    """

    queries: np.ndarray
    keys: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    count: np.ndarray
    done: np.ndarray
    strips: np.ndarray
    block: int

    @property
    def lists(self) -> tuple[np.ndarray, ...]:
        """What a kernel is given in advance."""
        return self.queries, self.keys, self.kind, self.first, self.count, self.done, self.strips

    @property
    def lengths(self) -> list[int]:
        """Steps of keys that runs have, each once."""
        return sorted(set((self.strips >> 16).tolist()))

    @property
    def any_whole(self) -> bool:
        """Whether of some pair every query sees every key."""
        return bool((self.kind & WHOLE).any())

    @property
    def computed(self) -> int:
        """Pairs of a query and a key that are computed in one head of a row."""
        whole = self.kind & WHOLE > 0
        steps = self.strips >> 16
        partly = sum(
            int(steps[first : first + count].sum())
            for first, count in zip(self.first[~whole], self.count[~whole], strict=True)
        )
        return int(whole.sum()) * self.block**2 + partly * STRIP**2

    @property
    def reads(self) -> int:
        """Blocks of keys that are read for one head of a row: those that the step before had not.
        """
        return 1 + int((np.diff(self.keys) != 0).sum())


def strip_of(entry: Any) -> tuple[Any, Any, Any]:
    """Strip of queries of its block, first step of keys, steps: of an entry of ``strips``."""
    return entry & 255, entry >> 8 & 255, entry >> 16


@functools.lru_cache(maxsize=64)
def visits(sight: Sight, length: int, block: int) -> Visits:
    """Of a row of so many places, whole blocks of a multiple of ``STRIP``."""
    strips = block // STRIP
    seen = np.zeros((length // STRIP,) * 2, bool)
    seen[tuple(sight.blocks(length, STRIP).T)] = True
    seen = seen.reshape(length // block, strips, length // block, strips)
    pairs = np.argwhere(seen.any((1, 3))).astype(np.int32)
    queries, keys = pairs.T
    whole = _whole(sight, length, block, queries, keys)
    entries = [i | strips << 16 for i in range(strips)]
    first, count = np.zeros_like(queries), np.full_like(queries, strips)
    for number in np.flatnonzero(~whole):
        runs = _runs(seen[queries[number], :, keys[number]])
        first[number], count[number] = len(entries), len(runs)
        entries += runs
    begins, ends = _ends(queries)
    begins_keys, ends_keys = _ends(keys)
    kinds = (WHOLE, whole), (FIRST, begins), (LAST, ends), (FIRST_KEYS, begins_keys)
    kind = sum(bit * is_so.astype(np.int32) for bit, is_so in (*kinds, (LAST_KEYS, ends_keys)))
    last = np.flatnonzero(ends_keys)
    done = keys[last[np.searchsorted(last, np.arange(len(keys)))]]
    strips_of_all = np.asarray(entries, np.int32)
    return Visits(queries, keys, np.asarray(kind), first, count, done, strips_of_all, block)


def _whole(
    sight: Sight, length: int, block: int, queries: np.ndarray, keys: np.ndarray
) -> np.ndarray:
    """Of pairs of blocks, whether each query sees each key: all as its prompt's, or as its own."""
    low, high, own, after = (x.reshape(-1, block) for x in sight.reach(np.arange(length)))
    begin, end = keys * block, (keys + 1) * block
    of_prompt = (low.max(1)[queries] <= begin) & (high.min(1)[queries] >= end)
    return of_prompt | ((own.max(1)[queries] <= begin) & (after.min(1)[queries] >= end))


def _runs(seen: np.ndarray) -> list[int]:
    """Entries of one pair: of each strip of queries the runs of steps of keys that it sees."""
    found = []
    for strip, row in enumerate(seen):
        edges = np.flatnonzero(np.diff(row, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2).tolist():
            found.append(strip | begin << 8 | (end - begin) << 16)
    return found


def _ends(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool, of each place whether its number is there for the first time, and for the last."""
    begins, ends = np.zeros(len(numbers), bool), np.zeros(len(numbers), bool)
    begins[np.unique(numbers, return_index=True)[1]] = True
    ends[len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]] = True
    return begins, ends
