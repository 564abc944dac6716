"""Device order of a mesh: mesh axes laid on the physical interconnect.

JAX's ``mesh_utils`` lays the axes on the sides of a torus, and over slices and hosts
(``create_hybrid_device_mesh``); the axes that generation cuts out of training's stay inside them.
Along each axis devices are then ordered so that its rings have the fewest hops. Of several
candidate meshes the one with the lowest hop cost is taken. The result depends on the devices
alone, not on the order in which they are given.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hjax.sharding.interconnect import (
    ConcurrentRings,
    Interconnect,
    SideAssignment,
    interconnect_of,
    side_assignments,
)

MICRO_SUFFIX = "_micro"
# Weights of an axis's hops: tensor axes communicate in every layer, replicas once an update.
AXIS_WEIGHTS = {"tensor": 8.0, "context": 4.0, "expert": 4.0, "fsdp": 4.0, "pipe": 1.0, "data": 1.0}

# Side assignments that are tried at most, and candidates whose lines are reordered.
MAX_ASSIGNMENTS, MAX_REORDERED = 256, 8


def place_devices(devices: Sequence[Any], shape: Mapping[str, int]) -> np.ndarray:
    """Devices [sizes of the axes], ordered by their interconnect.

    Args:
      devices: as many as the mesh has. They keep their order if the interconnect is unknown or
        they fill no box.
      shape: sizes by axis, major to minor; an axis is followed by its ``_micro`` axis.
    """
    flat = np.empty(len(devices), dtype=object)
    flat[:] = list(devices)
    lengths = tuple(shape.values())
    interconnect = interconnect_of(devices)
    if interconnect is None or not interconnect.boxes:
        return flat.reshape(lengths)
    key = _DeviceKey.of(devices, interconnect)
    return flat[_best_order(tuple(shape.items()), key)].reshape(lengths)


def rings_over_axes(
    grid: np.ndarray, axes: Sequence[str], names: Sequence[str]
) -> ConcurrentRings | None:
    """The cost of rings over some of a mesh's axes.

    Args:
      grid: devices [sizes of the axes].
      axes: over which each ring goes.
      names: of all axes.

    Returns:
      None if the interconnect is unknown.
    """
    flat = grid.ravel()
    interconnect = interconnect_of(list(flat))
    if interconnect is None:
        return None
    numbers = np.arange(flat.size).reshape(grid.shape)
    return interconnect.rings(_axis_lines(numbers, [list(names).index(a) for a in axes]))


def train_axes(shape: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The training axes larger than 1, each with the axes that generation cuts it into."""
    found: dict[str, tuple[str, ...]] = {}
    for axis in shape:
        whole = axis.removesuffix(MICRO_SUFFIX)
        found[whole] = (*found.get(whole, ()), axis)
    return {whole: axes for whole, axes in found.items() if math.prod(shape[a] for a in axes) > 1}


def ring_table(shape: Mapping[str, int], grid: np.ndarray) -> dict[str, ConcurrentRings]:
    """The rings of training's axes and of those that generation cuts out, by name; empty if the
    interconnect is unknown."""
    found: dict[str, ConcurrentRings] = {}
    for whole, axes in train_axes(shape).items():
        parts = [a for a in axes if shape[a] > 1]
        kinds = [(whole, axes)]
        if len(parts) > 1:
            kinds += [(f"{whole}, of generation" if a == whole else a, (a,)) for a in parts]
        for name, parts_of_axis in kinds:
            rings = rings_over_axes(grid, parts_of_axis, list(shape))
            if rings is None:
                return {}
            found[name] = rings
    return found


class _DeviceKey:
    """Hashable description of devices that decides their order; the key of a cache."""

    def __init__(self, kind: str, cores: bool, interconnect: Interconnect):
        self.kind, self.cores, self.interconnect = kind, cores, interconnect
        places = tuple(map(tuple, interconnect.places.tolist()))
        domains = tuple(interconnect.domains.tolist())
        self._value = (kind, cores, interconnect.torus, interconnect.wraps, domains, places)

    @classmethod
    def of(cls, devices: Sequence[Any], interconnect: Interconnect) -> _DeviceKey:
        """The key of JAX's devices."""
        cores = interconnect.torus and interconnect.sides[-1] > 1
        return cls(str(devices[0].device_kind) if cores else "", cores, interconnect)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DeviceKey) and self._value == other._value


