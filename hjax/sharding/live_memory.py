"""Bytes that are really alive on devices, to measure what a transition needs."""

import gc
from collections.abc import Sequence

import jax


def live_bytes(devices: Sequence[jax.Device]) -> dict[jax.Device, int]:
    """Bytes of all live arrays on each device; a buffer that several arrays share counts once."""
    seen: set[tuple[int, int]] = set()
    held = dict.fromkeys(devices, 0)
    for array in jax.live_arrays():
        if array.is_deleted() or not array.nbytes:
            continue
        for shard in array.addressable_shards:
            if shard.device not in held:
                continue
            buffer = (shard.device.id, shard.data.unsafe_buffer_pointer())
            if buffer not in seen:
                seen.add(buffer)
                held[shard.device] += shard.data.nbytes
    return held


class PeakWatch:
    """The most bytes alive on a device, above those alive when the watch began.

    Call it at the moments that matter; a transition calls it when a bucket's sources and targets
    are both there. What programs allocate for themselves while they run is not seen: that is the
    compiler's, see ``TransitionCost.temporary``.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self._devices = devices
        gc.collect()  # so that nothing older is freed while it watches
        self._before = live_bytes(devices)
        self.peak = 0

    def __call__(self) -> int:
        """The largest rise on any device now."""
        now = live_bytes(self._devices)
        rise = max(now[device] - self._before[device] for device in self._devices)
        self.peak = max(self.peak, rise)
        return rise
