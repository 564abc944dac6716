"""A table of RESULTS.md: how far apart neighbours in a mesh stand, before and after.

`python benchmarks/paper_tables.py hops [--write]` prints it, or writes it into the page. Places
come from coordinates alone (``hjax.dryrun.topologies``).
"""

from __future__ import annotations

import numpy as np

from hjax.dryrun.topologies import list_devices
from hjax.sharding.device_mesh import place_devices, ring_table
from hjax.sharding.interconnect import ConcurrentRings
from hjax.sharding.layout import make_layouts

# Topology, layout of training, tensor size of generation.
CASES: tuple[tuple[str, dict[str, int], int], ...] = tuple(
    (name, train, tensor)
    for name, layouts in (
        ("v5e:8x8", (({"data": 8, "tensor": 8}, 8), ({"fsdp": 8, "tensor": 8}, 2),
                     ({"fsdp": 16, "tensor": 4}, 2))),
        ("v5e:16x16", (({"data": 16, "tensor": 16}, 16), ({"fsdp": 32, "tensor": 8}, 2),
                       ({"fsdp": 64, "tensor": 4}, 2))),
        ("v5p:4x4x8", (({"data": 16, "tensor": 8}, 8), ({"fsdp": 16, "tensor": 8}, 2),
                       ({"fsdp": 32, "tensor": 4}, 2))),
        ("v5p:8x8x8", (({"data": 64, "tensor": 8}, 8), ({"fsdp": 64, "tensor": 8}, 2),
                       ({"data": 8, "fsdp": 8, "tensor": 8}, 2))),
        ("v6e:8x8", (({"data": 8, "tensor": 8}, 8), ({"fsdp": 8, "tensor": 8}, 2),
                     ({"data": 2, "fsdp": 8, "tensor": 4}, 2))),
        ("h100:2x8", (({"data": 2, "tensor": 8}, 8), ({"fsdp": 4, "tensor": 4}, 2),
                      ({"pipe": 2, "tensor": 8}, 4))),
    )
    for train, tensor in layouts
)  # fmt: skip


def rings(
    name: str, train: dict[str, int], tensor: int
) -> tuple[dict[str, ConcurrentRings], dict[str, ConcurrentRings]]:
    """Rings of each axis, of devices as JAX lists them and as hjax places them."""
    devices = list_devices(name)
    generate = {"tensor": tensor, "pipe": train.get("pipe", 1)}
    shape = dict(make_layouts(len(devices), train, generate).train.mesh.shape)
    before = np.empty(len(devices), object)
    before[:] = devices
    before = before.reshape(tuple(shape.values()))
    return ring_table(shape, before), ring_table(shape, place_devices(devices, shape))


def hops_table() -> str:
    """The rows as Markdown."""
    lines = [
        "| devices | layout | mesh axis | mean hops: listed, placed "
        "| most used link: listed, placed |",
        "|---|---|---|---|---|",
    ]
    for name, train, tensor in CASES:
        layout = " × ".join(f"{axis} {n}" for axis, n in train.items())
        if tensor < train["tensor"]:
            layout += f", generation tensor {tensor}"
        before, after = rings(name, train, tensor)
        for number, axis in enumerate(after):
            first = (name, layout) if number == 0 else ("", "")
            cells = [_hops(before[axis]), _hops(after[axis])]
            used = [str(table[axis].busiest) for table in (before, after)]
            lines.append(
                f"| {first[0]} | {first[1]} | {axis} | {', '.join(cells)} | {', '.join(used)} |"
            )
    return "\n".join(lines)


def _hops(found: ConcurrentRings) -> str:
    if found.network == 1:
        return "network"
    share = f" ({100 * found.network:.0f} % network)" if found.network else ""
    return f"{found.hops:.2f}{share}"
