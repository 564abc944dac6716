"""Arrays that several processes hold together: made from what is at hand, read where they are.

JAX's own ``device_put`` and ``np.asarray`` want an array within one process; over several, every
process makes and reads its own part.
"""

import functools
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from hjax.sharded_values import ArrayRegions, region_of

T = TypeVar("T")


def is_array(value: Any) -> bool:
    """Whether a value is numbers for a device: a JAX array, a numpy array of numbers, or pieces."""
    if isinstance(value, np.ndarray):
        # Arrays of objects, strings and times are columns of the data.
        return value.dtype.kind not in "OUSMm"
    return isinstance(value, jax.Array | ArrayRegions)


def place(x: Any, sharding: Sharding) -> jax.Array:
    """An array (JAX's, numpy's, a number, pieces) laid out as a sharding says.

    Over several processes each reads what its own devices hold and no more; a numpy array must be
    the same in all of them.
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


def to_numpy(x: Any) -> np.ndarray:
    """The whole of an array in this process.

    Of one that several processes hold this is a collective: all of them ask, in the same order.
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


def taken_apart(value: T) -> T:
    """The same value, once JAX knows the shards of its arrays; before other threads read them.

    An array finds out at the first question. Two threads that ask at once are told of a shard
    twice, or not at all (seen with jax 0.10).
    """
    for x in jax.tree.leaves(value):
        if isinstance(x, jax.Array):
            _ = x.addressable_shards
    return value


def pieces_of(x: jax.Array) -> ArrayRegions:
    """What this process gives of an array: each region once over all processes."""
    parts = tuple(
        (region_of(shard.index, x.shape), np.asarray(shard.data))
        for shard in x.addressable_shards
        if shard.replica_id == 0
    )
    return ArrayRegions(x.shape, np.dtype(x.dtype), parts)
