"""From one PartitionSpec to another by the fewest bytes: a search over explicit moves.

What a device holds of an array is described by one tuple of mesh axes per dimension, major to
minor. Four moves change it: cut a dimension by one more axis (nothing travels), gather its minor
axes (all-gather), hand minor axes from one dimension to another (all-to-all), reorder a
dimension's axes (collective-permute). Left to itself XLA takes a full replica where two of them
do, e.g. from rows over (fsdp, tensor) to columns over tensor.
"""

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from jax.sharding import PartitionSpec

# The mesh axes over which each dimension is split, major to minor.
Split = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ReshardMove:
    """One step from a split to another.

    Attributes:
      kind: what is done.
      axes: the mesh axes that are added, dropped, handed over, or in their new order, major to
        minor.
      dimension: of the array, where they are added, dropped, taken from, or reordered.
      to: the dimension that receives them (all_to_all).
      before: axes of the dimension before, in their old order (permute).
      received: elements that a device receives.
      size: elements that a device holds after it.
    """

    kind: Literal["slice", "all_gather", "all_to_all", "permute"]
    axes: tuple[str, ...]
    dimension: int
    to: int = -1
    before: tuple[str, ...] = ()
    received: int = 0
    size: int = 0

    def __str__(self) -> str:
        where = f"dimension {self.dimension}"
        if self.kind == "all_to_all":
            where = f"dimensions {self.dimension} to {self.to}"
        return f"{self.kind} over {', '.join(self.axes)} in {where}"


def split_of(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> Split:
    """A PartitionSpec as a split of ``rank`` dimensions; axes of size 1 are left out."""
    entries = [*spec, *[None] * (rank - len(spec))]
    named = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in named)


def spec_of(split: Split) -> PartitionSpec:
    """The PartitionSpec of a split."""
    parts = [axes[0] if len(axes) == 1 else (axes or None) for axes in split]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def plan_moves(
    shape: tuple[int, ...], source: Split, target: Split, sizes: Mapping[str, int]
) -> tuple[ReshardMove, ...]:
    """The moves from ``source`` to ``target`` in which a device receives fewest elements.

    Of plans that receive the same, the one with fewer moves, then with smaller arrays between.

    Args:
      shape: of the whole array, in elements.
      source, target: splits; what they split a dimension into must divide it.
      sizes: of the mesh axes.
    """
    axes = {a for split in (source, target) for part in split for a in part}
    return _search(shape, source, target, tuple(sorted((a, sizes[a]) for a in axes)))


def received(moves: tuple[ReshardMove, ...]) -> int:
    """Elements that a device receives in all moves."""
    return sum(move.received for move in moves)


@functools.lru_cache(maxsize=4096)
def _search(
    shape: tuple[int, ...], source: Split, target: Split, axis_sizes: tuple[tuple[str, int], ...]
) -> tuple[ReshardMove, ...]:
    """A* search; what is still needed and not yet held is never more than what will travel."""
    sizes = dict(axis_sizes)
    order = itertools.count()  # so that the heap never compares splits
    start = (_missing(shape, source, target, sizes), 0, 0)
    queue: list[tuple[tuple[int, int, int], int, int, Split, tuple[ReshardMove, ...]]]
    queue = [(start, next(order), 0, source, ())]
    done = set()
    while queue:
        (_, count, held), _, travelled, split, moves = heapq.heappop(queue)
        if split == target:
            return moves
        if split in done:
            continue
        done.add(split)
        for move, after in _steps(shape, split, sizes):
            if after not in done:
                total = travelled + move.received
                bound = total + _missing(shape, after, target, sizes)
                cost = (bound, count + 1, held + move.size)
                heapq.heappush(queue, (cost, next(order), total, after, (*moves, move)))
    raise ValueError(f"{shape}: no way from {source} to {target} over {sizes}")


def _missing(shape: tuple[int, ...], split: Split, target: Split, sizes: dict[str, int]) -> int:
    """Elements of its target shard that a device does not hold, of the device that lacks most."""
    grid = np.indices(list(sizes.values()))
    at = dict(zip(sizes, grid, strict=True))
    common = np.ones(grid.shape[1:], np.int64)
    whole = 1
    for n, have, want in zip(shape, split, target, strict=True):
        (first, size), (start, wanted) = (interval(n, axes, at, sizes) for axes in (have, want))
        overlap = np.minimum(first + size, start + wanted) - np.maximum(first, start)
        common = common * np.maximum(overlap, 0)
        whole *= wanted
    return whole - int(common.min())


def interval(
    n: int, axes: tuple[str, ...], at: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> tuple[np.ndarray | int, int]:
    """Where each device's part of a dimension begins, and its size.

    Args:
      n: elements of the dimension, of which the product of the axes' sizes is a divisor.
      axes: over which it is split, major to minor.
      at: every device's index along each mesh axis; arrays of one shape.
      sizes: of the mesh axes.
    """
    part: np.ndarray | int = 0
    for axis in axes:
        part = part * sizes[axis] + at[axis]
    size = n // math.prod(sizes[axis] for axis in axes)
    return part * size, size


def _steps(
    shape: tuple[int, ...], split: Split, sizes: dict[str, int]
) -> Iterator[tuple[ReshardMove, Split]]:
    """The moves that can be made from a split, and where they lead."""

    def ways(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[a] for a in axes)

    def replaced(changes: dict[int, tuple[str, ...]]) -> Split:
        return tuple(changes.get(i, axes) for i, axes in enumerate(split))

    def fits(dimension: int, axes: tuple[str, ...]) -> bool:
        return shape[dimension] % ways(axes) == 0

    used = {a for axes in split for a in axes}
    size = math.prod(n // ways(axes) for n, axes in zip(shape, split, strict=True))
    for dimension, axes in enumerate(split):
        for axis in sizes:
            more = (*axes, axis)
            if axis not in used and fits(dimension, more):
                after = size // sizes[axis]
                yield (
                    ReshardMove("slice", (axis,), dimension, size=after),
                    replaced({dimension: more}),
                )
        for keep in range(len(axes)):
            rest, moved = axes[:keep], axes[keep:]
            n = ways(moved)
            gathered = ReshardMove(
                "all_gather", moved, dimension, received=size * (n - 1), size=size * n
            )
            yield gathered, replaced({dimension: rest})
            for to in range(len(split)):
                there = (*split[to], *moved)
                if to != dimension and fits(to, there):
                    share = size * (n - 1) // n
                    handed = ReshardMove(
                        "all_to_all", moved, dimension, to, received=share, size=size
                    )
                    yield handed, replaced({dimension: rest, to: there})
        for new in itertools.permutations(axes):
            if new != axes:
                turned = ReshardMove(
                    "permute", new, dimension, before=axes, received=size, size=size
                )
                yield turned, replaced({dimension: new})
