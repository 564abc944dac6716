"""The interconnect: coordinates of devices on a torus, in a host or NVLink domain, and hop counts.

``hjax.sharding.device_mesh`` uses it to lay mesh axes on devices. Simulated devices have no
coordinates and keep their order.

Tori, wrap-around links, networks between slices: "How to Scale Your Model" (jax-ml, 2025), TPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Wrap-around links: a 2D torus has them along sides that are a multiple of a pod's, a 3D torus if
# all its sides are multiples of a cube's.
POD, CUBE = 16, 4
NVLINK_RACKS = ("gb200", "gb300")
_FLAT = ("lite", "v5e", "v6e", "v2", "v3")  # kinds whose torus has two dimensions


@dataclasses.dataclass(frozen=True, eq=False)
class Interconnect:
    """Coordinates of devices, in the order in which they were given.

    Attributes:
      places: int [devices, dimensions], from 0: torus coordinates; for GPUs the index in a domain.
      sides: of the box that they fill; a TPU with two devices a chip has a last side of 2.
      wraps: whether each side has wrap-around links.
      domains: int [devices], the slice or NVLink domain of each. A network joins domains.
      torus: whether the devices of a domain form a torus; else all of them are neighbours.
    """

    places: np.ndarray
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    domains: np.ndarray
    torus: bool

    @functools.cached_property
    def boxes(self) -> int:
        """Number of domains, if each is a full box of ``sides``; else 0."""
        numbers, counts = np.unique(self.domains, return_counts=True)
        full = bool((counts == math.prod(self.sides)).all())
        distinct = len({(d, *p) for d, p in zip(self.domains.tolist(), self.places.tolist())})
        return len(numbers) if full and distinct == len(self.domains) else 0

    def hops(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Links between devices, given by number in arrays of one shape; 0 across domains."""
        inside = self.domains[one] == self.domains[other]
        if not self.torus:
            return np.where(inside & (one != other), 1, 0)
        distance = np.abs(self.places[one] - self.places[other])
        wrapped = np.where(self.wraps, np.array(self.sides) - distance, distance)
        return np.where(inside, np.minimum(distance, wrapped).sum(-1), 0)

    def rings(self, rows: np.ndarray) -> ConcurrentRings:
        """The cost of rings of devices that all run at once.

        Args:
          rows: int [rings, size]: numbers of the devices of each ring, in ring order.
        """
        if rows.shape[1] < 2:
            return ConcurrentRings(0.0, 0.0, 0)
        after = np.roll(rows, -1, axis=1)
        crosses = self.domains[rows] != self.domains[after]
        inside = self.hops(rows, after)[~crosses]
        hops = float(inside.mean()) if inside.size else 0.0
        return ConcurrentRings(hops, float(crosses.mean()), self._max_link_load(rows, after))

    def _max_link_load(self, one: np.ndarray, other: np.ndarray) -> int:
        """Steps over the most used link, either direction, with dimension-ordered routing."""
        if not self.torus:
            return 1
        used: dict[tuple[int, ...], int] = {}
        start, end = one.ravel(), other.ravel()
        same = self.domains[start] == self.domains[end]
        for domain, place, target in zip(
            self.domains[start[same]].tolist(),
            self.places[start[same]].tolist(),
            self.places[end[same]].tolist(),
        ):
            for axis, side in enumerate(self.sides):
                left = target[axis] - place[axis]
                if self.wraps[axis] and abs(left) > side / 2:
                    left -= math.copysign(side, left)
                step = 1 if left > 0 else -1
                for _ in range(int(abs(left))):
                    after = (place[axis] + step) % side
                    low = after if step < 0 else place[axis]
                    link = (domain, *place[:axis], low, *place[axis + 1 :], axis)
                    used[link] = used.get(link, 0) + 1
                    place[axis] = after
        return max(used.values(), default=0)


@dataclasses.dataclass(frozen=True)
class ConcurrentRings:
    """The cost of rings that run at the same time.

    Attributes:
      hops: mean links from a device to the next one, over the steps within a domain.
      network: fraction of the steps that leave a domain.
      busiest: how many steps use the most used link: one for a ring that wraps around a torus or
        closes within a box, two for a line, which must come back over its links.
    """

    hops: float
    network: float
    busiest: int


def interconnect_of(devices: Sequence[Any]) -> Interconnect | None:
    """The interconnect of these devices; None if it is unknown (simulated devices, a single one).

    TPUs report coordinates and, over several slices, a slice number. GPUs report their NVLink
    domain (``fabric_uuid``, ``slice_index``), or only the process.

    Args:
      devices: jax.Device, or objects with its attributes.
    """
    platform = getattr(devices[0], "platform", "")
    if len(devices) < 2 or any(getattr(d, "platform", "") != platform for d in devices):
        return None
    if platform == "tpu":
        return _torus(devices)
    if platform in ("gpu", "cuda", "rocm"):
        return _domains(devices)
    return None


