"""How long a compiled program takes by data sheet, as JSON: read off it as it is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hjax.devices import DEVICES
from hjax.dryrun.compilation import ProgramReader
from hjax.dryrun.programs import StepProgram, phase_of
from hjax.dryrun.topologies import Topology, parse_topology
from hjax.sharding.interconnect import interconnect_of
from program_costs.limits import Limits, Torus
from program_costs.lower_bound import minimum
from program_costs.roofline import Operation, Turn, roofline

COSTLIEST = 10  # source lines that are kept of a program
# Sides of a torus from which on its links go round.
_WRAPS = {"v5e": 16, "v6e": 16}


def limits_of(topology: Topology, placed: Sequence[Any] = ()) -> Limits | None:
    """Peaks and bandwidths of a topology's devices; None for kinds without a data sheet here.

    Of a torus collectives along different axes run at the same time, each by the links of one axis.

    Args:
      placed: devices in the order by which a program numbers them; empty: it is not known, so that
        all collectives wait for one another.
    """
    kind, sizes, slices = parse_topology(topology.name)
    device = DEVICES.get(kind)
    if device is None:
        return None
    network = device.network / device.per_host
    if not device.torus:
        per_host = sizes[1]
        return Limits(device.flops, device.bandwidth, device.link, network=network, domain=per_host)
    wires = interconnect_of(placed) if len(placed) > 1 else None
    torus, link = None, device.link
    if wires is not None:
        places = tuple(tuple(place) for place in wires.places.tolist())
        torus = Torus(places, wires.sides, wires.wraps)
    elif max(sizes) < _WRAPS.get(kind, 4):
        link /= 2  # no side closes to a ring
    found = Limits(device.flops, device.bandwidth, link, default_float32=False, torus=torus)
    if slices == 1:
        return found
    domain = len(topology.devices) // slices
    return dataclasses.replace(found, network=network, domain=domain)


def account(
    text: str, topology: Topology, loop_trips: int | None, placed: Sequence[Any] = ()
) -> dict[str, Any] | None:
    """What ``roofline`` says of a program, as JSON; None where the devices are not known.

    Args:
      text, loop_trips: of the program.
      topology, placed: as of ``limits_of``.

    Returns:
      ``seconds``, ``bytes``, ``flops``, ``received_bytes``, ``synchronous_bytes``, per device and
      run; ``memory_seconds``, ``compute_seconds``, ``network_seconds``, which make up the first;
      ``bound``; ``costliest``: the lines of source that take longest, each with ``source``,
      ``name``, ``times``, ``seconds``, ``bytes``, ``flops``, ``received_bytes``; ``opaque``:
      kernels that do not say what they multiply; ``turn``, of the longest loop, None without one:
      ``seconds``, ``bytes``, ``received_bytes`` and ``copies``, the arrays of the size of a weight
      or cache that each turn copies, with ``source``, ``name``, ``bytes``.
    """
    limits = limits_of(topology, placed)
    if limits is None:
        return None
    found = roofline(text, limits, loop_trips)
    return {
        "seconds": found.seconds,
        "bytes": found.bytes,
        "flops": found.flops,
        "received_bytes": found.received,
        "synchronous_bytes": found.synchronous,
        "memory_seconds": found.memory_seconds,
        "compute_seconds": found.product_seconds,
        "network_seconds": found.exposed_seconds,
        "bound": found.bound,
        "costliest": [_line(operation) for operation in found.by_source()[:COSTLIEST]],
        "opaque": list(found.opaque),
        "turn": _turn(found.turn),
    }


def _read(
    text: str, loop_trips: int | None, topology: Topology, placed: Sequence[Any]
) -> dict[str, Any]:
    return {"roofline": account(text, topology, loop_trips, placed)}


READER = ProgramReader("roofline 1", _read)


def beside_minimum(
    record: dict[str, Any], program: StepProgram, worker: Any, prompt_length: int, limits: Limits
) -> dict[str, Any]:
    """What a program's account stands beside: ``minimum``, see ``lower_bound.minimum``; ``mfu``,
    its products at the peak's rate over the predicted time; of generation and updates
    ``tokens_per_second``, of responses over all devices.

    Args:
      record: of a program compiled with ``READER``.
      worker: whose program it is.
      prompt_length: tokens.
      limits: of its devices, in the order of its mesh.
    """
    least = minimum(program, worker, prompt_length, limits)
    found: dict[str, Any] = {"minimum": least}
    seconds = record["roofline"]["seconds"]
    if least is None or not seconds:
        return found
    found["mfu"] = least["flops"] / limits.flops["bfloat16"] / seconds
    if phase_of(program.name) != "prepare":
        length = worker.context.max_response_length
        tokens = program.program.tokens
        tokens = program.rows * length if tokens is None else tokens
        if tokens:
            found["tokens_per_second"] = tokens / seconds
    return found


def _turn(turn: Turn | None) -> dict[str, Any] | None:
    if turn is None:
        return None
    return {
        "seconds": turn.seconds,
        "bytes": turn.bytes,
        "received_bytes": turn.received,
        "copies": [dataclasses.asdict(copy) for copy in turn.copies],
    }


def _line(operation: Operation) -> dict[str, Any]:
    return {
        "source": operation.source,
        "name": operation.name,
        "times": operation.times,
        "seconds": operation.seconds,
        "bytes": operation.bytes,
        "flops": operation.flops,
        "received_bytes": operation.received,
    }
