"""Who sends what to whom when parameters go to a disjoint pool: a plan made of two layouts.

Every byte crosses once: it is sent to one device of the receiving pool, which shares it with the
others there over what are usually faster links (``Transition``, from the ``spread`` landing layout
to the target's). What is too small to be split over all of them crosses more than once, and is
counted so. The plan is arithmetic over regions: pools of any size can be asked, though none of
their devices is there, and every process that makes it makes the same one.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from hjax.errors import ConfigError
from hjax.sharded_values import Region, overlap, volume
from hjax.sharding.parameter_manifest import check_regions, named_leaves, touching
from hjax.sharding.reshard_plan import interval, spec_of, split_of


@dataclasses.dataclass(frozen=True)
class TransferArray:
    """An array that is to cross.

    Attributes:
      name: in its tree.
      shape: of the whole array.
      dtype: in which it crosses.
      source: the region of every device of the sending pool, by the device's number there.
      landing: that which every device of the receiving pool gets, by its number there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: tuple[Region, ...]
    landing: tuple[Region, ...]


@dataclasses.dataclass(frozen=True)
class RegionSend:
    """A region on its way.

    Attributes:
      name: of the array.
      region: of it that is sent.
      held: by the sending device; contains the region.
      sender, receiver: numbers of the devices in their pools.
      from_process, to_process: theirs.
      nbytes: of the region.
    """

    name: str
    region: Region
    held: Region
    sender: int
    receiver: int
    from_process: int
    to_process: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """A plan: what every process sends and receives.

    Attributes:
      cargo: the arrays by name.
      sends: array by array; in one array every region is sent by one device alone.
    """

    cargo: Mapping[str, TransferArray]
    sends: tuple[RegionSend, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return sum(send.nbytes for send in self.sends)

    @functools.cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that each process sends, by its number; those that send none are not in it."""
        return _sums((send.from_process, send.nbytes) for send in self.sends)

    @functools.cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each process receives, by its number."""
        return _sums((send.to_process, send.nbytes) for send in self.sends)

    @functools.cached_property
    def by_name(self) -> dict[str, list[RegionSend]]:
        """The sends of each array."""
        found: dict[str, list[RegionSend]] = {name: [] for name in self.cargo}
        for send in self.sends:
            found[send.name].append(send)
        return found


def _sums(counts: Any) -> dict[int, int]:
    total: dict[int, int] = {}
    for key, count in counts:
        total[key] = total.get(key, 0) + count
    return total


def plan_crossing(
    cargo: Sequence[TransferArray],
    source_processes: Sequence[int] | None = None,
    target_processes: Sequence[int] | None = None,
) -> TransferPlan:
    """The sends that bring every landing region to its devices.

    Devices that hold the same region take turns in sending it: those regions that one device alone
    has are given out first, then the largest ones, each to the process, and in it to the device,
    that sends least so far. A process takes a region once, however many of its devices want it.

    Args:
      cargo: the arrays.
      source_processes, target_processes: of the pools' devices, by number; None: a process per
        device, numbered like it.

    Raises:
      RunError: the regions of a pool overlap in part, or leave a hole.
      ConfigError: another number of processes than of devices.
    """
    devices = max((len(array.source) for array in cargo), default=0)
    senders = range(devices) if source_processes is None else source_processes
    _check_count("source_processes", senders, devices)
    if target_processes is not None:
        takers = max((len(array.landing) for array in cargo), default=0)
        _check_count("target_processes", target_processes, takers)
    loads = _Loads(list(senders))
    jobs = [job for array in cargo for job in _jobs(array, target_processes)]
    order = sorted(
        range(len(jobs)), key=lambda i: (len(jobs[i].owners), -jobs[i].nbytes * len(jobs[i].takers))
    )
    chosen = {i: loads.take(jobs[i].owners, jobs[i].nbytes * len(jobs[i].takers)) for i in order}
    sends = [
        RegionSend(
            job.name, job.region, job.held, chosen[i], device, senders[chosen[i]], process,
            job.nbytes,
        )
        for i, job in enumerate(jobs)
        for process, device in job.takers.items()
    ]  # fmt: skip
    return TransferPlan({array.name: array for array in cargo}, tuple(sends))


def _check_count(what: str, processes: Sequence[int], devices: int) -> None:
    if len(processes) != devices:
        raise ConfigError(
            f"{what} has {len(processes)} entries, but the pool has {devices} devices; give the "
            "process of each"
        )


def tree_crossing(
    source: Any,
    landing: Any,
    shapes: Any,
    source_processes: Sequence[int] | None = None,
    target_processes: Sequence[int] | None = None,
) -> TransferPlan:
    """``plan_crossing`` of a model's parameters.

    Args:
      source, landing: nested dicts of NamedSharding; the meshes may be abstract.
      shapes: nested dict of jax.ShapeDtypeStruct, with the dtypes in which they cross.
      source_processes, target_processes: see ``plan_crossing``.
    """
    before, after = jax.tree.leaves(source), jax.tree.leaves(landing)
    cargo = [
        TransferArray(
            name, x.shape, np.dtype(x.dtype), regions(there, x.shape), regions(here, x.shape)
        )
        for (name, x), there, here in zip(named_leaves(shapes).items(), before, after, strict=True)
    ]
    return plan_crossing(cargo, source_processes, target_processes)


@dataclasses.dataclass(frozen=True)
class TargetRegions:
    """What a pool's devices want of parameters: plain, to be told to whoever sends them.

    Attributes:
      regions: by array that of every device of the pool, by its number there.
      processes: of the devices.
    """

    regions: Mapping[str, tuple[Region, ...]]
    processes: tuple[int, ...]


def landing_of(target: Any, shapes: Any) -> TargetRegions:
    """How parameters are to arrive that are then moved to a layout within the pool.

    Args:
      target: nested dict of NamedSharding on the pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct.
    """
    landing = jax.tree.leaves(jax.tree.map(spread, target, shapes))
    named = named_leaves(shapes).items()
    found = {n: regions(there, x.shape) for (n, x), there in zip(named, landing, strict=True)}
    return TargetRegions(found, tuple(d.process_index for d in landing[0].mesh.devices.flat))


def crossing_to(landing: TargetRegions, source: Any, shapes: Any) -> TransferPlan:
    """``plan_crossing`` of a model's parameters from the pool that this process is of.

    Args:
      landing: of the other pool, with the same arrays.
      source: nested dict of NamedSharding on this pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct, with the dtypes in which they cross.
    """
    held = jax.tree.leaves(source)
    cargo = [
        TransferArray(
            name, x.shape, np.dtype(x.dtype), regions(there, x.shape), landing.regions[name]
        )
        for (name, x), there in zip(named_leaves(shapes).items(), held, strict=True)
    ]
    processes = [d.process_index for d in held[0].mesh.devices.flat]
    return plan_crossing(cargo, processes, landing.processes)


def regions(sharding: NamedSharding, shape: Sequence[int]) -> tuple[Region, ...]:
    """Every device's region of an array, in the order of the mesh, which may be abstract.

    Raises:
      ConfigError: a dimension that the mesh axes do not divide, or a sharding without a mesh.
    """
    if not isinstance(sharding, NamedSharding):
        raise ConfigError(
            f"an array {list(shape)} is laid out as {sharding}, but a plan numbers the devices of "
            "a mesh; lay it out by a NamedSharding"
        )
    sizes = dict(sharding.mesh.shape)
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    at = dict(zip(sizes, grid, strict=True))
    bounds = np.empty((grid.shape[1], len(shape), 2), np.int64)
    for i, (n, axes) in enumerate(
        zip(shape, split_of(sharding.spec, len(shape), sizes), strict=True)
    ):
        if n % math.prod(sizes[axis] for axis in axes):
            product = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ConfigError(
                f"dimension {i} of an array {list(shape)} does not divide over {product}; choose "
                "sizes that do"
            )
        start, size = interval(n, axes, at, sizes)
        bounds[:, i, 0], bounds[:, i, 1] = start, start + size
    return tuple(tuple((a, b) for a, b in region) for region in bounds.tolist())


def spread(sharding: NamedSharding, x: Any) -> NamedSharding:
    """A sharding split further over the mesh axes it leaves free, as far as they divide."""
    sizes = dict(sharding.mesh.shape)
    split = [list(axes) for axes in split_of(sharding.spec, len(x.shape), sizes)]
    used = {axis for axes in split for axis in axes}
    for axis in (a for a, n in sizes.items() if n > 1 and a not in used):
        for n, axes in zip(x.shape, split, strict=True):
            if n % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
                break
    return NamedSharding(sharding.mesh, spec_of(tuple(map(tuple, split))))


@dataclasses.dataclass(frozen=True)
class _Job:
    """A region that somebody is to send: who has it, and the taking device of each process."""

    name: str
    region: Region
    held: Region
    owners: np.ndarray
    takers: dict[int, int]
    nbytes: int


def _jobs(array: TransferArray, processes: Sequence[int] | None) -> list[_Job]:
    owners, takers = _devices(array.source), _devices(array.landing)
    for held in (owners, takers):
        check_regions(array.name, array.shape, list(held))
    sources = list(owners)
    bounds = np.array(sources, np.int64).reshape(len(sources), len(array.shape), 2)
    jobs = []
    for wanted, devices in takers.items():
        first: dict[int, int] = {}
        for device in devices:
            first.setdefault(device if processes is None else processes[device], device)
        for i in touching(bounds, wanted):
            common = overlap(sources[i], wanted)
            assert common is not None
            nbytes = volume(common) * array.dtype.itemsize
            have = np.array(owners[sources[i]])
            jobs.append(_Job(array.name, common, sources[i], have, first, nbytes))
    return jobs


def _devices(held: Sequence[Region]) -> dict[Region, list[int]]:
    found: dict[Region, list[int]] = {}
    for device, region in enumerate(held):
        found.setdefault(region, []).append(device)
    return found


class _Loads:
    """Bytes that devices, and processes, send so far."""

    def __init__(self, processes: list[int]):
        _, self._process = np.unique(np.array(processes, np.int64), return_inverse=True)
        self._sent = np.zeros(len(processes), np.int64)
        self._together = np.zeros(len(processes), np.int64)

    def take(self, owners: np.ndarray, nbytes: int) -> int:
        """The one of these devices that is to send this many bytes more."""
        together = self._together[self._process[owners]]
        idle = owners[together == together.min()]
        device = int(idle[self._sent[idle].argmin()])
        self._sent[device] += nbytes
        self._together[self._process[device]] += nbytes
        return device
