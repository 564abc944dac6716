"""What the search is given and what it returns: plain frozen records, no model and no device.

Sizes are elements or bytes as named, times seconds, rates per second. Callers above (models,
launch) fill them in; nothing here knows how.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from hjax.devices import Device
from hjax.models.cost_inputs import MeshSizes, Offload
from hjax.roles import STAGES


def log_interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """Of values above 0 at growing numbers the one at another, on logarithmic scales; before and
    after all of them the first and the last; of none 0."""
    below = [(n, value) for n, value in points if n <= at]
    above = [(n, value) for n, value in points if n >= at]
    if not (below and above):
        return below[-1][1] if below else above[0][1] if above else 0.0
    (low, first), (high, last) = below[-1], above[0]
    if low == high or not first:
        return last
    return first * (last / first) ** (math.log(at / low) / math.log(high / low))


@dataclasses.dataclass(frozen=True)
class DevicePool:
    """Equal machines: ``hosts`` of ``per_host`` devices, or slices of one torus shape.

    Attributes:
      hosts: in all.
      shape: sides of a slice, and devices of a chip where they are several; empty for machines
        of GPUs.
      counts: numbers of devices that a set may take; empty: all that the hardware allows.
      where: labels that its hosts have on a cluster that is there.
      slices: of that shape, which the network joins; of machines of GPUs 1.
    """

    device: Device
    hosts: int
    per_host: int
    shape: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    where: tuple[tuple[str, str], ...] = ()
    slices: int = 1

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.hosts * self.per_host

    @property
    def shares_cores(self) -> bool:
        """Whether the devices are simulated and compete for the cores of one machine."""
        return bool(self.device.alone)

    def speedup(self, devices: int) -> float:
        """How many times faster each of so many devices is than with all of them busy.

        Of numbers between those measured, all together do what lies between, on logarithmic scales:
        as many as there are cores keep these busy, and more of them share what they do.
        """
        together = [(n, n * f) for n, f, _ in self.device.alone]
        least = min((n for n, _ in together), default=devices)
        return log_interpolate(together, devices) / max(devices, least) if together else 1.0

    def core_share(self, devices: int) -> float:
        """Share of the cores' time that so many busy devices take; 0 where none are shared."""
        return log_interpolate([(n, c) for n, _, c in self.device.alone], devices)

    @property
    def domain(self) -> int:
        """Devices that reach each other over ``device.link``: a host's, or a slice's."""
        return self.size // self.slices if self.shape else self.per_host

    @property
    def name(self) -> str:
        """As ``--cluster`` takes it."""
        if self.shape:
            chips = self.shape[: self.device.torus]
            many = f"{self.slices}x" if self.slices > 1 else ""
            return f"{many}{self.device.name}:{'x'.join(map(str, chips))}"
        return f"{self.hosts}x{self.per_host}:{self.device.name}"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The devices at hand; a set of models lies within one pool."""

    pools: tuple[DevicePool, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(pool.size for pool in self.pools)

    @property
    def name(self) -> str:
        """As ``--cluster`` takes it."""
        return "+".join(pool.name for pool in self.pools)


@dataclasses.dataclass(frozen=True)
class PlannedCall:
    """One call of a step, as the algorithm makes it.

    Attributes:
      role, method: whose and which.
      kind: ``generate``, ``forward`` or ``update``.
      rows: sequences, as a share of the step's.
    """

    role: str
    method: str
    kind: Literal["generate", "forward", "update"]
    rows: float


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """An algorithm's step: its roles with devices and the calls on them, in order."""

    name: str
    roles: tuple[str, ...]
    calls: tuple[PlannedCall, ...]

    def calls_of(self, role: str, kind: str) -> tuple[PlannedCall, ...]:
        """A role's calls of one kind."""
        return tuple(c for c in self.calls if c.role == role and c.kind == kind)


@dataclasses.dataclass(frozen=True)
class RoleOption:
    """One way to run a role on some devices.

    Attributes:
      seconds: of each of ``STAGES``, the transition in the first.
      transition: seconds of it.
      resident: bytes per device for as long as the run lasts.
      transients: most bytes per device beside them while the role computes, of each stage.
      micro_rows: rows per replica and pass of an update or, in hjax, a forward; an update's
        gradients accumulate. 0: the role has neither.
      remat: which activations are computed again in the backward pass (hjax.models.remat).
      waves: parts in which a replica decodes its sequences, one after another; 0 for roles that
        do not generate.
      offload: what waits in the host's memory between the role's calls.
      learning: bytes per device beside the resident ones that stay for as long as roles of its set
        learn, whichever: what an update brings back from the host.
    """

    mesh: MeshSizes
    seconds: tuple[float, float, float]
    transition: float
    resident: float
    transients: tuple[float, float, float]
    micro_rows: int = 0
    remat: str = "none"
    waves: int = 0
    offload: Offload = "none"
    learning: float = 0.0

    @property
    def transient(self) -> float:
        """Most bytes per device beside the resident ones while only this role computes."""
        *before, update = self.transients
        return max(*before, update + self.learning)


@dataclasses.dataclass(frozen=True)
class PlannedSet:
    """Roles that take turns on some devices of a pool, each by its option."""

    roles: tuple[str, ...]
    pool: DevicePool
    devices: int
    options: tuple[RoleOption, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Per stage: the models of a set add up."""
        return tuple(sum(o.seconds[s] for o in self.options) for s in range(len(STAGES)))

    @property
    def peak_bytes(self) -> float:
        """Most bytes per device: all that is resident, and the largest transient; while roles learn
        what all of them brought back as well."""
        return sum(o.resident for o in self.options) + max(
            *(max(o.transients[:2]) for o in self.options),
            self.learning_bytes + max(o.transients[2] for o in self.options),
        )

    @property
    def learning_bytes(self) -> float:
        """Bytes per device that roles which learn bring back from the host and keep until all of
        them are done."""
        return sum(o.learning for o in self.options)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan that the search weighs: placement, allocation, an option per role, and what a step of
    it costs. What a run takes of it is ``hjax.run.placement.Plan``."""

    sets: tuple[PlannedSet, ...]

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds per stage: sets run at the same time, as long as the slowest takes; where they
        share cores, at least as long as these take for all of them."""
        found = []
        for stage in range(len(STAGES)):
            cores: dict[DevicePool, float] = {}
            for s in self.sets:
                work = s.seconds[stage] * s.pool.core_share(s.devices)
                cores[s.pool] = cores.get(s.pool, 0.0) + work
            found.append(max(*(s.seconds[stage] for s in self.sets), *cores.values()))
        return tuple(found)

    @property
    def total(self) -> float:
        """Seconds of a step: stages add up."""
        return sum(self.stages)

    @property
    def devices(self) -> int:
        """How many it uses."""
        return sum(s.devices for s in self.sets)

    def option(self, role: str) -> RoleOption:
        """A role's."""
        return next(o for s in self.sets for r, o in zip(s.roles, s.options) if r == role)
