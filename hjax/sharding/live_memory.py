"""Bytes of live arrays on devices, to measure the peak memory of a transition."""

import gc
from collections.abc import Sequence

import jax


def live_bytes(devices: Sequence[jax.Device]) -> dict[jax.Device, int]:
    """Bytes of all live arrays on each device; a buffer shared by several arrays counts once."""
    seen: set[tuple[int, int]] = set()
    live = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        if array.is_deleted() or not array.nbytes:
            continue
        for shard in array.addressable_shards:
            if shard.device not in live:
                continue
            buffer = (shard.device.id, shard.data.unsafe_buffer_pointer())
            if buffer not in seen:
                seen.add(buffer)
                live[shard.device] += shard.data.nbytes
    return live


class PeakWatch:
    """Peak bytes of live arrays on a device, above those alive when the watch was made.

    It measures when it is called; a transition calls it when a bucket's sources and targets are
    both alive. Temporaries inside running programs are not seen: see ``TransitionCost.temporary``.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = devices
        gc.collect()  # so that no older garbage is freed while it watches
        self._before = live_bytes(devices)
        self.peak = 0

    def __call__(self) -> int:
        """The largest rise on any device now."""
        now = live_bytes(self._devices)
        rise = max(now[device] - self._before[device] for device in self._devices)
        self.peak = max(self.peak, rise)
        return rise
