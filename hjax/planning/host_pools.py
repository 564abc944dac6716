"""A cluster's hosts, as it has them, as pools for the search.

A set of models lies within one pool: hosts of one kind of device, and of one value of the label
that a pool's hosts agree in (a TPU slice, a rack). Where its processes may stand is known by the
labels of the pool (``DevicePool.where``), which the run's placement keeps to.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hjax.controller.hosts import HostGroup
from hjax.devices import Device
from hjax.errors import ConfigError
from hjax.planning.hardware import legal_counts
from hjax.planning.plan_types import Cluster, DevicePool
from hjax.sharding.interconnect import wires_of


def cluster_of(
    groups: Sequence[HostGroup], devices: Sequence[Device], processes: int, each: int
) -> Cluster:
    """So many processes of a cluster: those with the fastest devices, all if there are no more.

    Args:
      groups: the cluster's hosts.
      devices: what each group's devices are.
      processes: that the run takes.
      each: devices of a process.

    Raises:
      ConfigError: hosts for fewer processes, or TPU slices that so many do not fill.
    """
    order = sorted(
        range(len(groups)), key=lambda i: (-max(devices[i].flops.values()), -groups[i].capacity)
    )
    sizes = {i: _sizes(groups[i], devices[i], each) for i in order}
    # Ways to take so many processes, by how many; the first found takes the fastest.
    ways: dict[int, tuple[tuple[int, int], ...]] = {0: ()}
    for i in order:
        for taken, way in sorted(ways.items(), reverse=True):
            for size in sizes[i]:
                ways.setdefault(taken + size, (*way, (i, size)))
    if processes not in ways:
        raise ConfigError(
            f"cluster.processes={processes}, of {each} devices each: the cluster's hosts take "
            f"{', '.join(str(n) for n in sorted(ways) if n)}"
        )
    pools = [_pool(groups[i], devices[i], size, each) for i, size in ways[processes]]
    return Cluster(tuple(pools))


def pools_at_hand(device: Device, devices: Sequence[Any]) -> Cluster:
    """The devices of a process, or of all processes of its world, as pools.

    Slices and NVLink domains come from what the devices say of themselves (``wires_of``); simulated
    ones are one host's.

    Args:
      device: what each of them is.
      devices: jax.Device.
    """
    wires = wires_of(devices)
    if wires is None or not wires.boxes:
        return Cluster((DevicePool(device, 1, len(devices)),))
    each = math.prod(wires.sides)
    if not wires.torus:
        return Cluster((DevicePool(device, wires.boxes, each),))
    sides = [n for n in wires.sides[:3] if n > 1]
    sides += [1] * (device.torus - len(sides))
    shape = (*sides, wires.sides[3]) if wires.sides[3] > 1 else tuple(sides)
    if len(sides) > device.torus or any(n & (n - 1) for n in shape):
        return Cluster(
            (DevicePool(device, wires.boxes, each),)
        )  # no slice that sets can be cut out of
    slices = wires.boxes
    hosts = max(1, len({d.process_index for d in devices}) // slices)  # of a slice
    return Cluster((DevicePool(device, slices * hosts, each // hosts, shape, slices=slices),))


def _sizes(group: HostGroup, device: Device, each: int) -> Sequence[int]:
    """Numbers of processes that may be taken of a group, the most first: a TPU slice of several
    hosts is one world of all its chips."""
    if not device.torus or len(group.processes) == 1:
        return range(group.capacity, 0, -1)
    hosts = len(group.processes)
    if set(group.processes) != {1} or math.prod(group.topology) != hosts * each:
        what = "x".join(map(str, group.topology)) or "no slice that is named"
        raise ConfigError(
            f"placement=auto: {hosts} TPU hosts are {what}, which processes of {each} chips do not "
            "make up, one on each host; leave cluster.devices_per_process at 0 and "
            "cluster.colocation_label at auto, or give a plan.json"
        )
    return (hosts,)


def _pool(group: HostGroup, device: Device, processes: int, each: int) -> DevicePool:
    size = processes * each
    if device.torus:
        several = len(group.processes) > 1
        shape = group.topology if several else _sides(size, device.torus)
        hosts = len(group.processes)
        pool = DevicePool(device, hosts, size // hosts, shape, where=group.labels)
        # Processes that share a host, or a part of a slice, would each have to be told its box.
        counts = (size,) if several else tuple(n for n in legal_counts(pool) if n <= each)
        return dataclasses.replace(pool, counts=counts)
    equal = set(group.processes)
    per_host = max(equal)
    if len(equal) == 1 and processes % per_host == 0:
        hosts, here = processes // per_host, per_host * each
    elif processes < min(equal):
        hosts, here = 1, size
    else:  # hosts of different sizes: each process as if alone on one
        hosts, here = processes, each
    pool = DevicePool(device, hosts, here, where=group.labels)
    whole = tuple(n for n in legal_counts(pool) if n <= each or n % each == 0)
    return dataclasses.replace(pool, counts=whole)


def _sides(devices: int, dimensions: int) -> tuple[int, ...]:
    """A host's chips as a box."""
    sides = [1] * dimensions
    while math.prod(sides) < devices:
        sides[sides.index(min(sides))] *= 2
    return tuple(sorted(sides))
