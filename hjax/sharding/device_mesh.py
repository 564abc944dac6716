"""Mesh axes on physical wires: which device stands at which place of a mesh.

JAX's ``mesh_utils`` lays the axes on the sides of a torus, and over slices and hosts
(``create_hybrid_device_mesh``); the axes that generation cuts out of training's stay inside them.
Along each axis devices are then put in the order in which a ring has the shortest ways. Of the
meshes that come of it the one with the shortest ways is taken. It depends on the devices alone, not
on the order in which they are given.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from hjax.sharding.interconnect import ConcurrentRings, Interconnect, Table, shares, wires_of

MICRO = "_micro"
# How much an axis's ways count: tensor axes cross their links in every layer, replicas once an
# update.
WEIGHTS = {"tensor": 8.0, "context": 4.0, "expert": 4.0, "fsdp": 4.0, "pipe": 1.0, "data": 1.0}

# How many ways to share out a torus's sides are looked at, and of how many the lines are ordered.
MOST_TABLES, SHORTENED = 256, 8


def place_devices(devices: Sequence[Any], shape: Mapping[str, int]) -> np.ndarray:
    """Devices [sizes of the axes], laid on their wires.

    Args:
      devices: as many as the axes have places; those that do not say where they stand keep their
        order, and so do those that fill no box.
      shape: sizes by axis, major to minor; an axis and its ``_micro`` follow one another.
    """
    given = np.empty(len(devices), dtype=object)
    given[:] = list(devices)
    lengths = tuple(shape.values())
    wires = wires_of(devices)
    if wires is None or not wires.boxes:
        return given.reshape(lengths)
    return given[_best(tuple(shape.items()), _Key.of(devices, wires))].reshape(lengths)


def rings_of(grid: np.ndarray, axes: Sequence[str], names: Sequence[str]) -> ConcurrentRings | None:
    """What rings over some of a mesh's axes cost.

    Args:
      grid: devices [sizes of the axes].
      axes: over which the rings go, together.
      names: of all axes.

    Returns:
      None where the devices do not say where they stand.
    """
    flat = grid.ravel()
    wires = wires_of(list(flat))
    if wires is None:
        return None
    numbers = np.arange(flat.size).reshape(grid.shape)
    return wires.rings(_rows(numbers, [list(names).index(a) for a in axes]))


def whole_axes(shape: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The axes that training has, each with those that generation cuts it into, if it splits."""
    found: dict[str, tuple[str, ...]] = {}
    for axis in shape:
        whole = axis.removesuffix(MICRO)
        found[whole] = (*found.get(whole, ()), axis)
    return {whole: axes for whole, axes in found.items() if math.prod(shape[a] for a in axes) > 1}


def ring_table(shape: Mapping[str, int], grid: np.ndarray) -> dict[str, ConcurrentRings]:
    """The rings of training's axes and of those that generation cuts out, by name; empty where the
    devices do not say where they stand."""
    found: dict[str, ConcurrentRings] = {}
    for whole, axes in whole_axes(shape).items():
        parts = [a for a in axes if shape[a] > 1]
        kinds = [(whole, axes)]
        if len(parts) > 1:
            kinds += [(f"{whole}, of generation" if a == whole else a, (a,)) for a in parts]
        for name, wanted in kinds:
            rings = rings_of(grid, wanted, list(shape))
            if rings is None:
                return {}
            found[name] = rings
    return found


