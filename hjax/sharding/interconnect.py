"""Where devices stand: their places on a torus, in a host or an NVLink domain, and how far apart.

``hjax.sharding.device_mesh`` lays mesh axes on what is said here. Simulated devices stand nowhere,
and keep the order in which they are given.

Tori, their wrap-around links and what joins slices: "How to Scale Your Model" (jax-ml, 2025), TPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# Sides of a torus of which every multiple has wrap-around links: TPUs of two dimensions have them
# around a whole pod's side, those of three where all sides are multiples of a cube's.
POD, CUBE = 16, 4
RACKS = ("gb200", "gb300")
_FLAT = ("lite", "v5e", "v6e", "v2", "v3")  # kinds whose torus has two dimensions


@dataclasses.dataclass(frozen=True, eq=False)
class Interconnect:
    """Places of devices, in the order in which they were given.

    Attributes:
      places: int [devices, dimensions], from 0: on a torus; of GPUs the place in their domain.
      sides: of the box that they fill; the last one of a TPU with two devices a chip is 2.
      wraps: whether each side closes to a ring.
      domains: int [devices]: the slice, or the hosts that NVLink joins, each is in. The network is
        between them.
      torus: whether devices of a domain reach each other by way of others; else all are neighbours.
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
        """Links between devices by their numbers, arrays of one shape; 0 in different domains."""
        inside = self.domains[one] == self.domains[other]
        if not self.torus:
            return np.where(inside & (one != other), 1, 0)
        apart = np.abs(self.places[one] - self.places[other])
        around = np.where(self.wraps, np.array(self.sides) - apart, apart)
        return np.where(inside, np.minimum(apart, around).sum(-1), 0)

    def rings(self, rows: np.ndarray) -> ConcurrentRings:
        """What rings of devices cost, all of them at once.

        Args:
          rows: int [rings, size]: numbers of the devices of each ring, in its order.
        """
        if rows.shape[1] < 2:
            return ConcurrentRings(0.0, 0.0, 0)
        after = np.roll(rows, -1, axis=1)
        crosses = self.domains[rows] != self.domains[after]
        inside = self.hops(rows, after)[~crosses]
        hops = float(inside.mean()) if inside.size else 0.0
        return ConcurrentRings(hops, float(crosses.mean()), self._busiest(rows, after))

    def _busiest(self, one: np.ndarray, other: np.ndarray) -> int:
        """Steps over the most used link, either way, when each goes dimension after dimension."""
        if not self.torus:
            return 1
        used: dict[tuple[int, ...], int] = {}
        start, end = one.ravel(), other.ravel()
        same = self.domains[start] == self.domains[end]
        pairs = zip(
            self.domains[start[same]].tolist(),
            self.places[start[same]].tolist(),
            self.places[end[same]].tolist(),
        )
        for domain, place, target in pairs:
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
    """Rings that run at the same time.

    Attributes:
      hops: links from a device to the next one, mean over the steps within a domain.
      network: share of the steps that leave a domain.
      busiest: how many steps go over the most used link. Of a ring that closes around a torus, or
        within a box, each link has one; back along a line each has two.
    """

    hops: float
    network: float
    busiest: int


def wires_of(devices: Sequence[Any]) -> Interconnect | None:
    """Where these devices stand; None where they do not say (simulated ones, one alone).

    TPUs have coordinates and, in several slices, the slice's number. GPUs in hosts, or in racks
    that NVLink joins, have that domain's (``fabric_uuid``, ``slice_index``), or the process alone.

    Args:
      devices: jax.Device, or whatever has its attributes.
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
    slices = _numbers(getattr(d, "slice_index", 0) or 0 for d in devices)
    places, sides = _box(devices, slices)
    every = _whole(devices)
    slice_sides = _box(every, _numbers(getattr(d, "slice_index", 0) or 0 for d in every))[1]
    # A part of a slice closes to a ring only along the sides that it has whole.
    closes = zip(sides, slice_sides, wraps(devices[0].device_kind, slice_sides))
    return Interconnect(
        places, sides, tuple(n == all_ and w for n, all_, w in closes), slices, True
    )


def _box(devices: Sequence[Any], slices: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Places from 0 in each slice, and the sides of the largest."""
    cores = [getattr(d, "core_on_chip", 0) or 0 for d in devices]
    places = np.array([(*d.coords, core) for d, core in zip(devices, cores)], np.int64)
    for number in np.unique(slices):
        places[slices == number] -= places[slices == number].min(axis=0)
    return places, tuple((places.max(axis=0) + 1).tolist())


