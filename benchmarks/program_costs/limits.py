"""What a device can do in a second, and how bytes come to it from others: which wires a compiled
program's collectives use, and for how long.

Devices of a torus have two links along each of its axes, one each way, and whatever uses different
ones runs at the same time. A collective goes round a ring: of both links of an axis that closes,
where its devices fill that; of a row that does not close, and of two, each receives over one link;
over several axes there is a way round that passes each device once (a box of an even number of
devices has one), of which each device has both ends. A permutation goes straight, axis after axis.

Rings on tori: "How to Scale Your Model" (jax-ml, 2025), TPUs, sharded matrices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hjax.xla.collectives import Collective

Wire = Hashable
LINK, NETWORK = "link", "network"


@dataclasses.dataclass(frozen=True)
class Torus:
    """Where devices stand, as a program numbers them; hashable.

    Attributes:
      places: of each device, from 0 along each axis.
      sides: of the box that they fill.
      wraps: whether each side closes to a ring.
    """

    places: tuple[tuple[int, ...], ...]
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]

    def way(self, collective: Collective) -> tuple[frozenset[Wire], float]:
        """The wires that it uses, (place, axis, direction), and how often what a device receives
        passes a pair of links, both ways of an axis, by the most used one: 1 over both, 2 over one.
        """
        return _way(self, collective.kind == "collective-permute", collective.groups)

    @property
    def every(self) -> frozenset[Wire]:
        """All wires."""
        return self.along([axis for axis, side in enumerate(self.sides) if side > 1])

    def along(self, axes: Sequence[int]) -> frozenset[Wire]:
        """All wires of these axes."""
        return frozenset((p, axis, way) for p in self.places for axis in axes for way in (1, -1))


@functools.lru_cache(maxsize=512)
def _way(
    torus: Torus, straight: bool, groups: tuple[tuple[int, ...], ...]
) -> tuple[frozenset[Wire], float]:
    return _straight(torus, groups) if straight else _round(torus, groups)


def _round(torus: Torus, groups: tuple[tuple[int, ...], ...]) -> tuple[frozenset[Wire], float]:
    places = np.array(torus.places)
    spread = [np.ptp(places[list(group)], axis=0) + 1 for group in groups if len(group) > 1]
    most = np.max(spread, axis=0)
    axes = [int(axis) for axis in np.flatnonzero(most > 1)]
    wires = torus.along(axes)
    if len(axes) > 1:
        return wires, 1.0
    [axis] = axes
    side = torus.sides[axis]
    closes = torus.wraps[axis] and most[axis] == side > 2
    return wires, 1.0 if closes else 2.0


def _straight(torus: Torus, pairs: tuple[tuple[int, ...], ...]) -> tuple[frozenset[Wire], float]:
    """What pairs pass on, each over one link each way: the most used counts."""
    used: dict[tuple[tuple[int, ...], int, int], int] = {}
    for source, target in pairs:
        at, end = list(torus.places[source]), torus.places[target]
        for axis, side in enumerate(torus.sides):
            left = end[axis] - at[axis]
            if torus.wraps[axis] and abs(left) > side / 2:
                left -= side if left > 0 else -side
            step = 1 if left > 0 else -1
            for _ in range(abs(left)):
                link = tuple(at), axis, step
                used[link] = used.get(link, 0) + 1
                at[axis] = (at[axis] + step) % side
    return frozenset(used), 2.0 * max(used.values())


class Way(NamedTuple):
    """How bytes come to a device.

    Attributes:
      received: how many.
      wires: that they occupy.
      seconds: for so long.
    """

    received: float
    wires: frozenset[Wire]
    seconds: float


NO_WAY = Way(0.0, frozenset(), 0.0)


@dataclasses.dataclass(frozen=True)
class Limits:
    """A device's.

    Attributes:
      flops: operations per second of matrix products, by the type of their operands; ``float32``
        those of the fullest precision.
      bandwidth: bytes per second of main memory.
      link: bytes per second that a device receives from others of its domain; on a torus over both
        links of one axis.
      network: the same from beyond it; None: as ``link``.
      domain: devices that reach each other over links, numbered one after another; 0: all.
      torus: where the devices of a domain stand; None: all collectives wait for one another.
      default_float32: whether products of float32 arrays run at ``float32``'s rate unless the
        program asks for less (a TPU takes bfloat16's, unless it asks for more).
    """

    flops: Mapping[str, float]
    bandwidth: float
    link: float
    default_float32: bool = True
    network: float | None = None
    domain: int = 0
    torus: Torus | None = None

    def way(self, collective: Collective) -> Way:
        """How a collective goes alone."""
        received = collective.received_bytes
        if not received:
            return NO_WAY
        apart = self.domain and any(
            len({member // self.domain for member in group}) > 1 for group in collective.groups
        )
        if apart and self.network is not None:
            return Way(received, frozenset([NETWORK]), received / self.network)
        if self.torus is None:
            return Way(received, frozenset([LINK]), received / self.link)
        wires, passes = self.torus.way(collective)
        return Way(received, wires, passes * received / self.link)

    def somewhere(self, received: float) -> Way:
        """How bytes go of which it is not known where."""
        wires = frozenset([LINK]) if self.torus is None else self.torus.every
        return Way(received, wires, received / self.link)
