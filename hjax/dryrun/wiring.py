"""How far a step's bytes go: the links that mesh axes and compiled collectives use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.dryrun.programs import Rehearsal
from hjax.sharding.placing import ring_table
from hjax.sharding.wires import Wires, wires_of
from hjax.xla.collectives import Collective


def placed_of(rehearsal: Rehearsal, role: str) -> list[Any]:
    """A role's devices in the order of its mesh, by which its programs number them: those of
    several TPU slices slice by slice."""
    devices = list(rehearsal.workers[role].layouts.train.mesh.devices.ravel())
    if devices[0].platform != "tpu":
        return devices
    return sorted(devices, key=lambda device: getattr(device, "slice_index", 0) or 0)


def axis_rings(rehearsal: Rehearsal) -> dict[str, dict[str, dict[str, float]]]:
    """By role and mesh axis what its rings cost: ``hops``, ``network`` and ``busiest`` of
    ``hjax.sharding.wires.Rings``; empty where devices do not say where they stand."""
    found = {}
    for role, worker in rehearsal.workers.items():
        mesh = worker.layouts.train.mesh
        table = ring_table(dict(mesh.shape), mesh.devices)
        if table:
            found[role] = {axis: dataclasses.asdict(rings) for axis, rings in table.items()}
    return found


def way(found: Sequence[Collective], devices: Sequence[Any]) -> dict[str, float]:
    """What a program's collectives carry over links, per device.

    Args:
      found: its collectives.
      devices: in the order by which the program numbers them.

    Returns:
      ``hop_bytes``: received bytes times the links they come over, if each group is a ring in the
      order that the program names (a pair of a collective-permute goes straight); and
      ``network_bytes``: those that come over the network between slices and hosts. Nothing where
      the devices do not say where they stand.
    """
    wires = wires_of(devices) if len(devices) > 1 else None
    if wires is None:
        return {}
    known: dict[Any, tuple[float, float]] = {}
    hop_bytes = network_bytes = 0.0
    for one in found:
        if one.total_bytes:
            key = one.kind == "collective-permute", one.groups
            if key not in known:
                known[key] = _mean_way(one, wires)
            hops, network = known[key]
            hop_bytes += one.total_bytes * hops
            network_bytes += one.total_bytes * network
    return {"hop_bytes": hop_bytes, "network_bytes": network_bytes}


def _mean_way(one: Collective, wires: Wires) -> tuple[float, float]:
    """(links, share over the network) of a step, means over all groups."""
    steps = [_steps(np.array(group), one.kind) for group in one.groups if len(group) > 1]
    start, end = (np.concatenate([step[i] for step in steps]) for i in (0, 1))
    hops = wires.hops(start, end)
    crosses = wires.domains[start] != wires.domains[end]
    return float(hops.mean()), float(crosses.mean())


def _steps(group: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    if kind == "collective-permute":
        return group[:1], group[1:]
    return group, np.roll(group, -1)
