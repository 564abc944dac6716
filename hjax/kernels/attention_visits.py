"""Which blocks a TPU's attention kernels compute, listed before they start: of a row's ``Sight``
each pair of blocks of which something is seen, and inside those seen in part, strip by strip of
queries, the keys that some query of the strip may see. So the half of a diagonal block that nobody
sees, and what is outside a window, is left out in steps of ``STEP``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from hjax.kernels.attention import Sight

STEP = 128  # queries of a strip, and keys of a step: the width of a register
WHOLE, FIRST, LAST, LAST_KEYS, FIRST_KEYS = 1, 2, 4, 8, 16  # what a visit is, see ``Visits.kind``


class Run(NamedTuple):
    """Keys one after another that a strip of queries of a block sees, counted in steps of the
    block.

    Attributes:
      strip: of the queries.
      begin, steps: of the keys.
      head, tail: steps at either end that not all of its queries see.
    """

    strip: int
    begin: int
    steps: int
    head: int
    tail: int


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Pairs of blocks in the order in which they are computed, queries by queries.

    Attributes:
      queries, keys: int32 [visits], numbers of the blocks.
      kind: int32 [visits], a sum: ``WHOLE``, every query sees every key; ``FIRST`` and ``LAST``
        visit of its block of queries; ``FIRST_KEYS`` and ``LAST_KEYS`` of its block of keys.
      first, count: int32 [visits], its runs in ``strips``; none of whole ones.
      done: int32 [visits], of the blocks of keys whose last visit this is or is yet to come the
        one that is next.
      strips: int32 [runs], of each run strip, begin and steps, see ``strip_of``.
      patterns: runs of the pairs that are seen in part, each once, by ``first``.
      block: places of a block.
    """

    queries: np.ndarray
    keys: np.ndarray
    kind: np.ndarray
    first: np.ndarray
    count: np.ndarray
    done: np.ndarray
    strips: np.ndarray
    patterns: dict[int, tuple[Run, ...]]
    block: int

    @property
    def lists(self) -> tuple[np.ndarray, ...]:
        """What a kernel is given in advance."""
        return self.queries, self.keys, self.kind, self.first, self.count, self.done, self.strips

    @property
    def whole(self) -> np.ndarray:
        """bool [visits]: every query sees every key."""
        return self.kind & WHOLE > 0

    @property
    def lengths(self) -> list[int]:
        """Steps that runs have, each once."""
        return sorted({run.steps for runs in self.patterns.values() for run in runs})

    @property
    def computed(self) -> int:
        """Pairs of a query and a key that are computed in one head of a row."""
        steps = {first: sum(run.steps for run in runs) for first, runs in self.patterns.items()}
        partly = sum(steps[first] for first in self.first[~self.whole].tolist())
        return int(self.whole.sum()) * self.block**2 + partly * STEP**2

    @property
    def reads(self) -> int:
        """Blocks of keys that are read for one head of a row: those that the visit before had not.
        """
        return 1 + int((np.diff(self.keys) != 0).sum())


def strip_of(entry: Any) -> tuple[Any, Any, Any]:
    """Strip, begin and steps of a run in ``strips``."""
    return entry & 255, entry >> 8 & 255, entry >> 16


@functools.lru_cache(maxsize=64)
def visits(sight: Sight, length: int, block: int) -> Visits:
    """Of a row of so many places, whole blocks of a multiple of ``STEP``."""
    strips = block // STEP
    each = length // block, strips, length // block, strips
    seen, full = (x.reshape(each) for x in _steps(sight, length))
    queries, keys = np.argwhere(seen.any((1, 3))).astype(np.int32).T
    whole = np.asarray(full.all((1, 3)))[queries, keys]
    places: dict[tuple[Run, ...], int] = {}
    entries: list[int] = []
    first, count = np.zeros_like(queries), np.zeros_like(queries)
    for number in np.flatnonzero(~whole):
        at = queries[number], slice(None), keys[number]
        runs = _runs(seen[at], full[at])
        if runs not in places:
            places[runs] = len(entries)
            entries += [run.strip | run.begin << 8 | run.steps << 16 for run in runs]
        first[number], count[number] = places[runs], len(runs)
    begins, ends = _ends(queries)
    begins_keys, ends_keys = _ends(keys)
    kinds = (WHOLE, whole), (FIRST, begins), (LAST, ends), (FIRST_KEYS, begins_keys)
    kind = sum(bit * is_so.astype(np.int32) for bit, is_so in (*kinds, (LAST_KEYS, ends_keys)))
    last = np.flatnonzero(ends_keys)
    done = keys[last[np.searchsorted(last, np.arange(len(keys)))]]
    strips_of_all = np.asarray(entries or [0], np.int32)  # an argument has an element
    patterns = {place: runs for runs, place in places.items()}
    return Visits(
        queries, keys, np.asarray(kind), first, count, done, strips_of_all, patterns, block
    )


def _steps(sight: Sight, length: int) -> tuple[np.ndarray, np.ndarray]:
    """bool [strips, steps] each: whether some query of a strip may see some key of a step, and
    whether each sees each: as all of them see a range of the prompt, or of their own, or both,
    where one follows on the other."""
    seen = np.zeros((length // STEP,) * 2, bool)
    seen[tuple(sight.blocks(length, STEP).T)] = True
    low, high, own, after = (
        x.reshape(-1, STEP)[..., None] for x in sight.reach(np.arange(length))
    )
    low, own, high, after = low.max(1), own.max(1), high.min(1), after.min(1)
    begin = np.arange(0, length, STEP)
    full = np.zeros_like(seen)
    for first, last in ((low, high), (own, after), (low, np.where(high >= own, after, 0))):
        full |= (first <= begin) & (last >= begin + STEP)
    return seen, full


def _runs(seen: np.ndarray, full: np.ndarray) -> tuple[Run, ...]:
    """Of one pair of blocks, of each strip of queries the runs of steps that it sees."""
    found = []
    for strip, row in enumerate(seen):
        edges = np.flatnonzero(np.diff(row, prepend=False, append=False))
        for begin, end in edges.reshape(-1, 2).tolist():
            inside = np.flatnonzero(full[strip, begin:end])
            head, tail = end - begin, 0
            if len(inside) and len(inside) == inside[-1] - inside[0] + 1:
                head, tail = int(inside[0]), int(end - begin - 1 - inside[-1])
            found.append(Run(strip, begin, end - begin, head, tail))
    return tuple(found)


def _ends(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """bool, of each place whether its number is there for the first time, and for the last."""
    begins, ends = np.zeros(len(numbers), bool), np.zeros(len(numbers), bool)
    begins[np.unique(numbers, return_index=True)[1]] = True
    ends[len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]] = True
    return begins, ends
