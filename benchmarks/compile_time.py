"""How compiling an update grows with depth: a policy update of 4 and of 32 scanned layers.

    python benchmarks/compile_time.py [--rounds=3]

W1's width (`step_hjax.py`), 64 rows of 96 tokens, float32, one device; tracing, lowering and
compiling, each time anew (no cache on disk), in turns. Prints one JSON line; ``grows_by`` is the
ratio of the medians less 1; the aim is below .2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import machine

from hjax.algorithms.losses import PolicyLoss
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, WorkerContext

DEPTHS = (4, 32)
ROWS, PROMPT, RESPONSE = 64, 32, 64


def seconds(layers: int) -> float:
    """To trace, lower and compile an update of a model with so many layers."""
    jax.clear_caches()
    model = ModelConfig(
        vocab_size=512, hidden_size=256, mlp_size=688, layers=layers, heads=8, kv_heads=4,
        head_dim=32, max_length=128,
    )  # fmt: skip
    worker = Actor(
        WorkerContext(
            role="actor",
            layouts=make_layouts(jax.devices()[:1]),
            model=model,
            compute=Compute(),
            max_response_length=RESPONSE,
            samples=8,
            loss=PolicyLoss(),
            optimizer=OptimizerConfig(1e-5),
        )
    )
    [update] = [p for p in worker.programs(ROWS, PROMPT) if p.name == "update"]
    start = time.perf_counter()
    update.trace().lower().compile()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    seconds(DEPTHS[0])  # imports
    taken: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for _ in range(rounds):
        for depth in DEPTHS:
            taken[depth].append(seconds(depth))
    shallow, deep = (statistics.median(taken[depth]) for depth in DEPTHS)
    print(
        json.dumps(
            {
                "benchmark": "compile_time",
                **machine.describe(),
                "versions": machine.versions("hjax", "jax", "jaxlib"),
                **{f"{depth}_layers_s": [round(s, 2) for s in taken[depth]] for depth in DEPTHS},
                "grows_by": round(deep / shallow - 1, 3),
            }
        )
    )


if __name__ == "__main__":
    main()