def _whole(devices: Sequence[Any]) -> Sequence[Any]:
    """All devices beside these, where their client knows them."""
    try:
        every = devices[0].client.devices()
    except (AttributeError, NotImplementedError, RuntimeError):
        return devices  # of a topology that is not there, or stand-ins
    return every if set(devices) <= set(every) else devices


def _domains(devices: Sequence[Any]) -> Interconnect:
    domains = _numbers(domain_of(d) for d in devices)
    order = {id(d): i for i, d in enumerate(sorted(devices, key=_rank))}
    seen: dict[int, list[int]] = {}
    for domain, d in zip(domains.tolist(), devices):
        seen.setdefault(domain, []).append(order[id(d)])
    places = [
        [sorted(seen[domain]).index(order[id(d)])] for domain, d in zip(domains.tolist(), devices)
    ]
    numbers = np.array(places, np.int64)
    return Interconnect(numbers, (int(numbers.max()) + 1,), (True,), domains, False)


def domain_of(device: Any) -> Any:
    """What tells a GPU's NVLink domain from others.

    Of a rack of Grace-Blackwell the fabric's name (other GPUs may report a fabric that joins no
    hosts), else the slice's number, which JAX counts by hosts or as it is told, else the process.
    """
    fabric = getattr(device, "fabric_uuid", None)
    kind = str(getattr(device, "device_kind", "")).lower()
    if fabric and any(rack in kind for rack in RACKS) and set(str(fabric)) - set("0-/"):
        return (0, str(fabric))
    number = getattr(device, "slice_index", None)
    return (1, device.process_index if number is None else number)


def _rank(device: Any) -> tuple[int, int]:
    return device.process_index, device.id


def _numbers(keys: Any) -> np.ndarray:
    """Keys numbered in their order."""
    listed = list(keys)
    known = {key: i for i, key in enumerate(sorted(set(listed)))}
    return np.array([known[key] for key in listed], np.int64)


def wraps(kind: str, sides: Sequence[int]) -> tuple[bool, ...]:
    """Whether each side of a slice closes to a ring.

    Args:
      kind: ``device_kind``, or the catalogue's name.
      sides: x, y, z, and cores of a chip where they are devices of their own.
    """
    plain = kind.lower()
    if any(name in plain for name in _FLAT):
        return tuple(n % POD == 0 for n in sides)
    chips = [n for n in sides[:3] if n > 1]
    whole = len(chips) == 3 and all(n % CUBE == 0 for n in chips)
    return tuple(whole and i < 3 for i in range(len(sides)))


