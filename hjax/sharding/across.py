"""Parameters from the layout of one resource pool to that of another, disjoint one.

Every byte crosses once: it is sent to one device of the other pool, which shares it with the
others there over what are usually faster links. (What is too small to be split over all of them
crosses more than once; ``crossing_bytes`` counts it.) One process must see both pools.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from hjax.sharding.moves import spec_of, split_of
from hjax.sharding.transition import BUCKET_BYTES, Transition

# Start and stop in each dimension.
Region = tuple[tuple[int, int], ...]


class PoolTransition:
    """Copies parameters to another pool's layout; the source stays as it is.

    Args:
      source: nested dict of NamedSharding on the one pool's mesh.
      target: nested dict of NamedSharding on the other's.
      shapes: nested dict of jax.ShapeDtypeStruct.
      dtypes: nested dict of the copy's dtypes, or None to keep them; cast before they cross.
      bucket_bytes: as of ``Transition``, for the moves within the other pool.
    """

    def __init__(
        self,
        source: Any,
        target: Any,
        shapes: Any,
        dtypes: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._dtypes = dtypes or jax.tree.map(lambda x: x.dtype, shapes)
        self.landing = jax.tree.map(spread, target, shapes)
        landed = jax.tree.map(
            lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes, self._dtypes
        )
        self.within = Transition(self.landing, target, landed, bucket_bytes=bucket_bytes)
        self._plans = jax.tree.map(
            lambda x, before, after: _Crossing(x.shape, before, after),
            shapes,
            source,
            self.landing,
        )
        sizes = jax.tree.map(
            lambda plan, dtype: plan.elements * jnp.dtype(dtype).itemsize,
            self._plans,
            self._dtypes,
        )
        self.crossing_bytes: int = sum(jax.tree.leaves(sizes))

    def __call__(self, params: Any) -> Any:
        """The parameters in the other pool's layout, all of them new arrays there."""
        landed = jax.tree.map(
            lambda x, plan, dtype: plan(x, dtype), params, self._plans, self._dtypes
        )
        return self.within.advance(self.within.start(landed))


def spread(sharding: NamedSharding, x: Any) -> NamedSharding:
    """A sharding split further over the mesh axes it leaves free, as far as they divide."""
    sizes = dict(sharding.mesh.shape)
    split = [list(axes) for axes in split_of(sharding.spec, len(x.shape), sizes)]
    used = {axis for axes in split for axis in axes}
    for axis in (a for a, n in sizes.items() if n > 1 and a not in used):
        for n, axes in zip(x.shape, split, strict=True):
            if n % math.prod(sizes[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
                break
    return NamedSharding(sharding.mesh, spec_of(tuple(map(tuple, split))))


class _Crossing:
    """Which part of an array goes from which device to which.

    Attributes:
      elements: that cross, altogether.
    """

    def __init__(self, shape: tuple[int, ...], source: NamedSharding, landing: NamedSharding):
        self._shape, self._landing = shape, landing
        owners: dict[Region, list[jax.Device]] = {}
        for device, region in _regions(source, shape):
            owners.setdefault(region, []).append(device)
        self._parts: dict[jax.Device, list[tuple[jax.Device, Region, Region]]] = {}
        self.elements = 0
        for turn, (device, wanted) in enumerate(_regions(landing, shape)):
            parts = []
            for held, devices in owners.items():
                common = tuple(
                    (max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True)
                )
                if all(start < stop for start, stop in common):
                    # Replicas take turns, so that all of them send.
                    parts.append((devices[turn % len(devices)], held, common))
                    self.elements += math.prod(stop - start for start, stop in common)
            self._parts[device] = parts

    def __call__(self, x: jax.Array, dtype: Any) -> jax.Array:
        shards = {shard.device: shard.data.astype(dtype) for shard in x.addressable_shards}
        arrays = []
        for device, parts in self._parts.items():
            pieces = [
                (common, jax.device_put(_cut(shards[owner], held, common), device))
                for owner, held, common in parts
            ]
            arrays.append(_assemble(pieces, 0, len(self._shape)))
        return jax.make_array_from_single_device_arrays(self._shape, self._landing, arrays)


def _regions(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> Iterator[tuple[jax.Device, Region]]:
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        yield device, tuple(bounds)


def _cut(shard: jax.Array, held: Region, wanted: Region) -> jax.Array:
    starts = [w[0] - h[0] for w, h in zip(wanted, held, strict=True)]
    stops = [w[1] - h[0] for w, h in zip(wanted, held, strict=True)]
    return jax.lax.slice(shard, starts, stops)


def _assemble(pieces: Sequence[tuple[Region, jax.Array]], dimension: int, rank: int) -> jax.Array:
    """Pieces of a grid as one array."""
    if dimension == rank:
        return pieces[0][1]
    rows: dict[int, list[tuple[Region, jax.Array]]] = {}
    for region, array in pieces:
        rows.setdefault(region[dimension][0], []).append((region, array))
    parts = [_assemble(rows[start], dimension + 1, rank) for start in sorted(rows)]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dimension)
