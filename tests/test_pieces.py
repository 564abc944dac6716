"""Arrays in parts: what is missing or there twice is told, and threads that read at once agree."""

import sys
import threading

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from hjax.controller.messages import BuildWorker, Call
from hjax.controller.worker_host import WorkerHost
from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions
from hjax.sharding.global_arrays import local_regions
from hjax.sharding.protocols import control
from hjax.workers import Worker, WorkerContext

NUMBERS = np.arange(80, dtype=np.int32).reshape(16, 5)


def rows(*bounds):
    parts = tuple((((a, b), (0, 5)), NUMBERS[a:b]) for a, b in bounds)
    return ArrayRegions(NUMBERS.shape, NUMBERS.dtype, parts)


def test_parts_make_a_whole_and_any_region_of_it():
    pieces = rows((0, 8), (8, 16))
    np.testing.assert_array_equal(pieces.whole(), NUMBERS)
    np.testing.assert_array_equal(pieces.read(((6, 10), (1, 4))), NUMBERS[6:10, 1:4])


@pytest.mark.parametrize(
    "bounds, message",
    [
        ([(0, 8)], "missing in part"),
        ([(0, 8), (8, 16), (0, 8)], "more than once"),
        # As many elements as the whole has.
        ([(0, 8), (0, 8)], "missing in part"),
    ],
)
def test_parts_that_are_missing_or_there_twice_are_no_whole(bounds, message):
    with pytest.raises(RunError, match=message):
        rows(*bounds).whole()


class Many(Worker):
    """Gives many arrays, over all devices."""

    @control
    def give(self, sharding):
        return jax.jit(lambda x: [x + i for i in range(50)], out_shardings=sharding)(NUMBERS)


@pytest.mark.extended
def test_threads_that_read_a_result_at_once_find_each_shard_once():
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    host = WorkerHost(devices)
    host.build(BuildWorker("many", Many, (WorkerContext("many"),)))
    interval, found = sys.getswitchinterval(), []
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            call = Call("many", "give", (NamedSharding(mesh, PartitionSpec("x")),), {})
            arrays = host.call(call).value
            ready = threading.Barrier(4)

            def read(arrays=arrays, ready=ready):
                ready.wait()
                found.extend(len(local_regions(x).parts) for x in arrays)

            threads = [threading.Thread(target=read) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 20 * 4 * 50 and set(found) == {2}