@functools.lru_cache(maxsize=256)
def _best_order(shape: tuple[tuple[str, int], ...], key: _DeviceKey) -> np.ndarray:
    """Device numbers, flat, of the mesh with the lowest hop cost."""
    sizes, links = dict(shape), key.interconnect
    found = sorted(_candidates(sizes, key), key=lambda grid: _cost(grid, sizes, links))
    found = [_reordered(grid, sizes, links) for grid in found[:MAX_REORDERED]]
    return min(found, key=lambda grid: _cost(grid, sizes, links)).ravel()


def _candidates(sizes: Mapping[str, int], key: _DeviceKey) -> Iterator[np.ndarray]:
    """Candidate meshes, device numbers [sizes]: training's axes laid by JAX and then cut for
    generation; all axes laid by JAX; every side assignment; and coordinates in order."""
    from jax.experimental import mesh_utils

    links = key.interconnect
    lengths = tuple(sizes.values())
    whole: dict[str, int] = {}
    for axis, n in sizes.items():
        whole[axis.removesuffix(MICRO_SUFFIX)] = whole.get(axis.removesuffix(MICRO_SUFFIX), 1) * n
    abstract = _abstract_devices(key)
    domains = links.boxes
    for axis_sizes in (tuple(whole.values()), lengths):
        outer = _network_factors(axis_sizes, domains)
        if outer is None:
            continue
        inner = [n // o for n, o in zip(axis_sizes, outer)]
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, abstract, allow_split_physical_axes=True
        )
        yield np.vectorize(lambda d: d.number, otypes=[np.int64])(grid).reshape(lengths)
    outer = _network_factors(lengths, domains)
    if outer is not None and links.torus:
        inner = [n // o for n, o in zip(lengths, outer)]
        for table in itertools.islice(side_assignments(links.sides, inner), MAX_ASSIGNMENTS):
            yield _grid_of(links, table, outer).reshape(lengths)
    yield np.lexsort([*links.places.T[::-1], links.domains]).reshape(lengths)


def _grid_of(links: Interconnect, table: SideAssignment, outer: Sequence[int]) -> np.ndarray:
    """Device numbers of the mesh with this side assignment; along a side minor axes have
    neighbours and major axes stride over them."""
    axes, sides = len(outer), len(table)
    box = np.lexsort([*links.places.T[::-1], links.domains])
    box = box.reshape([*outer, *(n for row in table for n in row)])
    # Axis by axis: its factor of the network, then of each side.
    order = [i for a in range(axes) for i in (a, *(axes + s * axes + a for s in range(sides)))]
    return box.transpose(order)


def _network_factors(lengths: Sequence[int], domains: int) -> list[int] | None:
    """The factor of each axis that goes over the network between domains, major axes first; None
    if the axes cannot cover the domains."""
    outer = []
    for n in lengths:
        outer.append(math.gcd(n, domains))
        domains //= outer[-1]
    return outer if domains == 1 else None


def _abstract_devices(key: _DeviceKey) -> list[Any]:
    """Stand-in devices with the attributes that ``mesh_utils`` reads. It has special orders for a
    few kinds and sizes, made for one orientation; an empty kind avoids them."""
    links = key.interconnect
    found = []
    for number, (domain, place) in enumerate(zip(links.domains.tolist(), links.places.tolist())):
        here = {"number": number, "slice_index": domain, "device_kind": key.kind}
        if links.torus:
            here |= {"platform": "tpu", "coords": place[:3], "core_on_chip": place[3]}
        else:
            here |= {"platform": "gpu", "id": place[0]}
        found.append(SimpleNamespace(**here, order=(domain, *place[2::-1], *place[3:])))
    return sorted(found, key=lambda d: d.order)  # as JAX lists a slice of one host


def _reordered(grid: np.ndarray, sizes: Mapping[str, int], links: Interconnect) -> np.ndarray:
    """The mesh with devices along each training axis in the order of fewest hops.

    All lines of an axis get the same order, so the hops of other axes do not change.
    """
    names = list(sizes)
    for axes in train_axes(sizes).values():
        at = [names.index(a) for a in axes]
        lines = _axis_lines(grid, at)
        parts = [sizes[a] for a in axes]
        orders = list(_line_orders(lines.shape[1], _run_in_domain(lines, links)))
        costs = [_axis_cost(lines[:, order], parts, links) for order in orders]
        order = orders[int(np.argmin(np.round(costs, 9)))]
        moved = np.moveaxis(grid, at, range(len(at)))
        flat = moved.reshape(-1, *moved.shape[len(at) :])[order].reshape(moved.shape)
        grid = np.moveaxis(flat, range(len(at)), at)
    return grid


def _run_in_domain(lines: np.ndarray, links: Interconnect) -> int:
    """Consecutive devices of a line that are within one domain."""
    domains = links.domains[lines[0]]
    return math.gcd(int(np.argmax(domains != domains[0])) or len(domains), len(domains))


def _line_orders(size: int, inside: int) -> Iterator[np.ndarray]:
    """Orders of a line, applied to each part of ``inside`` devices: unchanged, snakes over two or
    three factors, and closed loops over two."""
    for order in _paths(inside):
        yield (np.arange(0, size, inside)[:, None] + order).ravel()


@functools.lru_cache(maxsize=64)
def _paths(size: int) -> tuple[np.ndarray, ...]:
    found = [np.arange(size)]
    divisors = [n for n in range(2, size) if size % n == 0]
    for a in divisors:
        grid = np.arange(size).reshape(a, -1)
        found += [_snake(grid), _snake(grid.T)]
        if a % 2 == 0:  # back through the first column
            found.append(np.concatenate([_snake(grid[:, 1:]), grid[::-1, 0]]))
        if (size // a) % 2 == 0:
            found.append(np.concatenate([_snake(grid.T[:, 1:]), grid.T[::-1, 0]]))
    for a, b in itertools.product(divisors, repeat=2):
        if a * b < size and size % (a * b) == 0:
            cube = np.arange(size).reshape(a, b, -1)
            planes = [_snake(plane) if i % 2 == 0 else _snake(plane)[::-1]
                      for i, plane in enumerate(cube)]  # fmt: skip
            found.append(np.concatenate(planes))
    return tuple(found)


def _snake(grid: np.ndarray) -> np.ndarray:
    """Row by row, every second row reversed (boustrophedon)."""
    return np.concatenate([row if i % 2 == 0 else row[::-1] for i, row in enumerate(grid)])


def _axis_cost(lines: np.ndarray, parts: Sequence[int], links: Interconnect) -> float:
    """Hops of a training axis's rings plus those of the axes that generation cuts out of it; the
    micro axis, which only the transition uses, counts a quarter."""
    cut = [n for n in parts if n > 1]
    found = _mean_hops(lines, links)
    if len(cut) > 1:
        grid = lines.reshape(-1, *cut)
        found += _mean_hops(np.moveaxis(grid, 1, 2).reshape(-1, cut[0]), links)
        found += _mean_hops(grid.reshape(-1, cut[1]), links) / 4
    return found


def _mean_hops(rows: np.ndarray, links: Interconnect) -> float:
    """Mean hops from the first device to the last, with a tenth of the weight for the way back: a
    line without wrap-around puts no more on its links than a ring."""
    if rows.shape[1] < 2:
        return 0.0
    steps = links.hops(rows, np.roll(rows, -1, axis=1)).mean(axis=0)
    return float(0.9 * steps[:-1].mean() + 0.1 * steps.mean())


def _cost(grid: np.ndarray, sizes: Mapping[str, int], links: Interconnect) -> float:
    """Weighted hops of all axes."""
    names, total = list(sizes), 0.0
    for whole, axes in train_axes(sizes).items():
        lines = _axis_lines(grid, [names.index(a) for a in axes])
        total += AXIS_WEIGHTS.get(whole, 1.0) * _axis_cost(lines, [sizes[a] for a in axes], links)
    return round(total, 9)


def _axis_lines(grid: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """[lines, size]: the lines of a grid along some of its axes, taken together."""
    return np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(
        -1, math.prod(grid.shape[a] for a in axes)
    )
