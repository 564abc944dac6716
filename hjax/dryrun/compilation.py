"""Compiling one program for a topology: memory, collectives, FLOPs; results are kept on disk.

JAX's own persistent cache cannot read back what was compiled for devices that are not there, so
the figures are kept as JSON, by the program's text and everything that decides what becomes of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hjax.dryrun.account import account
from hjax.dryrun.programs import StepProgram, memory_of
from hjax.dryrun.topologies import Topology, parse_memory_error
from hjax.dryrun.wiring import way
from hjax.errors import DataError, RunError
from hjax.given import read_object
from hjax.xla.collectives import Collective, collectives
from hjax.xla.flops import count_flops
from hjax.xla.options import OPTIONS

FORMAT = 11  # of the kept results; a change makes older ones be compiled again
TPU_DUMP = {"xla_dump_hlo_as_text": True}


def compile_program(
    program: StepProgram,
    topology: Topology,
    devices: int,
    level: str,
    cache: Path | None,
    placed: Sequence[Any] = (),
) -> dict[str, Any]:
    """Compile a program of a step.

    Args:
      program: to compile, built on the topology's devices.
      topology: with its compiler.
      devices: of the program's pool.
      level: of optimisation, as it is set in ``jax_optimization_level``.
      cache: directory of kept results; None neither reads nor writes any.
      placed: the devices in the order of the program's mesh; empty: how far bytes go is
        not said, and all collectives wait for one another.

    Returns:
      ``role``, ``program``, ``rows``, ``runs`` (per step), ``flops`` and ``received_bytes`` (per
      device and run), the bytes of ``programs.memory_of``, ``collectives`` (by kind: ``count`` and
      ``received_bytes``), with ``placed`` ``hop_bytes`` and ``network_bytes`` (of ``wiring.way``)
      and ``listed_hop_bytes`` and ``listed_network_bytes``, those of devices in the order in which
      JAX lists them, ``roofline`` (of ``account``), ``seconds`` it took to compile, ``kept`` (read
      back, not compiled). Of a program that the compiler refuses ``refused_bytes``, what it would
      need, and ``total_bytes`` the same, but no other bytes, collectives or roofline.

    Raises:
      RunError: it does not compile for another reason than memory.
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
        text = lowered.as_text()
        file = cache / f"{_key(text, loop_trips, topology, level, placed)}.json"
        with contextlib.suppress(DataError):  # there is none, or it is torn: another replaces it
            return {**described, **read_object(file), "kept": True}
    found = _compile(lowered, program, topology, placed)
    if file is not None:
        _keep(file, found)
    return {**described, **found, "kept": False}


def _key(
    text: str, loop_trips: int | None, topology: Topology, level: str, placed: Sequence[Any]
) -> str:
    order = [device.id for device in placed]
    options = {name: option.value for name, option in OPTIONS.get(topology.platform, {}).items()}
    parts = [FORMAT, text, loop_trips, topology.name, topology.versions, level, options, order]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _keep(file: Path, found: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")  # two commands may write at once
    part.write_text(json.dumps(found))
    part.replace(file)


def _compile(
    lowered: Any, program: StepProgram, topology: Topology, placed: Sequence[Any]
) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="hjax-compile-") as folder:
        options = {**TPU_DUMP, "xla_dump_to": folder} if topology.platform == "tpu" else None
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
        text = _text(compiled, Path(folder))
    by_kind: dict[str, dict[str, int]] = {}
    exchanged = collectives(text, program.program.loop_trips)
    for found in exchanged:
        if found.total_bytes:
            kind = by_kind.setdefault(found.kind, {"count": 0, "received_bytes": 0})
            kind["count"] += found.times
            kind["received_bytes"] += found.total_bytes
    return {
        **memory_of(compiled, by_peak=topology.platform == "tpu"),
        "received_bytes": sum(kind["received_bytes"] for kind in by_kind.values()),
        "collectives": by_kind,
        **_ways(exchanged, placed),
        "roofline": account(text, topology, program.program.loop_trips, placed),
        "seconds": seconds,
    }


def _ways(exchanged: Sequence[Collective], placed: Sequence[Any]) -> dict[str, float]:
    if not placed:
        return {}
    found = way(exchanged, placed)
    order = sorted(placed, key=lambda device: (device.process_index, device.id))
    listed = way(exchanged, order)
    return found | {f"listed_{name}": value for name, value in listed.items()}


def _text(compiled: Any, folder: Path) -> str:
    """The optimised program; a TPU's as its own compiler printed it.

    A libtpu newer than jaxlib makes modules that jaxlib cannot read, hence not ``as_text()``.
    """
    printed = sorted(folder.glob("*.after_optimizations.txt"))
    return printed[-1].read_text() if printed else compiled.as_text()
