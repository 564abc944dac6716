"""Input and output types of the planner's search: frozen records without models or devices.

Sizes are in elements or bytes as named, times in seconds, rates per second.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from hjax.devices import Device
from hjax.models.cost_inputs import MeshSizes, Offload
from hjax.roles import STAGES


def log_interpolate(points: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate (x, y) points with rising x and positive y at ``at``, on logarithmic scales.

    Outside the points' range the first or last y is taken; without points 0."""
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
      hosts: total number.
      shape: sides of a slice, then devices per chip if several; empty for GPU machines.
      counts: numbers of devices that a set may take; empty: all that the hardware allows.
      where: labels of its hosts on an actual cluster.
      slices: number of slices of that shape, joined by the network; 1 for GPU machines.
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
        """How many times faster each of ``devices`` busy devices is than with all of them busy.

        The joint speed is interpolated between measured numbers of devices, on logarithmic scales.
        """
        together = [(n, n * f) for n, f, _ in self.device.alone]
        least = min((n for n, _ in together), default=devices)
        return log_interpolate(together, devices) / max(devices, least) if together else 1.0

    def core_share(self, devices: int) -> float:
        """Share of the cores' time that ``devices`` busy devices take; 0 where none are shared."""
        return log_interpolate([(n, c) for n, _, c in self.device.alone], devices)

    @property
    def domain(self) -> int:
        """Number of devices joined by ``device.link``: those of a host or a slice."""
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
    """The available devices; a set of models lies within one pool."""

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
    """One call that the algorithm makes in a step.

    Attributes:
      role, method: the called role and its method.
      kind: ``generate``, ``forward`` or ``update``.
      rows: sequences, as a share of the step's.
    """

    role: str
    method: str
    kind: Literal["generate", "forward", "update"]
    rows: float


@dataclasses.dataclass(frozen=True)
class Dataflow:
    """The dataflow of an algorithm's step: its roles with devices and their calls, in order."""

    name: str
    roles: tuple[str, ...]
    calls: tuple[PlannedCall, ...]

    def calls_of(self, role: str, kind: str) -> tuple[PlannedCall, ...]:
        """A role's calls of one kind."""
        return tuple(c for c in self.calls if c.role == role and c.kind == kind)


@dataclasses.dataclass(frozen=True)
class RoleOption:
    """One way to run a role on some devices: layout, micro-batch, remat, waves, offload; its cost.

    Attributes:
      seconds: of each of ``STAGES``; the first includes the transition.
      transition: seconds of the transition alone.
      resident: bytes per device during the whole run.
      transients: by stage, most further bytes per device while the role computes.
      micro_rows: micro-batch rows per replica of an update (gradients accumulate) or, in hjax, of a
        forward. 0: the role has neither.
      remat: rematerialisation policy of the backward pass (hjax.models.remat).
      waves: parts in which a replica decodes its sequences, one after another; 0 for roles that
        do not generate.
      offload: state kept in host memory between the role's calls.
      learning: bytes per device that an update brings back from the host; they stay until all
        roles of the set have updated.
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
        """Most non-resident bytes per device while only this role computes."""
        *before, update = self.transients
        return max(*before, update + self.learning)


@dataclasses.dataclass(frozen=True)
class PlannedSet:
    """A set of roles that share devices of a pool in turn, with an option each."""

    roles: tuple[str, ...]
    pool: DevicePool
    devices: int
    options: tuple[RoleOption, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds per stage: those of the set's roles add up."""
        return tuple(sum(o.seconds[s] for o in self.options) for s in range(len(STAGES)))

    @property
    def peak_bytes(self) -> float:
        """Peak bytes per device: all resident ones and the largest transient; during learning also
        ``learning_bytes``."""
        return sum(o.resident for o in self.options) + max(
            *(max(o.transients[:2]) for o in self.options),
            self.learning_bytes + max(o.transients[2] for o in self.options),
        )

    @property
    def learning_bytes(self) -> float:
        """Bytes per device that updates bring back from the host, until all roles have updated."""
        return sum(o.learning for o in self.options)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan under search: placement, allocation, an option per role, and the cost of a step.

    What a run uses is ``hjax.run.placement.Plan``."""

    sets: tuple[PlannedSet, ...]

    @property
    def stages(self) -> tuple[float, ...]:
        """Seconds per stage: of the slowest set, since sets run at the same time; with shared cores
        at least what the cores need for all sets."""
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
        """Number of devices in use."""
        return sum(s.devices for s in self.sets)

    def option(self, role: str) -> RoleOption:
        """The option of a role."""
        return next(o for s in self.sets for r, o in zip(s.roles, s.options) if r == role)
