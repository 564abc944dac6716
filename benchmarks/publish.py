"""Weights from a train pool's processes to a rollout pool's, beside a plain broadcast.

    python benchmarks/publish.py [--rounds=5]

400 MB of float32 parameters, fsdp 2 x tensor 2 over two processes of two simulated devices, go to
tensor 2 in one process of two, over Ray's object store. ``publish`` is hjax's way: every process of
the train pool leaves its part of the plan in the store, the rollout's reads each into place.
``broadcast`` is the plain one: the train pool gathers the whole tree, its first process leaves that
in the store, the rollout's fetches it and places it. In turns, medians. Prints one JSON line;
``planned_bytes`` is what ``hjax.sharding.transfer_plan`` plans, ``fetched_bytes`` what the
rollout's process has read (arrays below 32 KiB come with the message and are counted at their
size).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import machine
from idle import Weights

from hjax.controller import ResourcePool, Timeline, WorkerGroup
from hjax.controller.process import LARGE_ARRAY_BYTES
from hjax.controller.ray_calls import end_here, start_local_cluster
from hjax.controller.ray_cluster import RayCluster
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.sharding.layout import make_layouts
from hjax.sharding.transfer_plan import spread, tree_crossing
from hjax.workers import WorkerContext

MODEL = ModelConfig(
    vocab_size=30720, hidden_size=768, layers=10, heads=12, kv_heads=12, head_dim=64, mlp_size=2304,
    max_length=256,
)  # fmt: skip
TRAIN, ROLLOUT = {"fsdp": 2, "tensor": 2}, {"tensor": 2}


def group(cluster: RayCluster, name: str, sizes: dict[str, int], start: int) -> WorkerGroup:
    count = 1
    for size in sizes.values():
        count *= size
    devices = cluster.devices[start : start + count]
    pool = ResourcePool(name, devices, Timeline(), cluster.executor)
    context = WorkerContext(name, sizes={"train": sizes}, model=MODEL)
    made = WorkerGroup(pool, Weights, context, role=name)
    made.built.result()
    return made


def planned() -> tuple[int, int, int]:
    """Bytes of the parameters, those that cross by the plan, those too small for the store."""
    import jax

    network = decoder_network(MODEL)
    source, target = (
        network.shardings(make_layouts(n, sizes).train) for n, sizes in ((4, TRAIN), (2, ROLLOUT))
    )
    landing = jax.tree.map(spread, target, network.shapes)
    crossing = tree_crossing(
        source, landing, network.shapes, source_processes=[0, 0, 1, 1], target_processes=[0, 0]
    )
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(network.shapes)]
    return sum(sizes), crossing.nbytes, sum(n for n in sizes if n < LARGE_ARRAY_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start_local_cluster(6)
    cluster = RayCluster("local", 3, 2)
    try:
        train, rollout = group(cluster, "train", TRAIN, 0), group(cluster, "rollout", ROLLOUT, 4)
        train.initialize().result()
        landing = rollout.target_regions().result()
        seconds: dict[str, list[float]] = {"publish": [], "broadcast": []}
        for _ in range(rounds + 1):  # the first compiles
            start = time.perf_counter()
            rollout.take_weights(train.weights(landing)).result()
            seconds["publish"].append(time.perf_counter() - start)
            fetched = rollout.fetched().result()
            start = time.perf_counter()
            rollout.take_weights(train.whole()).result()
            seconds["broadcast"].append(time.perf_counter() - start)
        equal = train.checksum().result() == rollout.checksum().result()
    finally:
        cluster.close()
        end_here()
    size, crossing, small = planned()
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "benchmark": "publish",
                "parameter_bytes": size,
                "planned_bytes": crossing,
                "fetched_bytes": fetched + small,
                "equal": equal,
                **{f"{name}_seconds": round(x, 3) for name, x in medians.items()},
                "times_as_fast": round(medians["broadcast"] / medians["publish"], 2),
                "controller_bytes": cluster.sent_bytes + cluster.fetched_bytes,
                **machine.describe(),
            }
        )
    )


if __name__ == "__main__":
    main()
