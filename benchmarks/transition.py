"""From train to generate layout: hjax's transition beside jax.device_put and gathering everything.

One model of at least 400 MB on 8 simulated devices, tensor 8 in training and 2 in generation:

- `hjax`: the 3D-HybridEngine's transition, buckets of `rollout.transition_bucket_bytes`;
- `device_put`: `jax.device_put` of the whole tree to the generate sharding, as Tunix does;
- `gather_all`: DeepSpeed-Chat's way, ZeRO-3 shards over all devices gathered whole, then cut.

All in one process, interleaved: each round runs every contestant once, in an order that rotates.
Then the same with a bfloat16 generation copy of float32 masters, for the first two. Prints one JSON
line: medians of seconds; bytes received per device, where a compiled program tells them; the most
parameter bytes alive on a device and the most memory the process added.

    python benchmarks/transition.py [--rounds=7]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

DEVICES, TRAIN, GENERATE = 8, 8, 2
CLEAN = 0.1  # cores that others may use while a figure is taken


class Contestant:
    """One way to the generate layout.

    Args:
      params: in the layout it starts from.
      go: takes the parameters and a function to call when most is alive; returns what generation
        reads, and a function that gives the parameters back.
      received: bytes per device, None where nothing tells.
    """

    def __init__(self, params: Any, go: Callable[..., Any], received: int | None):
        self.params, self.go, self.received = params, go, received
        self.seconds: list[float] = []
        self.back_seconds: list[float] = []
        self.peak = self.process_peak = 0

    def run(self, measured: bool) -> None:
        """Go there and back; the first time compiles."""
        import jax

        from hjax.sharding.live_memory import PeakWatch, live_bytes

        before = resident_bytes(reset=True)
        own = max(live_bytes(jax.devices()).values())
        watch = PeakWatch(jax.devices())
        params, self.params = self.params, None
        # Watching takes time, so that it has a turn of its own.
        start = time.perf_counter()
        there, back = self.go(params, None if measured else watch)
        jax.block_until_ready(there)
        taken = time.perf_counter() - start
        if not measured:
            watch()
            self.peak = own + watch.peak
        self.process_peak = max(self.process_peak, resident_bytes() - before)
        start = time.perf_counter()
        self.params = jax.block_until_ready(back())
        if measured:
            self.seconds.append(taken)
            self.back_seconds.append(time.perf_counter() - start)

    def figures(self) -> dict[str, Any]:
        """What the JSON says of it; bytes of parameters exclude the other contestants'."""
        return {
            "seconds": round(statistics.median(self.seconds), 4),
            "back_seconds": round(statistics.median(self.back_seconds), 4),
            "all_seconds": [round(s, 4) for s in self.seconds],
            "received_bytes": self.received,
            "peak_bytes": self.peak,
            "process_peak_bytes": self.process_peak,
        }


def resident_bytes(reset: bool = False) -> int:
    """The most memory this process has had since the last reset (Linux; 0 elsewhere)."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def contestants(narrow: bool) -> tuple[dict[str, Contestant], dict[str, Any]]:
    """The contestants, and what is common to them."""
    import jax
    import jax.numpy as jnp

    from hjax.dryrun.gather_all_baseline import GatherAndCut
    from hjax.dryrun.transition_groups import Table2Case, case_layouts, zero_sharding
    from hjax.models import parameter_counts
    from hjax.models.model_config import ModelConfig
    from hjax.models.parameters import decoder_network
    from hjax.sharding.transition import BUCKET_BYTES, Transition

    model = ModelConfig(
        vocab_size=8192, hidden_size=1024, mlp_size=2816, layers=8, heads=16, kv_heads=16,
        head_dim=64, max_length=2048, tie_embeddings=False,
    )  # fmt: skip
    network = decoder_network(model)
    case = Table2Case(1, TRAIN, DEVICES // TRAIN, 1, GENERATE)
    layouts = case_layouts(jax.devices(), case, "hybridflow")
    source, target = map(network.shardings, (layouts.train, layouts.generate))
    dtypes = network.compute_dtypes(jnp.bfloat16 if narrow else jnp.float32)
    transition = Transition(source, target, network.shapes, dtypes)

    def through(way: Any) -> Callable[..., Any]:
        def go(params: Any, watch: Any) -> Any:
            held = way.start(params)
            del params
            return way.to_generate(held, watch), lambda: way.to_train(held)

        return go

    cast = jax.jit(
        lambda tree: jax.tree.map(lambda x, dtype: x.astype(dtype), tree, dtypes),
        out_shardings=source,
    )

    def put(params: Any, watch: Any) -> Any:
        there = jax.device_put(cast(params) if narrow else params, target)
        jax.block_until_ready(there)
        return there, lambda: params

    params = network.create(0, layouts.train)
    cost = transition.cost()
    found = {
        "hjax": Contestant(params, through(transition), cost.received),
        "device_put": Contestant(network.create(0, layouts.train), put, None),
    }
    if not narrow:
        layouts = case_layouts(jax.devices(), case, "gather_all")
        mesh = layouts.train.mesh
        zero = jax.tree.map(
            lambda x: zero_sharding(x.shape, mesh) or layouts.train.replicated, network.shapes
        )
        whole = GatherAndCut(zero, network.shardings(layouts.generate), network.shapes)
        own = jax.tree.map(lambda x, s: jax.device_put(x, s, may_alias=False), params, zero)
        found["gather_all"] = Contestant(own, through(whole), whole.cost().received)
    return found, {
        "model_bytes": 4 * parameter_counts.parameter_count(model),
        "buckets": cost.buckets,
        "bucket_bytes": BUCKET_BYTES,
        "train_shard_bytes": cost.source,
        "generate_shard_bytes": cost.target,
        "temporary_bytes": cost.temporary,
    }


def compare(rounds: int, narrow: bool) -> dict[str, Any]:
    """Run all contestants and compare their medians."""
    found, common = contestants(narrow)
    names = list(found)
    for contestant in found.values():
        contestant.run(measured=False)  # compiles
        contestant.run(measured=False)
    use = machine.CoreUse()
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].run(measured=True)
    others = {name: _others_bytes(found, name) for name in names}
    figures = {name: c.figures() for name, c in found.items()}
    for name in names:
        figures[name]["peak_bytes"] -= others[name]
    mine = figures["hjax"]["seconds"]
    return {
        **common,
        **figures,
        "seconds_over_hjax": {
            name: round(figures[name]["seconds"] / mine, 3) for name in names if name != "hjax"
        },
        **use.read(),
    }


def _others_bytes(found: dict[str, Contestant], name: str) -> int:
    """Bytes per device that the other contestants' parameters take all the time."""
    import jax

    return sum(
        x.addressable_shards[0].data.nbytes
        for other, contestant in found.items()
        if other != name
        for x in jax.tree.leaves(contestant.params)
    )


def main() -> None:
    """Measure both dtype cases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="runs of each contestant")
    args = parser.parse_args()
    import jax

    options: Any = jax.config
    options.update("jax_platforms", "cpu")
    options.update("jax_num_cpu_devices", DEVICES)
    result = {
        "benchmark": "transition",
        "devices": DEVICES,
        "train_tensor": TRAIN,
        "generate_tensor": GENERATE,
        "rounds": args.rounds,
        "float32": compare(args.rounds, narrow=False),
        "bfloat16": compare(args.rounds, narrow=True),
        "versions": machine.versions("jax", "jaxlib", "hjax"),
        **machine.describe(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
