"""Reshard plan: the collectives from one PartitionSpec to another that move the fewest bytes.

A split has one tuple of mesh axes per dimension, major to minor. Four moves change it: slice a
dimension by one more axis (local), gather its minor axes (all-gather), pass minor axes from one
dimension to another (all-to-all), or reorder a dimension's axes (collective-permute). XLA alone
goes through a full replica where two of these suffice, e.g. from rows over (fsdp, tensor) to
columns over tensor.
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
    """One collective, or local slice, from a split to another.

    Attributes:
      kind: of the move.
      axes: the mesh axes that are added, dropped, passed on, or in their new order, major to minor.
      dimension: of the array, where axes are added, dropped, passed on from, or reordered.
      to: the dimension that gets them (all_to_all).
      old_axes: the dimension's axes in their old order (permute).
      received: elements that a device receives.
      size: elements that a device holds afterwards.
    """

    kind: Literal["slice", "all_gather", "all_to_all", "permute"]
    axes: tuple[str, ...]
    dimension: int
    to: int = -1
    old_axes: tuple[str, ...] = ()
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
    """The moves from ``source`` to ``target`` in which a device receives the fewest elements.

    Ties go to fewer moves, then to smaller intermediate arrays.

    Args:
      shape: of the whole array, in elements.
      source, target: splits that divide the dimensions.
      sizes: of the mesh axes.
    """
    axes = {a for split in (source, target) for part in split for a in part}
    return _search(shape, source, target, tuple(sorted((a, sizes[a]) for a in axes)))


def received_elements(moves: tuple[ReshardMove, ...]) -> int:
    """Elements that a device receives in all moves."""
    return sum(move.received for move in moves)


@functools.lru_cache(maxsize=4096)
def _search(
    shape: tuple[int, ...], source: Split, target: Split, axis_sizes: tuple[tuple[str, int], ...]
) -> tuple[ReshardMove, ...]:
    """A* search. The heuristic, elements still missing, never exceeds what must be received."""
    sizes = dict(axis_sizes)
    order = itertools.count()  # so that the heap never compares splits
    start = (_missing(shape, source, target, sizes), 0, 0)
    queue: list[tuple[tuple[int, int, int], int, int, Split, tuple[ReshardMove, ...]]]
    queue = [(start, next(order), 0, source, ())]
    done = set()
    while queue:
        (_, count, held), _, total_received, split, moves = heapq.heappop(queue)
        if split == target:
            return moves
        if split in done:
            continue
        done.add(split)
        for move, after in _next_moves(shape, split, sizes):
            if after not in done:
                total = total_received + move.received
                cost = (total + _missing(shape, after, target, sizes), count + 1, held + move.size)
                heapq.heappush(queue, (cost, next(order), total, after, (*moves, move)))
    raise ValueError(f"{shape}: no moves lead from {source} to {target} over {sizes}")


def _missing(shape: tuple[int, ...], split: Split, target: Split, sizes: dict[str, int]) -> int:
    """Elements of its target shard that a device lacks, of the device that lacks most."""
    grid = np.indices(list(sizes.values()))
    at = dict(zip(sizes, grid, strict=True))
    common = np.ones(grid.shape[1:], np.int64)
    whole = 1
    for n, have, want in zip(shape, split, target, strict=True):
        (a, size), (start, needed) = (shard_interval(n, axes, at, sizes) for axes in (have, want))
        overlap = np.minimum(a + size, start + needed) - np.maximum(a, start)
        common = common * np.maximum(overlap, 0)
        whole *= needed
    return whole - int(common.min())


def shard_interval(
    n: int, axes: tuple[str, ...], at: Mapping[str, np.ndarray], sizes: Mapping[str, int]
) -> tuple[np.ndarray | int, int]:
    """Start of each device's part of a dimension, and the size of a part.

    Args:
      n: elements of the dimension, a multiple of the product of the axes' sizes.
      axes: over which it is split, major to minor.
      at: every device's index along each mesh axis; arrays of one shape.
      sizes: of the mesh axes.
    """
    part: np.ndarray | int = 0
    for axis in axes:
        part = part * sizes[axis] + at[axis]
    size = n // math.prod(sizes[axis] for axis in axes)
    return part * size, size


def _next_moves(
    shape: tuple[int, ...], split: Split, sizes: dict[str, int]
) -> Iterator[tuple[ReshardMove, Split]]:
    """The moves that are possible from a split, each with the split that it leads to."""

    def parts(axes: tuple[str, ...]) -> int:
        return math.prod(sizes[a] for a in axes)

    def replaced(changes: dict[int, tuple[str, ...]]) -> Split:
        return tuple(changes.get(i, axes) for i, axes in enumerate(split))

    def fits(dimension: int, axes: tuple[str, ...]) -> bool:
        return shape[dimension] % parts(axes) == 0

    used = {a for axes in split for a in axes}
    size = math.prod(n // parts(axes) for n, axes in zip(shape, split, strict=True))
    for dimension, axes in enumerate(split):
        for axis in sizes:
            more = (*axes, axis)
            if axis not in used and fits(dimension, more):
                yield (
                    ReshardMove("slice", (axis,), dimension, size=size // sizes[axis]),
                    replaced({dimension: more}),
                )
        for keep in range(len(axes)):
            rest, moved = axes[:keep], axes[keep:]
            n = parts(moved)
            gathered = ReshardMove(
                "all_gather", moved, dimension, received=size * (n - 1), size=size * n
            )
            yield gathered, replaced({dimension: rest})
            for to in range(len(split)):
                there = (*split[to], *moved)
                if to != dimension and fits(to, there):
                    exchanged = ReshardMove(
                        "all_to_all", moved, dimension, to, received=size * (n - 1) // n, size=size
                    )
                    yield exchanged, replaced({dimension: rest, to: there})
        for new in itertools.permutations(axes):
            if new != axes:
                permuted = ReshardMove(
                    "permute", new, dimension, old_axes=axes, received=size, size=size
                )
                yield permuted, replaced({dimension: new})