def in_boxes(wires: Interconnect) -> np.ndarray:
    """Numbers of devices such that a part of half, a quarter, ... of them in a row is a box: the
    longest side halved, again and again; one domain after another."""
    keys = [wires.domains]
    sides, bits = list(wires.sides), wires.places.copy()
    while max(sides) > 1:
        axis = sides.index(max(sides))
        half = -(-sides[axis] // 2)
        upper = bits[:, axis] >= half
        keys.append(upper.astype(np.int64))
        bits[:, axis] -= np.where(upper, half, 0)
        sides[axis] = half
    return np.lexsort(keys[::-1])


def cut(devices: Sequence[Any], counts: Sequence[int]) -> list[list[Any]]:
    """Devices for sets of these sizes, each in one place: a box of a torus, one host if it fits.

    Devices that do not say where they stand are dealt out in the order in which they are given.
    """
    wires = wires_of(devices) if devices else None
    if wires is None or not wires.boxes:
        starts = np.cumsum([0, *counts])
        return [list(devices[a : a + n]) for a, n in zip(starts, counts)]
    order = in_boxes(wires)
    domain = math.prod(wires.sides)
    free = np.ones(len(order), bool)
    found: dict[int, list[Any]] = {}
    for number in sorted(range(len(counts)), key=lambda i: (-counts[i], i)):
        count = counts[number]
        start = _first(free, count, domain)
        taken = range(start, start + count) if start is not None else np.flatnonzero(free)[:count]
        free[list(taken)] = False
        found[number] = [devices[order[i]] for i in taken]
    return [found[number] for number in range(len(counts))]


def _first(free: np.ndarray, count: int, domain: int) -> int | None:
    """Where ``count`` free devices in a row begin, best: aligned to their number, then within one
    domain, then anywhere."""
    starts = [i for i in range(len(free) - count + 1) if free[i : i + count].all()]
    inside = [i for i in starts if i // domain == (i + count - 1) // domain or i % domain == 0]
    aligned = [i for i in inside if (i % domain) % min(count, domain) == 0]
    checks: tuple[list[int], ...] = (aligned, inside, starts)
    return next((found[0] for found in checks if found), None)


@functools.lru_cache(maxsize=1 << 14)
def ring_load(sides: tuple[int, ...], closes: tuple[bool, ...], size: int, stride: int) -> int:
    """Steps over the most used link of a box (``ConcurrentRings.busiest``) when rings of ``size``
    devices, each standing for ``stride`` of inner axes, all run: a closed form for planners.

    The sides are shared out as ``hjax.sharding.device_mesh`` does it: so that the ways are short,
    of inner axes above all. Along one side that closes, neighbours are ``s`` links apart and as
    many rings share each link; where it does not close, they also come back over it. Over several
    sides a ring closes within the box.
    """
    if size == 1:
        return 0
    rest = math.prod(sides) // (size * stride)
    found = []
    for table in shares(sides, (rest, size, stride)):
        inner = [(n, 1, n == side and c) for (_, _, n), side, c in zip(table, sides, closes)]
        middle = [(k, n, k * n == s and c) for (_, k, n), s, c in zip(table, sides, closes)]
        outer = [(r, k * n, c) for (r, k, n), c in zip(table, closes)]
        ways = 8 * _ways(inner) + 4 * _ways(middle) + _ways(outer)
        found.append((round(ways, 9), _load(middle)))
    return min(found, key=lambda one: one[0])[1]


# (devices, links between neighbours, whether it closes) along each side.
_Parts = Sequence[tuple[int, int, bool]]


def _ways(parts: _Parts) -> float:
    """Mean links from a device to the next, back and forth over the sides; and of a ring, a little
    (see ``hjax.sharding.device_mesh``)."""
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


def _load(parts: _Parts) -> int:
    used = [(links, closed and n > 2) for n, links, closed in parts if n > 1]
    if len(used) == 1:
        links, closed = used[0]
        return links if closed else 2 * links
    return max(links for links, _ in used)


# [torus side][mesh axis]: how much of the side the axis takes.
Table = tuple[tuple[int, ...], ...]


def shares(sides: Sequence[int], lengths: Sequence[int]) -> Iterator[Table]:
    """Every way to share a torus's sides out among mesh axes, minor axes whole sides first."""
    if not lengths:
        if all(n == 1 for n in sides):
            yield ((),) * len(sides)
        return
    for part in _splits(lengths[-1], sides):
        left = [side // n for side, n in zip(sides, part)]
        for rest in shares(left, lengths[:-1]):
            yield tuple((*row, n) for row, n in zip(rest, part))


def _splits(size: int, sides: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Ways to make up an axis of parts of the sides, the largest parts first."""
    if not sides:
        if size == 1:
            yield ()
        return
    for n in range(math.gcd(size, sides[0]), 0, -1):
        if size % n == 0 and sides[0] % n == 0:
            for rest in _splits(size // n, sides[1:]):
                yield (n, *rest)