class _Key:
    """Of devices what decides where they are put, so that it is worked out once."""

    def __init__(self, kind: str, cores: bool, wires: Interconnect):
        self.kind, self.cores, self.wires = kind, cores, wires
        places = tuple(map(tuple, wires.places.tolist()))
        self._value = (kind, cores, wires.torus, wires.wraps, tuple(wires.domains.tolist()), places)

    @classmethod
    def of(cls, devices: Sequence[Any], wires: Interconnect) -> _Key:
        """Of JAX's devices."""
        cores = wires.torus and wires.sides[-1] > 1
        return cls(str(devices[0].device_kind) if cores else "", cores, wires)

    def __hash__(self) -> int:
        return hash(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._value == other._value


@functools.lru_cache(maxsize=256)
def _best(shape: tuple[tuple[str, int], ...], key: _Key) -> np.ndarray:
    """Numbers of the devices, flat, of the mesh with the shortest ways."""
    sizes, wires = dict(shape), key.wires
    found = sorted(_meshes(sizes, key), key=lambda grid: _cost(grid, sizes, wires))
    found = [_shortened(grid, sizes, wires) for grid in found[:SHORTENED]]
    return min(found, key=lambda grid: _cost(grid, sizes, wires)).ravel()


def _meshes(sizes: Mapping[str, int], key: _Key) -> Iterator[np.ndarray]:
    """Numbers of the devices [sizes], each a way to lay the axes on the wires: training's axes, of
    which generation's are cut; all axes by themselves; and place after place."""
    from jax.experimental import mesh_utils

    wires = key.wires
    lengths = tuple(sizes.values())
    whole: dict[str, int] = {}
    for axis, n in sizes.items():
        whole[axis.removesuffix(MICRO)] = whole.get(axis.removesuffix(MICRO), 1) * n
    listed = _stand_ins(key)
    domains = wires.boxes
    for wanted in (tuple(whole.values()), lengths):
        outer = _over_network(wanted, domains)
        if outer is None:
            continue
        inner = [n // o for n, o in zip(wanted, outer)]
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, listed, allow_split_physical_axes=True
        )
        yield np.vectorize(lambda d: d.number, otypes=[np.int64])(grid).reshape(lengths)
    outer = _over_network(lengths, domains)
    if outer is not None and wires.torus:
        inner = [n // o for n, o in zip(lengths, outer)]
        for table in itertools.islice(shares(wires.sides, inner), MOST_TABLES):
            yield _laid(wires, table, outer).reshape(lengths)
    yield np.lexsort([*wires.places.T[::-1], wires.domains]).reshape(lengths)


def _laid(wires: Interconnect, table: Table, outer: Sequence[int]) -> np.ndarray:
    """Numbers of the devices of a mesh that shares the sides out so; along a side the minor axes
    have neighbours, the major ones stride over them."""
    axes, sides = len(outer), len(table)
    box = np.lexsort([*wires.places.T[::-1], wires.domains])
    box = box.reshape([*outer, *(n for row in table for n in row)])
    # Axis after axis: its part of the network, then of each side.
    order = [i for a in range(axes) for i in (a, *(axes + s * axes + a for s in range(sides)))]
    return box.transpose(order)


def _over_network(lengths: Sequence[int], domains: int) -> list[int] | None:
    """Which part of each axis goes over the network between domains, the major axes' first; None
    where no part does."""
    outer = []
    for n in lengths:
        outer.append(math.gcd(n, domains))
        domains //= outer[-1]
    return outer if domains == 1 else None


def _stand_ins(key: _Key) -> list[Any]:
    """What ``mesh_utils`` asks of devices. It has orders of its own for a few kinds and sizes, made
    for one orientation; without a kind it has none."""
    wires = key.wires
    found = []
    for number, (domain, place) in enumerate(zip(wires.domains.tolist(), wires.places.tolist())):
        here = {"number": number, "slice_index": domain, "device_kind": key.kind}
        if wires.torus:
            here |= {"platform": "tpu", "coords": place[:3], "core_on_chip": place[3]}
        else:
            here |= {"platform": "gpu", "id": place[0]}
        found.append(SimpleNamespace(**here, order=(domain, *place[2::-1], *place[3:])))
    return sorted(found, key=lambda d: d.order)  # as JAX lists a slice of one host


def _shortened(grid: np.ndarray, sizes: Mapping[str, int], wires: Interconnect) -> np.ndarray:
    """The mesh with the devices along each of training's axes in the order of shortest ways.

    The same order for all lines of an axis, so that other axes' ways stay what they are.
    """
    names = list(sizes)
    for axes in whole_axes(sizes).values():
        at = [names.index(a) for a in axes]
        lines = _rows(grid, at)
        parts = [sizes[a] for a in axes]
        orders = list(_orders(lines.shape[1], _inside(lines, wires)))
        costs = [_axis_cost(lines[:, order], parts, wires) for order in orders]
        order = orders[int(np.argmin(np.round(costs, 9)))]
        moved = np.moveaxis(grid, at, range(len(at)))
        flat = moved.reshape(-1, *moved.shape[len(at) :])[order].reshape(moved.shape)
        grid = np.moveaxis(flat, range(len(at)), at)
    return grid


def _inside(lines: np.ndarray, wires: Interconnect) -> int:
    """Devices in a row of a line that stay within a domain."""
    domains = wires.domains[lines[0]]
    return math.gcd(int(np.argmax(domains != domains[0])) or len(domains), len(domains))


def _orders(size: int, inside: int) -> Iterator[np.ndarray]:
    """Orders of a line, part after part of ``inside``: as it stands; there and back again on the
    way through two or three factors; and around two."""
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
    """Row after row, each the other way round than the one before."""
    return np.concatenate([row if i % 2 == 0 else row[::-1] for i, row in enumerate(grid)])


def _axis_cost(lines: np.ndarray, parts: Sequence[int], wires: Interconnect) -> float:
    """Hops of a training axis's rings, and of those that generation cuts out of it: its own count
    as much, those of the micro axis, which the transition alone uses, a quarter."""
    cut = [n for n in parts if n > 1]
    found = _hops(lines, wires)
    if len(cut) > 1:
        grid = lines.reshape(-1, *cut)
        found += _hops(np.moveaxis(grid, 1, 2).reshape(-1, cut[0]), wires)
        found += _hops(grid.reshape(-1, cut[1]), wires) / 4
    return found


def _hops(rows: np.ndarray, wires: Interconnect) -> float:
    """From the first device to the last, and a little of the way back: a line without wrap-around
    links is no worse than a ring in what its links carry."""
    if rows.shape[1] < 2:
        return 0.0
    steps = wires.hops(rows, np.roll(rows, -1, axis=1)).mean(axis=0)
    return float(0.9 * steps[:-1].mean() + 0.1 * steps.mean())


def _cost(grid: np.ndarray, sizes: Mapping[str, int], wires: Interconnect) -> float:
    """Hops of all axes, each by its weight."""
    names, total = list(sizes), 0.0
    for whole, axes in whole_axes(sizes).items():
        lines = _rows(grid, [names.index(a) for a in axes])
        total += WEIGHTS.get(whole, 1.0) * _axis_cost(lines, [sizes[a] for a in axes], wires)
    return round(total, 9)


def _rows(grid: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """[lines, size] of a grid over some of its axes, together."""
    return np.moveaxis(grid, axes, range(-len(axes), 0)).reshape(
        -1, math.prod(grid.shape[a] for a in axes)
    )
