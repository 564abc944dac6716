"""Values of which each process has a part: how they are described, put together and read.

A worker that runs on several processes gives each of them its own part of a result. What the
controller and other workers are handed then says which regions there are and who can give them;
whoever reads one asks for the regions that it needs and for nothing else.
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

# Start and stop in each dimension.
Region = tuple[tuple[int, int], ...]


class ShardedRows(NamedTuple):
    """Rows of a batch that a role holds, on its devices.

    Attributes:
      held: the batch, or in a message its future.
      rows: int [rows], their numbers; None: all.
    """

    held: Any
    rows: Any


class ArrayHandle(Protocol):
    """Stands for an array that is somewhere else."""

    def fetch(self) -> np.ndarray:
        """The array, brought here."""


class PartialValue(abc.ABC):
    """A value of which each process may have a part."""

    @abc.abstractmethod
    def merged(self, others: Sequence[Any]) -> PartialValue:
        """This and what other processes have of the same."""

    @abc.abstractmethod
    def whole(self) -> Any:
        """The value, once nothing is missing."""


class PendingValue(PartialValue):
    """One that may not be there yet; who writes it down waits for it.

    Attributes:
      coming: done when it is there; None: it is another process's.
    """

    coming: concurrent.futures.Future | None


@dataclasses.dataclass(frozen=True)
class ArrayRegions(PartialValue):
    """An array of which regions are at hand, here or by a handle.

    Attributes:
      shape, dtype: of the whole array.
      parts: disjoint regions, each with its numbers: a numpy array of the region's shape, or a
        ``ArrayHandle`` of one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    parts: tuple[tuple[Region, Any], ...]

    @classmethod
    def of(cls, x: np.ndarray) -> ArrayRegions:
        """An array that is at hand, as one piece."""
        return cls(x.shape, x.dtype, ((tuple((0, n) for n in x.shape), x),))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def merged(self, others: Sequence[ArrayRegions]) -> ArrayRegions:
        """This and the parts of the same array that other processes have.

        Raises:
          RunError: they are not parts of the same array.
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
        """The numbers of a region; only parts that overlap it are fetched.

        Raises:
          RunError: parts of the region are missing, or there twice.
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
            if result is None:
                result = np.empty(shape, self.dtype)
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
    """Counts (or arrays) of which each process has its share: together they are the sum."""

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
    """One value out of what each process gave, in rank order.

    Parts are put together; of anything else every process has the same, and the first one's is
    taken.
    """

    def merged(first: Any, *others: Any) -> Any:
        # The others say nothing where the first process alone gives it all.
        known = [x for x in others if x is not None]
        return first.merged(known) if isinstance(first, PartialValue) else first

    return map_leaves(merged, *values)


def map_leaves(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """``value`` with ``function`` applied to everything in its dicts, tuples and lists, and to what
    stands there in ``others``, which are of the same structure."""
    if isinstance(value, Mapping):
        return {k: map_leaves(function, value[k], *(other[k] for other in others)) for k in value}
    if isinstance(value, list | tuple):
        items = [map_leaves(function, *each) for each in zip(value, *others, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return function(value, *others)


def whole(value: Any) -> Any:
    """``value`` with everything that came in parts put together."""
    return map_leaves(lambda x: x.whole() if isinstance(x, PartialValue) else x, value)


def region_of(index: Sequence[slice], shape: Sequence[int]) -> Region:
    """A tuple of slices, as JAX gives shards, as starts and stops."""
    bounds = (s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
    return tuple((start, stop) for start, stop in bounds)


def extent(region: Region) -> tuple[int, ...]:
    """The shape of a region."""
    return tuple(stop - start for start, stop in region)


def volume(region: Region) -> int:
    """Elements of a region."""
    return math.prod(extent(region))


def overlap(one: Region, other: Region) -> Region | None:
    """What two regions have in common; None: nothing."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(part: Region, held: Region) -> tuple[Any, ...]:
    """An index that cuts a region out of an array that holds a larger one, as a view."""
    cuts = (slice(p[0] - h[0], p[1] - h[0]) for p, h in zip(part, held, strict=True))
    # With the ellipsis that of a scalar is an array too.
    return (..., *cuts)
