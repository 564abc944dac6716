"""What the controller costs: calls to 1, 2, 4 and 8 processes, a batch between two of their groups.

    python benchmarks/controller.py [--plot=controller.png]

Prints one JSON line. ``milliseconds`` is the time per call of empty work where calls are pipelined
(the controller waits for the last of many), by number of processes; ``edge`` a batch that goes from
one group to another, by its size: seconds, and the bytes that passed through the controller.
``hosts`` is the controller's own time per call against hosts, with dummy hosts in threads of this
process instead of Ray's actors (messages are written down and read as they are for Ray), and a line
through the measured calls on Ray, drawn on to as many hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import machine
import numpy as np
from idle import Idle

from hjax.controller import ResourcePool, Timeline, WorkerGroup
from hjax.controller.messages import Call
from hjax.controller.process import HostProcess, ProcessSetup, QueuedMessage, serialize_value
from hjax.controller.ray_calls import RayStore, end_here, start_local_cluster
from hjax.controller.ray_cluster import RayCluster

CALLS = 200
ROUNDS = 5
PROCESSES = (1, 2, 4, 8)
DUMMY_HOSTS = (1, 2, 4, 8, 16, 32, 64)
MEGABYTES = (0.001, 1, 100)


def group(cluster: RayCluster, name: str) -> tuple[ResourcePool, WorkerGroup]:
    pool = ResourcePool(name, (), Timeline(), cluster.executor)
    made = WorkerGroup(pool, Idle, role=name)
    made.built.result()
    return pool, made


def per_call(made: WorkerGroup) -> float:
    """Milliseconds per call of empty work, calls pipelined; the median of rounds."""
    made.nothing().result()
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        futures = [made.nothing() for _ in range(CALLS)]
        for future in futures:
            future._inner.result()  # that it has run; nothing is brought here
        found.append((time.perf_counter() - start) / CALLS * 1e3)
    return statistics.median(found)


def measure_calls() -> dict[int, float]:
    figures = {}
    for processes in PROCESSES:
        cluster = RayCluster("local", 1, 1, host_processes=processes)
        try:
            _, made = group(cluster, "idle")
            figures[processes] = per_call(made)
        finally:
            cluster.close()
    return figures


def measure_edges() -> dict[str, dict[str, float]]:
    """A batch from one group's process to another's, sizes in megabytes."""
    cluster = RayCluster("local", 1, 1, host_processes=1)
    figures: dict[str, dict[str, float]] = {}
    try:
        (_, one), (_, other) = group(cluster, "one"), group(cluster, "other")
        for megabytes in MEGABYTES:
            size = int(megabytes * 1e6)
            seconds, controller = [], 0
            for _ in range(ROUNDS):
                before = cluster.sent_bytes + cluster.fetched_bytes
                start = time.perf_counter()
                total = other.take(one.make(size)).result()
                seconds.append(time.perf_counter() - start)
                controller = cluster.sent_bytes + cluster.fetched_bytes - before
                assert total == size
            figures[f"{megabytes:g} MB"] = {
                "seconds": round(statistics.median(seconds), 4),
                "controller_bytes": controller,
            }
    finally:
        cluster.close()
    return figures


def measure_dummies() -> dict[int, float]:
    """The controller's milliseconds per call to dummy hosts, threads of this process."""
    figures = {}
    for hosts in DUMMY_HOSTS:
        store = RayStore()
        dummies = [HostProcess(store, "127.0.0.1") for _ in range(hosts)]
        for rank, dummy in enumerate(dummies):
            dummy.prepare(ProcessSetup("dummy", rank, hosts, 0))
            dummy.join("")
        found = []
        sequence = 0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            outcomes = []
            for _ in range(CALLS // 4):
                written = serialize_value(Call("idle", "nothing"), store)
                parcel = [QueuedMessage(sequence, written)]
                outcomes += [d.submit(sequence, parcel)[0] for d in dummies]
                sequence += 1
            spent = time.perf_counter() - start
            for outcome in outcomes:
                outcome.result()
            found.append(spent / (CALLS // 4) * 1e3)
        figures[hosts] = statistics.median(found)
        for dummy in dummies:
            dummy.stop()
    return figures


def line_through(figures: dict[int, float]) -> tuple[float, float]:
    """Milliseconds of a call alone, and of each process more (least squares)."""
    each, alone = np.polyfit(list(figures), list(figures.values()), 1)
    return float(alone), float(each)


def plot(path: str, calls: dict[int, float], dummies: dict[int, float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    alone, each = line_through(calls)
    hosts = list(dummies)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(list(calls), list(calls.values()), "o", label="Ray, measured")
    axes.plot(hosts, [alone + each * n for n in hosts], "--", label="Ray, drawn on")
    axes.plot(hosts, list(dummies.values()), "s-", label="dummy hosts, controller's own time")
    axes.set_xlabel("hosts")
    axes.set_ylabel("milliseconds per call")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", default="", help="file for the picture")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start_local_cluster(max(PROCESSES) + 4)
    try:
        calls, edges, dummies = measure_calls(), measure_edges(), measure_dummies()
    finally:
        end_here()
    if arguments.plot:
        plot(arguments.plot, calls, dummies)
    alone, each = line_through(calls)
    print(
        json.dumps(
            {
                "benchmark": "controller",
                "milliseconds": {n: round(x, 3) for n, x in calls.items()},
                "edge": edges,
                "hosts": {
                    "dummies_ms": {n: round(x, 3) for n, x in dummies.items()},
                    "ray_line_ms": {"alone": round(alone, 3), "each_process": round(each, 3)},
                    "ray_64_hosts_ms": round(alone + 64 * each, 2),
                },
                **machine.describe(),
            }
        )
    )


if __name__ == "__main__":
    main()
