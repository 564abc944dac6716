"""Sharded values: each process holds a part; how parts are described, merged and read.

A worker on several processes returns a part of its result from each. The controller and other
workers then see which regions exist and who has them, and a reader fetches only the regions that it
needs.
"""

from __future__ import annotations

import abc
import concurrent.futures
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hjax.errors import RunError

# (start, stop) in each dimension.
Region = tuple[tuple[int, int], ...]


class ShardedRows(NamedTuple):
    """Rows of a batch that a role holds on its devices.

    Attributes:
      held: the batch; in a message its future.
      rows: int [rows], row numbers; None: all.
    """

    held: Any
    rows: Any


class ArrayHandle(Protocol):
    """A reference to an array that is somewhere else."""

    def fetch(self) -> np.ndarray:
        """Fetch the array."""


class PartialValue(abc.ABC):
    """A value of which each process may hold a part."""

    @abc.abstractmethod
    def merged(self, others: Sequence[Any]) -> PartialValue:
        """This part merged with those of other processes."""

    @abc.abstractmethod
    def whole(self) -> Any:
        """The complete value, once no part is missing."""


class PendingValue(PartialValue):
    """A value that may not be ready yet; its serialization waits for it.

    Attributes:
      future: done when it is ready; None: another process has it.
    """

    future: concurrent.futures.Future | None


@dataclasses.dataclass(frozen=True)
class ArrayRegions(PartialValue):
    """An array given by regions, which are here or behind handles.

    Attributes:
      shape, dtype: of the whole array.
      parts: disjoint regions with their data: a numpy array of the region's shape, or its
        ``ArrayHandle``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[Region, Any], ...]

    @classmethod
    def of(cls, x: np.ndarray) -> ArrayRegions:
        """An array as one region."""
        return cls(x.shape, x.dtype, ((tuple((0, n) for n in x.shape), x),))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def merged(self, others: Sequence[ArrayRegions]) -> ArrayRegions:
        """This with the regions of the same array from other processes.

        Raises:
          RunError: they are not regions of the same array.
        """
        for other in others:
            if (other.shape, other.dtype) != (self.shape, self.dtype):
                raise RunError(
                    f"parts of different arrays: {self.dtype}{list(self.shape)} and "
                    f"{other.dtype}{list(other.shape)}"
                )
        every = (*self.parts, *(part for other in others for part in other.parts))
        return dataclasses.replace(self, parts=every)

    def read(self, region: Region) -> np.ndarray:
        """The data of a region; only overlapping parts are fetched.

        Raises:
          RunError: parts of the region are missing, or exist twice.
        """
        shape = tuple(stop - start for start, stop in region)
        found: list[Region] = []
        result: np.ndarray | None = None
        for held, data in self.parts:
            common = overlap(held, region)
            if common is None:
                continue
            found.append(common)
            numbers = data if isinstance(data, np.ndarray) else data.fetch()
            if numbers.dtype != self.dtype or numbers.shape != extent(held):
                raise RunError(
                    f"a part of {self.dtype}{list(self.shape)} came as {numbers.dtype}"
                    f"{list(numbers.shape)}, not as {list(extent(held))}"
                )
            cut = numbers[within(common, held)]
            if common == region:
                result = cut
                continue
            result = np.empty(shape, self.dtype) if result is None else result
            result[within(common, region)] = cut
        if sum(map(volume, found)) != math.prod(shape) or len(set(found)) != len(found):
            missing = sum(map(volume, set(found))) < math.prod(shape)
            raise RunError(
                f"of {self.dtype}{list(self.shape)} the region {region} is "
                f"{'missing in part' if missing else 'there more than once'}; there are {found}"
            )
        return np.empty(shape, self.dtype) if result is None else result

    def whole(self) -> np.ndarray:
        """The whole array."""
        return self.read(tuple((0, n) for n in self.shape))


@dataclasses.dataclass(frozen=True)
class SummedValue(PartialValue):
    """Counts (or arrays) of which each process has a term; the value is their sum."""

    counts: Mapping[str, Any]

    def merged(self, others: Sequence[SummedValue]) -> SummedValue:
        """The sums."""
        total = dict(self.counts)
        for other in others:
            for key, count in other.counts.items():
                total[key] = total.get(key, 0) + count
        return SummedValue(total)

    def whole(self) -> dict[str, Any]:
        """The counts by name."""
        return dict(self.counts)


def merge(values: Sequence[Any]) -> Any:
    """One value from what each process returned, in rank order.

    Parts are merged. Anything else is the same on every process, and the first one's is taken.
    """

    def merged(first: Any, *others: Any) -> Any:
        # Others give None for what rank 0 alone returns.
        known = [x for x in others if x is not None]
        return first.merged(known) if isinstance(first, PartialValue) else first

    return map_leaves(merged, *values)


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` with ``function`` applied to every leaf of its dicts, tuples and lists, together
    with the leaves of ``others``, which have the same structure."""
    if isinstance(value, Mapping):
        return {k: map_leaves(function, value[k], *(other[k] for other in others)) for k in value}
    if isinstance(value, list | tuple):
        items = [map_leaves(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value, *others)


def whole(value: Any) -> Any:
    """``value`` with every ``PartialValue`` in it replaced by its complete value."""
    return map_leaves(lambda x: x.whole() if isinstance(x, PartialValue) else x, value)


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """The region of a tuple of slices, as JAX gives shards."""
    bounds = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop in bounds)


def extent(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(stop - start for start, stop in region)


def volume(region: Region) -> int:
    """Elements of a region."""
    return math.prod(extent(region))


def overlap(one: Region, other: Region) -> Region | None:
    """The intersection of two regions; None: it is empty."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(part: Region, held: Region) -> tuple[Any, ...]:
    """The index of a region in an array that holds a larger one; gives a view."""
    cuts = (slice(p[0] - h[0], p[1] - h[0]) for p, h in zip(part, held, strict=True))
    # The ellipsis keeps a scalar an array.
    return (..., *cuts)
