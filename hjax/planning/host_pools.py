"""Device pools from a cluster's actual hosts, for the search.

A set of models lies within one pool: hosts with one kind of device and one value of the colocation
label (a TPU slice, a rack). The pool's labels (``DevicePool.where``) say on which hosts its
processes may run; the run's placement keeps to them.
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


def cluster_from_hosts(
    groups: Sequence[HostGroup], devices: Sequence[Device], processes: int, each: int
) -> Cluster:
    """Pools for ``processes`` processes on a cluster's hosts, those with the fastest devices first.

    Args:
      groups: the cluster's hosts.
      devices: kind of device of each group.
      processes: number that the run takes.
      each: devices per process.

    Raises:
      ConfigError: hosts for fewer processes, or TPU slices that so many do not fill.
    """
    order = sorted(
        range(len(groups)), key=lambda i: (-max(devices[i].flops.values()), -groups[i].capacity)
    )
    sizes = {i: _sizes(groups[i], devices[i], each) for i in order}
    # By number of processes, (group, processes) pairs; the first found has the fastest devices.
    selections: dict[int, tuple[tuple[int, int], ...]] = {0: ()}
    for i in order:
        for count, selection in sorted(selections.items(), reverse=True):
            for size in sizes[i]:
                selections.setdefault(count + size, (*selection, (i, size)))
    if processes not in selections:
        raise ConfigError(
            f"cluster.processes={processes}, of {each} devices each: the cluster's hosts take "
            f"{', '.join(str(n) for n in sorted(selections) if n)}"
        )
    pools = [_pool(groups[i], devices[i], size, each) for i, size in selections[processes]]
    return Cluster(tuple(pools))


def local_cluster(device: Device, devices: Sequence[Any]) -> Cluster:
    """The devices of a process, or of all processes of its world, as pools.

    Slices and NVLink domains come from the devices' attributes (``wires_of``); simulated devices
    count as one host.

    Args:
      device: the kind of all of them.
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
    """Numbers of processes that may be taken from a group, largest first; a TPU slice of several
    hosts is taken whole, as one world of all its chips."""
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
        # A set on part of a slice or host would need its box assigned to each process.
        counts = (size,) if several else tuple(n for n in legal_counts(pool) if n <= each)
        return dataclasses.replace(pool, counts=counts)
    equal = set(group.processes)
    per_host = max(equal)
    if len(equal) == 1 and processes % per_host == 0:
        hosts, here = processes // per_host, per_host * each
    elif processes < min(equal):
        hosts, here = 1, size
    else:  # hosts of different sizes: each process counts as a host
        hosts, here = processes, each
    pool = DevicePool(device, hosts, here, where=group.labels)
    whole = tuple(n for n in legal_counts(pool) if n <= each or n % each == 0)
    return dataclasses.replace(pool, counts=whole)


def _sides(devices: int, dimensions: int) -> tuple[int, ...]:
    """Sides of the box that a host's chips form."""
    sides = [1] * dimensions
    while math.prod(sides) < devices:
        sides[sides.index(min(sides))] *= 2
    return tuple(sorted(sides))
