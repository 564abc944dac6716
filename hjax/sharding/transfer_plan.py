"""Transfer plan between disjoint pools (weight sync): which device sends which region to which.

Every byte crosses once, to one device of the receiving pool. That pool then shares it over links
that are usually faster (``Transition``, from the ``fully_sharded`` layout to the target's). Arrays
too small to be split over all receiving devices cross more than once, and are counted so. The plan
is arithmetic over regions, so it needs no devices, and every process computes the same one.
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
from hjax.sharding.parameter_manifest import check_regions, named_leaves, overlapping
from hjax.sharding.reshard_plan import shard_interval, spec_of, split_of


@dataclasses.dataclass(frozen=True)
class TransferArray:
    """An array to be transferred.

    Attributes:
      name: in its tree.
      shape: of the whole array.
      dtype: in which it is sent.
      source: the region that each device of the sending pool holds, by the device's number there.
      target: the region that each device of the receiving pool gets, by its number there.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    source: tuple[Region, ...]
    target: tuple[Region, ...]


@dataclasses.dataclass(frozen=True)
class RegionSend:
    """One region sent from one device to another.

    Attributes:
      name: of the array.
      region: of the array, that is sent.
      source_region: that the sending device holds; contains ``region``.
      sender, receiver: numbers of the devices in their pools.
      from_process, to_process: of these devices.
      nbytes: of ``region``.
    """

    name: str
    region: Region
    source_region: Region
    sender: int
    receiver: int
    from_process: int
    to_process: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """What every process sends and receives.

    Attributes:
      arrays: by name.
      sends: array by array; every region of an array is sent by exactly one device.
    """

    arrays: Mapping[str, TransferArray]
    sends: tuple[RegionSend, ...]

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes that cross between the pools."""
        return sum(send.nbytes for send in self.sends)

    @functools.cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that each process sends, by its number; processes that send nothing are absent."""
        return _sums((send.from_process, send.nbytes) for send in self.sends)

    @functools.cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each process receives, by its number."""
        return _sums((send.to_process, send.nbytes) for send in self.sends)

    @functools.cached_property
    def by_name(self) -> dict[str, list[RegionSend]]:
        """The sends of each array."""
        found: dict[str, list[RegionSend]] = {name: [] for name in self.arrays}
        for send in self.sends:
            found[send.name].append(send)
        return found


def _sums(counts: Any) -> dict[int, int]:
    total: dict[int, int] = {}
    for key, count in counts:
        total[key] = total.get(key, 0) + count
    return total


def plan_transfer(
    arrays: Sequence[TransferArray],
    source_processes: Sequence[int] | None = None,
    target_processes: Sequence[int] | None = None,
) -> TransferPlan:
    """The sends that bring every target region to its devices.

    Sending is balanced over replicas. Regions with the fewest holders are assigned first, then the
    largest, each to the process (and in it the device) that sends least so far. A process receives
    a region once, however many of its devices want it.

    Args:
      arrays: to be transferred.
      source_processes, target_processes: of the pools' devices, by number; None: a process per
        device, numbered like it.

    Raises:
      RunError: the regions of a pool overlap in part, or do not cover the array.
      ConfigError: another number of processes than of devices.
    """
    devices = max((len(array.source) for array in arrays), default=0)
    senders = range(devices) if source_processes is None else source_processes
    _check_count("source_processes", senders, devices)
    if target_processes is not None:
        receivers = max((len(array.target) for array in arrays), default=0)
        _check_count("target_processes", target_processes, receivers)
    loads = _SendLoads(list(senders))
    jobs = [job for array in arrays for job in _region_jobs(array, target_processes)]
    order = sorted(
        range(len(jobs)),
        key=lambda i: (len(jobs[i].holders), -jobs[i].nbytes * len(jobs[i].receivers)),
    )
    chosen = {
        i: loads.assign(jobs[i].holders, jobs[i].nbytes * len(jobs[i].receivers)) for i in order
    }
    sends = [
        RegionSend(
            job.name, job.region, job.source_region, chosen[i], device, senders[chosen[i]], process,
            job.nbytes,
        )
        for i, job in enumerate(jobs)
        for process, device in job.receivers.items()
    ]  # fmt: skip
    return TransferPlan({array.name: array for array in arrays}, tuple(sends))


def _check_count(what: str, processes: Sequence[int], devices: int) -> None:
    if len(processes) != devices:
        raise ConfigError(
            f"{what} has {len(processes)} entries, but the pool has {devices} devices; give the "
            "process of each"
        )


def plan_tree_transfer(
    source: Any,
    target: Any,
    shapes: Any,
    source_processes: Sequence[int] | None = None,
    target_processes: Sequence[int] | None = None,
) -> TransferPlan:
    """``plan_transfer`` of a model's parameters.

    Args:
      source, target: nested dicts of NamedSharding; the meshes may be abstract.
      shapes: nested dict of jax.ShapeDtypeStruct, with the dtypes in which they are sent.
      source_processes, target_processes: see ``plan_transfer``.
    """
    before, after = jax.tree.leaves(source), jax.tree.leaves(target)
    arrays = [
        TransferArray(
            name, x.shape, np.dtype(x.dtype), device_regions(a, x.shape), device_regions(b, x.shape)
        )
        for (name, x), a, b in zip(named_leaves(shapes).items(), before, after, strict=True)
    ]
    return plan_transfer(arrays, source_processes, target_processes)


@dataclasses.dataclass(frozen=True)
class TargetRegions:
    """Regions of parameters that the devices of a receiving pool want; picklable, for the senders.

    Attributes:
      regions: by array, the region of each device of the pool, by its number there.
      processes: of the devices.
    """

    regions: Mapping[str, tuple[Region, ...]]
    processes: tuple[int, ...]


def receiver_regions(target: Any, shapes: Any) -> TargetRegions:
    """The regions in which a pool receives parameters before it reshards them to ``target``.

    Args:
      target: nested dict of NamedSharding on the pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct.
    """
    shardings = jax.tree.leaves(jax.tree.map(fully_sharded, target, shapes))
    named = named_leaves(shapes).items()
    found = {n: device_regions(s, x.shape) for (n, x), s in zip(named, shardings, strict=True)}
    return TargetRegions(found, tuple(d.process_index for d in shardings[0].mesh.devices.flat))


def plan_transfer_to(target: TargetRegions, source: Any, shapes: Any) -> TransferPlan:
    """``plan_transfer`` of a model's parameters from this process's pool.

    Args:
      target: of the receiving pool, with the same arrays.
      source: nested dict of NamedSharding on this pool's mesh.
      shapes: nested dict of jax.ShapeDtypeStruct, with the dtypes in which they are sent.
    """
    shardings = jax.tree.leaves(source)
    arrays = [
        TransferArray(
            name, x.shape, np.dtype(x.dtype), device_regions(s, x.shape), target.regions[name]
        )
        for (name, x), s in zip(named_leaves(shapes).items(), shardings, strict=True)
    ]
    processes = [d.process_index for d in shardings[0].mesh.devices.flat]
    return plan_transfer(arrays, processes, target.processes)


def device_regions(sharding: NamedSharding, shape: Sequence[int]) -> tuple[Region, ...]:
    """The region of an array on every device, in the order of the mesh, which may be abstract.

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
        start, size = shard_interval(n, axes, at, sizes)
        bounds[:, i, 0], bounds[:, i, 1] = start, start + size
    return tuple(tuple((a, b) for a, b in region) for region in bounds.tolist())


