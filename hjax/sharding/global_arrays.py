"""Global arrays, whose shards may be in several processes: placed, read, cut into regions.

JAX's ``device_put`` and ``np.asarray`` need an array within one process. Over several processes
each one makes and reads its own shards.
"""

import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from hjax.sharded_values import ArrayRegions, region_of

T = TypeVar("T")


def is_array(value: Any) -> bool:
    """Whether a value is an array for devices: JAX's, a numpy array of numbers, or regions."""
    if isinstance(value, np.ndarray):
        # Arrays of objects, strings and times are columns of the data.
        return value.dtype.kind not in "OUSMm"
    return isinstance(value, jax.Array | ArrayRegions)


def place(x: Any, sharding: Sharding) -> jax.Array:
    """An array (JAX's, numpy's, a number, regions) with this sharding.

    Over several processes each one reads only what its own devices hold. A numpy array must be the
    same in all of them.
    """
    if isinstance(x, ArrayRegions):
        pieces = x

        def part(index: Any) -> np.ndarray:
            return pieces.read(region_of(index, pieces.shape))

        return jax.make_array_from_callback(x.shape, sharding, part, dtype=x.dtype)
    if isinstance(x, jax.Array) or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    numbers = np.asarray(x)
    return jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])


def place_all(arrays: T, sharding: Sharding) -> T:
    """``place`` of all arrays of a pytree, at once where one process has all devices."""
    if sharding.is_fully_addressable:
        placed: T = jax.device_put(arrays, sharding)
        return placed
    return jax.tree.map(lambda x: place(x, sharding), arrays)


def to_numpy(x: Any) -> np.ndarray:
    """The whole array, in this process.

    For an array that spans processes this is a collective: all of them must call it, in the same
    order.
    """
    if isinstance(x, ArrayRegions):
        return x.whole()
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            assert isinstance(x.sharding, NamedSharding)
            x = _gather(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
        return np.asarray(x.addressable_data(0))
    return np.asarray(x)


@functools.lru_cache(maxsize=64)
def _gather(sharding: NamedSharding) -> Any:
    def gather(x: jax.Array) -> jax.Array:
        return x

    return jax.jit(gather, out_shardings=sharding)


def cache_shards(value: T) -> T:
    """The same value, after JAX has cached the shards of its arrays; call it before threads do.

    JAX computes ``addressable_shards`` at the first access. Two threads that ask at once can see a
    shard twice, or not at all (seen with jax 0.10).
    """
    for x in jax.tree.leaves(value):
        if isinstance(x, jax.Array):
            _ = x.addressable_shards
    return value


def local_regions(x: jax.Array) -> ArrayRegions:
    """This process's regions of an array; over all processes each region occurs once."""
    parts = tuple(
        (region_of(shard.index, x.shape), np.asarray(shard.data))
        for shard in x.addressable_shards
        if shard.replica_id == 0
    )
    return ArrayRegions(x.shape, np.dtype(x.dtype), parts)
