"""Ahead-of-time compilation of one program for a topology: memory, collectives, FLOPs; cached.

JAX's persistent cache cannot load programs compiled for absent devices. So the figures themselves
are cached as JSON, keyed by the program's text and everything else that determines the result.

Link traffic is counted too: hops and network bytes of mesh axes and compiled collectives.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hjax.dryrun.programs import AbstractWorkers, StepProgram, memory_of
from hjax.dryrun.topologies import Topology, parse_memory_error
from hjax.errors import DataError, RunError
from hjax.files import replace_file
from hjax.sharding.device_mesh import ring_table
from hjax.sharding.interconnect import Interconnect, interconnect_of
from hjax.temporary_folders import TemporaryFolder
from hjax.user_input import read_object
from hjax.xla.collectives import Collective, collectives
from hjax.xla.compiler_flags import COMPILER_FLAGS
from hjax.xla.flops import count_flops

FORMAT = 12  # of cached results; a change makes older ones be compiled again
TPU_DUMP = {"xla_dump_hlo_as_text": True}


@dataclasses.dataclass(frozen=True)
class ProgramReader:
    """An extra analysis of compiled programs, such as a study of their costs.

    Attributes:
      name: with a version; part of the cache key.
      read: returns JSON to add to a program's record, from the program's text, the trip count of
        loops whose text does not have one, the topology, and the devices in mesh order.
    """

    name: str
    read: Callable[[str, int | None, Topology, Sequence[Any]], Mapping[str, Any]]


def compile_program(
    program: StepProgram,
    topology: Topology,
    devices: int,
    level: str,
    cache: Path | None,
    placed: Sequence[Any] = (),
    reader: ProgramReader | None = None,
) -> dict[str, Any]:
    """Compile a program of a step.

    Args:
      program: to compile, built on the topology's devices.
      topology: with its compiler.
      devices: of the program's pool.
      level: optimisation level, as in ``jax_optimization_level``.
      cache: directory of cached results; None: no cache.
      placed: the devices in the order of the program's mesh; empty: no link traffic is counted.
      reader: an extra analysis of its text.

    Returns:
      ``role``, ``program``, ``rows``, ``runs`` (per step), ``flops`` and ``received_bytes`` (per
      device and run), the bytes of ``programs.memory_of``, ``collectives`` (by kind: ``count`` and
      ``received_bytes``); with ``placed``, ``hop_bytes`` and ``network_bytes`` (of ``link_bytes``),
      and ``listed_hop_bytes`` and ``listed_network_bytes``, the same for devices in the order in
      which JAX lists them; ``seconds`` it took to compile, ``kept`` (read from the cache), and what
      ``reader`` adds. A program that does not fit into memory has ``refused_bytes``, what it would
      need, and the same as ``total_bytes``, but no other bytes and no collectives.

    Raises:
      RunError: compilation fails for another reason than memory.
    """
    loop_trips = program.program.loop_trips
    traced = program.program.trace()
    flops = count_flops(traced.jaxpr, loop_trips)
    lowered = traced.lower()
    described = {
        "role": program.role,
        "program": program.name,
        "rows": program.rows,
        "runs": program.runs,
        "flops": flops.total / devices,
        "product_flops": flops.products / devices,
    }
    file = None
    if cache is not None:
        key = _cache_key(lowered.as_text(), loop_trips, topology, level, placed, reader)
        file = cache / f"{key}.json"
        with contextlib.suppress(DataError):  # a missing or damaged file is replaced
            return {**described, **read_object(file), "kept": True}
    found = _compile(lowered, program, topology, placed, reader)
    if file is not None:
        _store(file, found)
    return {**described, **found, "kept": False}


def _cache_key(
    text: str,
    loop_trips: int | None,
    topology: Topology,
    level: str,
    placed: Sequence[Any],
    reader: ProgramReader | None,
) -> str:
    order = [device.id for device in placed]
    options = {name: flag.value for name, flag in COMPILER_FLAGS.get(topology.platform, {}).items()}
    parts = [FORMAT, text, loop_trips, topology.name, topology.versions, level, options, order]
    parts += [reader.name] if reader else []
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _store(file: Path, found: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps(found))


def _compile(
    lowered: Any,
    program: StepProgram,
    topology: Topology,
    placed: Sequence[Any],
    reader: ProgramReader | None,
) -> dict[str, Any]:
    start = time.perf_counter()
    with TemporaryFolder("hjax-compile-") as folder:
        options = {**TPU_DUMP, "xla_dump_to": str(folder)} if topology.platform == "tpu" else None
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            needed = parse_memory_error(str(error))
            if needed is None:
                reason = " ".join(str(error).split())[:300]
                raise RunError(
                    f"{program.role}.{program.name} does not compile for {topology.name}: {reason}"
                ) from error
            refused = {"refused_bytes": needed[0], "total_bytes": needed[0]}
            return {**refused, "seconds": time.perf_counter() - start}
        seconds = time.perf_counter() - start
        text = _text(compiled, folder)
    by_kind: dict[str, dict[str, int]] = {}
    trips = program.program.loop_trips
    exchanged = collectives(text, trips)
    for found in exchanged:
        if found.total_bytes:
            kind = by_kind.setdefault(found.kind, {"count": 0, "received_bytes": 0})
            kind["count"] += found.times
            kind["received_bytes"] += found.total_bytes
    return {
        **memory_of(compiled, by_peak=topology.platform == "tpu"),
        "received_bytes": sum(kind["received_bytes"] for kind in by_kind.values()),
        "collectives": by_kind,
        **_link_bytes_by_order(exchanged, placed),
        **(reader.read(text, trips, topology, placed) if reader else {}),
        "seconds": seconds,
    }


def _link_bytes_by_order(
    exchanged: Sequence[Collective], placed: Sequence[Any]
) -> dict[str, float]:
    if not placed:
        return {}
    found = link_bytes(exchanged, placed)
    order = sorted(placed, key=lambda device: (device.process_index, device.id))
    return found | {f"listed_{name}": value for name, value in link_bytes(exchanged, order).items()}


def _text(compiled: Any, folder: Path) -> str:
    """The text of the optimised program; of a TPU program the compiler's own dump.

    ``as_text()`` fails there if libtpu is newer than jaxlib, which then cannot read its modules.
    """
    printed = sorted(folder.glob("*.after_optimizations.txt"))
    return printed[-1].read_text() if printed else compiled.as_text()


def mesh_devices(rehearsal: AbstractWorkers, role: str) -> list[Any]:
    """A role's devices in mesh order, by which its programs number them; TPU slices one after
    another."""
    devices = list(rehearsal.workers[role].layouts.train.mesh.devices.ravel())
    if devices[0].platform != "tpu":
        return devices
    return sorted(devices, key=lambda device: getattr(device, "slice_index", 0) or 0)


def axis_rings(rehearsal: AbstractWorkers) -> dict[str, dict[str, dict[str, float]]]:
    """Ring costs by role and mesh axis: ``hops``, ``network`` and ``busiest`` of
    ``hjax.sharding.interconnect.ConcurrentRings``; empty for devices without coordinates."""
    found = {}
    for role, worker in rehearsal.workers.items():
        mesh = worker.layouts.train.mesh
        table = ring_table(dict(mesh.shape), mesh.devices)
        if table:
            found[role] = {axis: dataclasses.asdict(rings) for axis, rings in table.items()}
    return found


def link_bytes(found: Sequence[Collective], devices: Sequence[Any]) -> dict[str, float]:
    """Link traffic of a program's collectives, per device.

    Args:
      found: its collectives.
      devices: in the order by which the program numbers them.

    Returns:
      ``hop_bytes``: received bytes times the links they cross, where each group is a ring in the
      program's order (a pair of a collective-permute goes straight); ``network_bytes``: received
      bytes that cross the network between slices or hosts. Empty for devices without coordinates.
    """
    wires = interconnect_of(devices) if len(devices) > 1 else None
    if wires is None:
        return {}
    known: dict[Any, tuple[float, float]] = {}
    hop_bytes = network_bytes = 0.0
    for one in found:
        if one.total_bytes:
            key = one.kind == "collective-permute", one.groups
            if key not in known:
                known[key] = _mean_hops(one, wires)
            hops, network = known[key]
            hop_bytes += one.total_bytes * hops
            network_bytes += one.total_bytes * network
    return {"hop_bytes": hop_bytes, "network_bytes": network_bytes}


def _mean_hops(one: Collective, wires: Interconnect) -> tuple[float, float]:
    """(links crossed, share over the network) of a ring step, means over all groups."""
    steps = [_steps(np.array(group), one.kind) for group in one.groups if len(group) > 1]
    start, end = (np.concatenate([step[i] for step in steps]) for i in (0, 1))
    hops = wires.hops(start, end)
    crosses = wires.domains[start] != wires.domains[end]
    return float(hops.mean()), float(crosses.mean())


def _steps(group: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    if kind == "collective-permute":
        return group[:1], group[1:]
    return group, np.roll(group, -1)
