"""Clusters by name, and the numbers of devices that a set of models may take."""

import functools
import math
import re

from hjax.devices import MAX_CLUSTER_DEVICES, Device, device, full_hardware_name
from hjax.errors import ConfigError, truncate
from hjax.planning.plan_types import Cluster, DevicePool
from hjax.planning.profile import CALIBRATE_COMMAND
from hjax.rules import DIGITS
from hjax.sharding.interconnect import ring_load, wraparound

_HOST = 8  # devices of most hosts


def parse_cluster(text: str) -> Cluster:
    """Parse a cluster's name: ``16x8:a100-80g`` (hosts x devices), ``v5p:4x4x4`` or
    ``2xv5p:4x4x4`` (slices x sides), or a usual one such as ``8xh100`` or ``v5p-16``
    (``hjax.devices.full_hardware_name``), joined by ``+``.

    Raises:
      ConfigError: another form, an unknown device, or too many.
    """
    cluster = Cluster(tuple(_parse_pool(part.strip()) for part in text.split("+")))
    if cluster.size > MAX_CLUSTER_DEVICES:
        raise ConfigError(f"--cluster={truncate(text, 80)}: at most {MAX_CLUSTER_DEVICES} devices")
    return cluster


def _parse_pool(text: str) -> DevicePool:
    sizes, slices, text = f"{DIGITS}(?:x{DIGITS})*", 1, full_hardware_name(text)
    if match := re.fullmatch(rf"({sizes}):([\w.-]+)", text):
        numbers, name = match.groups()
    elif match := re.fullmatch(rf"(?:({DIGITS})x)?([a-z][\w.-]*):({sizes})", text, re.IGNORECASE):
        slices, name, numbers = int(match[1] or 1), match[2], match[3]
    else:
        raise ConfigError(
            f"--cluster={text}: it should be HOSTSxDEVICES:DEVICE, such as 16x8:a100-80g, or "
            "TPU:SIDExSIDE, such as v5p:4x4x4, of equal slices 2xv5p:4x4x4, or a usual name, "
            "such as 8xh100, v5e-8 or v5p-16; several are joined by +"
        )
    if name.lower() == "cpu":
        raise ConfigError(
            f"--cluster={text}: no CPU has a data sheet here; {CALIBRATE_COMMAND} measures this "
            "machine, and a run with --config.placement=auto is planned by what was measured"
        )
    kind, shape = device(name), tuple(int(n) for n in numbers.split("x"))
    if min(*shape, slices) < 1:
        raise ConfigError(f"--cluster={text}: sizes of 1 or more")
    if kind.torus:
        return _parse_slices(kind, shape, slices, text)
    if slices > 1:
        raise ConfigError(
            f"--cluster={text}: {kind.name} has no slices; HOSTSxDEVICES:{kind.name} takes hosts"
        )
    if len(shape) > 2:
        raise ConfigError(f"--cluster={text}: {kind.name} takes HOSTSxDEVICES, two numbers")
    hosts, per_host = (1, *shape) if len(shape) == 1 else shape
    return DevicePool(kind, hosts, per_host)


def _parse_slices(kind: Device, shape: tuple[int, ...], slices: int, text: str) -> DevicePool:
    if len(shape) != kind.torus or any(n & (n - 1) for n in shape):
        example = "x".join(["4"] * kind.torus)
        raise ConfigError(
            f"--cluster={text}: a {kind.name} slice has {kind.torus} sides, each a power of two, "
            f"such as {kind.name}:{example}"
        )
    if kind.cores > 1:
        shape = (*shape, kind.cores)
    per_host = min(kind.per_host, math.prod(shape))
    return DevicePool(kind, slices * math.prod(shape) // per_host, per_host, shape, slices=slices)


@functools.cache
def legal_counts(pool: DevicePool) -> tuple[int, ...]:
    """Numbers of devices that a set of models may take.

    They are ``pool.counts`` if given. Otherwise, within a host (or an NVLink rack): divisors of its
    size, powers of two and multiples of 8; above: whole hosts. On a torus: the boxes from halving
    its longest side repeatedly, and whole slices."""
    if pool.counts:
        return pool.counts
    if pool.shape:
        boxes = tuple(2**i for i in range(int(math.log2(pool.domain)) + 1))
        return (*boxes, *(pool.domain * n for n in range(2, pool.slices + 1)))
    below = [
        n
        for n in range(1, pool.per_host)
        if pool.per_host % n == 0 or n & (n - 1) == 0 or n % _HOST == 0
    ]
    return (*below, *(pool.per_host * hosts for hosts in range(1, pool.hosts + 1)))


def sub_slice(pool: DevicePool, devices: int) -> tuple[int, ...]:
    """Sides of the box of a slice that a set of ``devices`` gets; of larger sets the slice's."""
    sides = list(pool.shape)
    while math.prod(sides) > devices:
        sides[sides.index(max(sides))] //= 2
    return tuple(sides)


@functools.lru_cache(maxsize=1 << 16)
def link_contention(pool: DevicePool, devices: int, size: int, stride: int) -> int:
    """Contention on a torus: how many ring steps of a mesh axis share the busiest link. The rings
    have ``size`` devices, ``stride`` ranks apart, in the box of ``devices``; 1 for neighbours."""
    if not pool.shape:
        return 1
    sides = sub_slice(pool, devices)
    closes = wraparound(pool.device.name, pool.shape)
    whole = tuple(n == all_ and c for n, all_, c in zip(sides, pool.shape, closes))
    return ring_load(sides, whole, size, stride)


@functools.lru_cache(maxsize=1 << 16)
def fit_together(pool: DevicePool, counts: tuple[int, ...]) -> bool:
    """Whether sets of these legal sizes fit into the pool at once, where a set either lies within
    a host or takes whole hosts."""
    if sum(counts) > pool.size:
        return False
    if fits_by_sum(pool):
        return True
    whole = sum(n // pool.per_host for n in counts if n >= pool.per_host)
    parts = tuple(sorted((n for n in counts if n < pool.per_host), reverse=True))
    return _pack(parts, (pool.per_host,) * min(pool.hosts - whole, len(parts)))


@functools.cache
def fits_by_sum(pool: DevicePool) -> bool:
    """Whether sets of legal sizes always fit if their sum is at most the pool's size: there is one
    host, or each size below a host divides the next (packing from the largest leaves no gap)."""
    below = [n for n in legal_counts(pool) if n <= pool.per_host]
    chain = all(b % a == 0 for a, b in zip(below, below[1:]))
    return bool(pool.shape) or pool.hosts == 1 or chain


def _pack(parts: tuple[int, ...], room: tuple[int, ...]) -> bool:
    if not parts:
        return True
    for left in set(room):
        if left >= parts[0]:
            rest = list(room)
            rest[rest.index(left)] -= parts[0]
            if _pack(parts[1:], tuple(sorted(rest))):
                return True
    return False
