"""Offload: move state that is idle in a phase between device memory and pinned host memory.

``device_put`` with donation does not free its source (measured), so each leaf is copied, waited
for and deleted.
"""

from collections.abc import Sequence
from typing import Any

import jax

from hjax.errors import ConfigError

HOST = "pinned_host"
DEVICE = "device"


def to_host(tree: Any) -> Any:
    """The arrays in pinned host memory, with the same sharding; those on the device are freed."""
    return jax.tree.map(lambda x: _move(x, HOST), tree)


def to_device(tree: Any) -> Any:
    """The arrays back in device memory; those on the host are freed."""
    return jax.tree.map(lambda x: _move(x, DEVICE), tree)


def _move(x: jax.Array, kind: str) -> jax.Array:
    if x.sharding.memory_kind == kind:
        return x
    moved = jax.device_put(x, x.sharding.with_memory_kind(kind))
    moved.block_until_ready()
    x.delete()
    return moved


def check_offload(devices: Sequence[jax.Device], key: str) -> None:
    """Raise ConfigError if the devices cannot reach pinned host memory."""
    for device in devices:
        kinds = {memory.kind for memory in device.addressable_memories()}
        if not {HOST, DEVICE} <= kinds:
            raise ConfigError(
                f"{key}: {device} has no {HOST} memory (it has {', '.join(sorted(kinds))}); "
                f"set {key}=none"
            )
