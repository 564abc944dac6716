"""Devices that are not there, as JAX would list them: enough to see where a mesh would put them.

From coordinates alone: no compiler and no plugin is needed. ``hjax.dryrun.topologies`` has those
that programs can be compiled for; their places are the same.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

from hjax.devices import Device, device
from hjax.errors import ConfigError

# As JAX calls the catalogue's TPUs.
KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite",
         "tpu7x": "TPU7x"}  # fmt: skip
HOST = (2, 2, 1)  # chips of a TPU host, x, y, z
MOST = 1 << 16


@dataclasses.dataclass(frozen=True)
class StandIn:
    """What a jax.Device says of itself."""

    platform: str
    device_kind: str
    id: int
    process_index: int
    coords: tuple[int, ...] | None = None
    core_on_chip: int = 0
    slice_index: int | None = None


def listed(name: str) -> list[StandIn]:
    """The devices of ``v5p:4x4x8`` (chips) or ``h100:2x8`` (hosts x GPUs), in JAX's order.

    Raises:
      ConfigError: another form, an unknown device, or too many.
    """
    found = re.fullmatch(r"([\w.-]+):(\d+(?:x\d+)*)", name)
    if found is None:
        raise ConfigError(f"--topology={name}: a kind and sizes, such as v5e:8x8 or h100:2x8")
    kind, sizes = device(found[1]), tuple(int(n) for n in found[2].split("x"))
    if min(sizes) < 1 or math.prod(sizes) > MOST:
        raise ConfigError(f"--topology={name}: sizes of 1 or more, at most {MOST} devices")
    if kind.torus:
        return _slice(name, kind, sizes)
    if len(sizes) != 2:
        raise ConfigError(f"--topology={name}: of GPUs hosts x GPUs per host, such as h100:2x8")
    hosts, each = sizes
    return [
        StandIn("gpu", kind.name, host * each + i, host)
        for host in range(hosts)
        for i in range(each)
    ]


def _slice(name: str, kind: Device, sides: tuple[int, ...]) -> list[StandIn]:
    if len(sides) != kind.torus:
        raise ConfigError(f"--topology={name}: a {kind.name} slice has {kind.torus} sides")
    x, y, z = (*sides, *(1,) * (3 - len(sides)))
    # Host after host, x fastest; in each its chips, x fastest.
    hosts = itertools.product(range(0, z, HOST[2]), range(0, y, HOST[1]), range(0, x, HOST[0]))
    found: list[StandIn] = []
    for process, (z0, y0, x0) in enumerate(hosts):
        chips = itertools.product(range(HOST[2]), range(HOST[1]), range(HOST[0]))
        for dz, dy, dx in chips:
            at = (x0 + dx, y0 + dy, z0 + dz)
            if at[0] < x and at[1] < y and at[2] < z:
                for core in range(kind.cores):
                    made = StandIn("tpu", KINDS[kind.name], len(found), process, at, core)
                    found.append(made)
    return found