def _torus(devices: Sequence[Any]) -> Interconnect | None:
    if any(getattr(d, "coords", None) is None for d in devices):
        return None
    slices = _numbered(getattr(d, "slice_index", 0) or 0 for d in devices)
    places, sides = _box(devices, slices)
    every = _all_devices(devices)
    slice_sides = _box(every, _numbered(getattr(d, "slice_index", 0) or 0 for d in every))[1]
    # A part of a slice wraps around only along the sides that it has whole.
    ends = zip(sides, slice_sides, wraparound(devices[0].device_kind, slice_sides))
    return Interconnect(places, sides, tuple(n == all_ and w for n, all_, w in ends), slices, True)


def _box(devices: Sequence[Any], slices: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Coordinates from 0 in each slice, and the sides of the largest slice."""
    cores = [getattr(d, "core_on_chip", 0) or 0 for d in devices]
    places = np.array([(*d.coords, core) for d, core in zip(devices, cores)], np.int64)
    for number in np.unique(slices):
        places[slices == number] -= places[slices == number].min(axis=0)
    return places, tuple((places.max(axis=0) + 1).tolist())


def _all_devices(devices: Sequence[Any]) -> Sequence[Any]:
    """All devices of these devices' client, if it can list them."""
    try:
        every = devices[0].client.devices()
    except (AttributeError, NotImplementedError, RuntimeError):
        return devices  # of an abstract topology
    return every if set(devices) <= set(every) else devices


def _domains(devices: Sequence[Any]) -> Interconnect:
    domains = _numbered(domain_of(d) for d in devices)
    order = {id(d): i for i, d in enumerate(sorted(devices, key=lambda d: (d.process_index, d.id)))}
    seen: dict[int, list[int]] = {}
    for domain, d in zip(domains.tolist(), devices):
        seen.setdefault(domain, []).append(order[id(d)])
    places = [
        [sorted(seen[domain]).index(order[id(d)])] for domain, d in zip(domains.tolist(), devices)
    ]
    numbers = np.array(places, np.int64)
    return Interconnect(numbers, (int(numbers.max()) + 1,), (True,), domains, False)


def domain_of(device: Any) -> Any:
    """An identifier of a GPU's NVLink domain.

    In a Grace-Blackwell rack it is the fabric's name (other GPUs may report a fabric that joins no
    hosts), else the slice index, which JAX takes from the host or from its settings, else the
    process.
    """
    fabric = getattr(device, "fabric_uuid", None)
    kind = str(getattr(device, "device_kind", "")).lower()
    if fabric and any(rack in kind for rack in NVLINK_RACKS) and set(str(fabric)) - set("0-/"):
        return (0, str(fabric))
    number = getattr(device, "slice_index", None)
    return (1, device.process_index if number is None else number)


def _numbered(keys: Any) -> np.ndarray:
    """Number keys by their sorted order."""
    listed = list(keys)
    known = {key: i for i, key in enumerate(sorted(set(listed)))}
    return np.array([known[key] for key in listed], np.int64)


def wraparound(kind: str, sides: Sequence[int]) -> tuple[bool, ...]:
    """Whether each side of a slice has wrap-around links.

    Args:
      kind: ``device_kind``, or the name in ``hjax.devices``.
      sides: x, y, z, and cores of a chip if they are devices of their own.
    """
    plain = kind.lower()
    if any(name in plain for name in _FLAT):
        return tuple(n % POD == 0 for n in sides)
    chips = [n for n in sides[:3] if n > 1]
    whole = len(chips) == 3 and all(n % CUBE == 0 for n in chips)
    return tuple(whole and i < 3 for i in range(len(sides)))


def box_order(interconnect: Interconnect) -> np.ndarray:
    """Numbers of devices, ordered so that each consecutive half, quarter, ... is a box: the longest
    side is halved again and again. Domains follow one another."""
    keys = [interconnect.domains]
    sides, bits = list(interconnect.sides), interconnect.places.copy()
    while max(sides) > 1:
        axis = sides.index(max(sides))
        half = -(-sides[axis] // 2)
        upper = bits[:, axis] >= half
        keys.append(upper.astype(np.int64))
        bits[:, axis] -= np.where(upper, half, 0)
        sides[axis] = half
    return np.lexsort(keys[::-1])


def partition_devices(devices: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Partition devices into compact sets of these sizes: boxes of a torus, one host if it fits.

    Devices whose interconnect is unknown are taken in their order.
    """
    interconnect = interconnect_of(devices) if devices else None
    if interconnect is None or not interconnect.boxes:
        return [list(devices[a : a + n]) for a, n in zip(np.cumsum([0, *counts]), counts)]
    order = box_order(interconnect)
    domain = math.prod(interconnect.sides)
    free = np.ones(len(order), bool)
    found: dict[int, list[Any]] = {}
    for number in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        count = counts[number]
        start = _best_start(free, count, domain)
        taken = range(start, start + count) if start is not None else np.flatnonzero(free)[:count]
        free[list(taken)] = False
        found[number] = [devices[order[i]] for i in taken]
    return [found[number] for number in range(len(counts))]


def _best_start(free: np.ndarray, count: int, domain: int) -> int | None:
    """Start of ``count`` consecutive free devices, preferably aligned to ``count``, then within one
    domain, then anywhere; None if there are none."""
    starts = [i for i in range(len(free) - count + 1) if free[i : i + count].all()]
    inside = [i for i in starts if i // domain == (i + count - 1) // domain or i % domain == 0]
    aligned = [i for i in inside if (i % domain) % min(count, domain) == 0]
    checks: tuple[list[int], ...] = (aligned, inside, starts)
    return next((found[0] for found in checks if found), None)


@functools.lru_cache(maxsize=1 << 14)
def ring_load(sides: tuple[int, ...], closes: tuple[bool, ...], size: int, stride: int) -> int:
    """Steps over the most used link of a box (``ConcurrentRings.busiest``) when all rings of one
    axis run: a closed form for planners. The axis has ``size`` devices, ``stride`` devices apart.

    Axes are assigned to sides as ``hjax.sharding.device_mesh`` does it: with few hops, above all
    for inner axes. Along one side with wrap-around, neighbours are ``s`` links apart and ``s``
    rings share each link. Without wrap-around they also come back over it. Over several sides a
    ring closes within the box.
    """
    if size == 1:
        return 0
    rest = math.prod(sides) // (size * stride)
    found = []
    for table in side_assignments(sides, (rest, size, stride)):
        inner = [(n, 1, n == side and c) for (_, _, n), side, c in zip(table, sides, closes)]
        middle = [(k, n, k * n == s and c) for (_, k, n), s, c in zip(table, sides, closes)]
        outer = [(r, k * n, c) for (r, k, n), c in zip(table, closes)]
        hops = 8 * _mean_hops(inner) + 4 * _mean_hops(middle) + _mean_hops(outer)
        found.append((round(hops, 9), _ring_link_load(middle)))
    return min(found, key=lambda one: one[0])[1]


# Along each side: (devices, links between neighbours, whether it wraps around).
_SideParts = Sequence[tuple[int, int, bool]]


def _mean_hops(parts: _SideParts) -> float:
    """Mean links to the next device on a snake-like path over the sides, with a tenth of the weight
    for the way back to the first (as in ``hjax.sharding.device_mesh``)."""
    used = sorted((links, n, closed) for n, links, closed in parts if n > 1)
    size = math.prod(n for _, n, _ in used)
    if size == 1:
        return 0.0
    left, way = size, 0
    for links, n, _ in used:
        way += (left - left // n) * links
        left //= n
    links, n, closed = used[-1]
    back = links if closed or len(used) > 1 else links * (n - 1)
    return 0.9 * way / (size - 1) + 0.1 * (way + back) / size


def _ring_link_load(parts: _SideParts) -> int:
    used = [(links, closed and n > 2) for n, links, closed in parts if n > 1]
    if len(used) == 1:
        links, closed = used[0]
        return links if closed else 2 * links
    return max(links for links, _ in used)


# [torus side][mesh axis]: the axis's factor of the side.
SideAssignment = tuple[tuple[int, ...], ...]


def side_assignments(sides: Sequence[int], lengths: Sequence[int]) -> Iterator[SideAssignment]:
    """All assignments of a torus's sides to mesh axes, minor axes on whole sides first."""
    if not lengths:
        if all(n == 1 for n in sides):
            yield ((),) * len(sides)
        return
    for part in _axis_splits(lengths[-1], sides):
        for rest in side_assignments([side // n for side, n in zip(sides, part)], lengths[:-1]):
            yield tuple((*row, n) for row, n in zip(rest, part))


def _axis_splits(size: int, sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Factorizations of an axis into parts of the sides, the largest parts first."""
    if not sides:
        if size == 1:
            yield ()
        return
    for n in range(math.gcd(size, sides[0]), 0, -1):
        if size % n == 0 and sides[0] % n == 0:
            for rest in _axis_splits(size // n, sides[1:]):
                yield (n, *rest)
