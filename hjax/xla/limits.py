"""What a device can do in a second, and how bytes come to it from others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from hjax.xla.collectives import Collective
from hjax.xla.links import LINK, NETWORK, Torus, Wire


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