def fully_sharded(sharding: NamedSharding, x: Any) -> NamedSharding:
    """A sharding split further over the mesh axes that it replicates over, where sizes divide."""
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
class _RegionJob:
    """A region to be sent: the devices that hold it, and the receiving device of each process."""

    name: str
    region: Region
    source_region: Region
    holders: np.ndarray
    receivers: dict[int, int]
    nbytes: int


def _region_jobs(array: TransferArray, processes: Sequence[int] | None) -> list[_RegionJob]:
    holders, receivers = _devices_by_region(array.source), _devices_by_region(array.target)
    for by_region in (holders, receivers):
        check_regions(array.name, array.shape, list(by_region))
    sources = list(holders)
    bounds = np.array(sources, np.int64).reshape(len(sources), len(array.shape), 2)
    jobs = []
    for wanted, devices in receivers.items():
        first: dict[int, int] = {}
        for device in devices:
            first.setdefault(device if processes is None else processes[device], device)
        for i in overlapping(bounds, wanted):
            common = overlap(sources[i], wanted)
            assert common is not None
            nbytes = volume(common) * array.dtype.itemsize
            have = np.array(holders[sources[i]])
            jobs.append(_RegionJob(array.name, common, sources[i], have, first, nbytes))
    return jobs


def _devices_by_region(regions: Sequence[Region]) -> dict[Region, list[int]]:
    found: dict[Region, list[int]] = {}
    for device, region in enumerate(regions):
        found.setdefault(region, []).append(device)
    return found


class _SendLoads:
    """Bytes assigned to each device, and to each process, to send so far."""

    def __init__(self, processes: list[int]):
        _, self._process = np.unique(np.array(processes, np.int64), return_inverse=True)
        self._sent = np.zeros(len(processes), np.int64)
        self._by_process = np.zeros(len(processes), np.int64)

    def assign(self, holders: np.ndarray, nbytes: int) -> int:
        """Choose the least loaded of these devices to send ``nbytes``, and count them."""
        of_process = self._by_process[self._process[holders]]
        idle = holders[of_process == of_process.min()]
        device = int(idle[self._sent[idle].argmin()])
        self._sent[device] += nbytes
        self._by_process[self._process[device]] += nbytes
        return device
