"""Microbenchmarks of devices: rates of matrix products, memory copies and all-reduces."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def _seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds of a call until its result is ready; the first, compiling call is left out."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _spread(devices: Sequence[Any], shape: tuple[int, ...], dtype: str) -> tuple[jax.Array, Any]:
    """Random numbers, one [shape] per device (products of zeros would be faster)."""
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))

    def fill() -> jax.Array:
        some = jax.random.normal(jax.random.key(0), (1 << 14,), dtype)
        return jnp.resize(some, (len(devices), *shape))

    make = jax.jit(fill, out_shardings=NamedSharding(mesh, PartitionSpec("d")))
    return make(), mesh


def matmul(devices: Sequence[Any], size: int, dtype: str, times: int = 4) -> float:
    """FLOP/s per device of square products."""
    x, _ = _spread(devices, (size, size), dtype)

    @jax.jit
    def run(x: Any) -> Any:
        y = x
        for _ in range(times):
            y = jnp.einsum("dij,djk->dik", y, x) * (size**-0.5)
        return y

    return times * 2.0 * size**3 / _seconds(lambda: run(x))


def copy(devices: Sequence[Any], elements: int) -> float:
    """Memory bandwidth: bytes/s per device read and written by an elementwise pass."""
    x, _ = _spread(devices, (elements,), "float32")
    run = jax.jit(lambda x: x * 1.5 + 1.0)
    return 8.0 * elements / _seconds(lambda: run(x))


def all_reduce(devices: Sequence[Any], elements: int, times: int = 8) -> tuple[float, float]:
    """(latency of a ring per doubling of its devices, bytes/s of a ring), of all-reduces inside a
    program: 2 (n - 1) / n * bytes / bandwidth + 2 * latency * log2 n."""
    count = len(devices)
    if count == 1:
        return 1e-6, 1e12
    small, large = (_all_reduce_seconds(devices, n, times) for n in (16, elements))
    latency = small / 2 / math.ceil(math.log2(count))
    return latency, 2 * 4.0 * elements * (count - 1) / count / max(large - small, 1e-9)


def _all_reduce_seconds(devices: Sequence[Any], elements: int, times: int) -> float:
    """Seconds of an additional all-reduce of float32 [elements] in a program."""
    x, mesh = _spread(devices, (elements,), "float32")
    taken = []
    for repeats in (1, 1 + times):

        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=PartitionSpec("d"),
            out_specs=PartitionSpec("d"),
            check_vma=False,
        )
        def run(x: Any, repeats: int = repeats) -> Any:
            for _ in range(repeats):
                x = jax.lax.psum(x, "d") * 0.5
            return x

        taken.append(_seconds(lambda run=run: run(x), 15))  # type: ignore[misc]
    return max(taken[1] - taken[0], 0.0) / times
