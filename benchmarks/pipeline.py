"""An update through pipeline stages: its bubble, memory and seconds by number of micro-batches.

Prints one JSON line. The bubble is counted from the slots that the compiled program executed,
beside the schedule's (p - 1) / (m + p - 1); `work` is the process's CPU seconds per update over
those of one device without stages. On simulated devices that share fewer cores, idle stages leave
their core to others, so wall seconds there do not show the bubble; on real ones they do.

    python benchmarks/pipeline.py [--rounds=3] [--devices=8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

ROWS, PROMPT, LENGTH, SAMPLES = 64, 16, 48, 2


def build(stages: int, parts: int, devices: int) -> tuple[Any, Any]:
    """An actor on `devices` devices in `stages` stages, and a batch; W1's shapes, 8 layers."""
    import jax
    import numpy as np

    from hjax.algorithms.losses import PolicyLoss
    from hjax.models.model_config import ModelConfig
    from hjax.sharding.layout import make_layouts
    from hjax.workers import Actor, OptimizerConfig, WorkerContext

    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices()[:devices], {"pipe": stages, "data": -1}),
        model=ModelConfig(512, 256, 688, 8, 8, 4, 32, PROMPT + LENGTH),
        samples=SAMPLES,
        max_response_length=LENGTH,
        loss=PolicyLoss(),
        optimizer=OptimizerConfig(1e-5),
        micro_batch=ROWS // parts,
    )
    actor = Actor(context)
    actor.initialize()
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(1, 512, (ROWS // SAMPLES, PROMPT), dtype=np.int32), SAMPLES, 0)
    floats = rng.normal(size=(2, ROWS, LENGTH)).astype(np.float32)
    batch = {
        "prompts": prompts,
        "prompt_mask": np.ones(prompts.shape, bool),
        "responses": rng.integers(1, 512, (ROWS, LENGTH), dtype=np.int32),
        "response_mask": np.ones((ROWS, LENGTH), bool),
        "row_mask": np.ones(ROWS, bool),
        "advantages": floats[0],
        "old_logprobs": floats[1] - 6,
    }
    split = actor.layouts.train.sharding("batch")
    return actor, {key: jax.device_put(value, split) for key, value in batch.items()}


def measure(stages: int, parts: int, devices: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` updates."""
    import jax

    actor, batch = build(stages, parts, devices)
    [update] = [p for p in actor.programs(ROWS, PROMPT) if p.name == "update"]
    temporary = update.trace().lower().compile().memory_analysis().temp_size_in_bytes
    jax.block_until_ready(actor.update_actor(batch))
    wall, work = [], []
    for _ in range(rounds):
        start, spent = time.perf_counter(), time.process_time()
        metrics = jax.block_until_ready(actor.update_actor(batch))
        wall.append(time.perf_counter() - start)
        work.append(time.process_time() - spent)
    bubble = metrics.get("pipeline_bubble")
    return {
        "stages": stages,
        "micro_batches": parts,
        "bubble": None if bubble is None else round(float(bubble), 4),
        "schedule_bubble": round((stages - 1) / (parts + stages - 1), 4),
        "seconds": round(statistics.median(wall), 4),
        "cpu_seconds": round(statistics.median(work), 4),
        "temporary_bytes": temporary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="updates per figure")
    parser.add_argument("--devices", type=int, default=8, help="simulated, if on a CPU")
    options = parser.parse_args()
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(options.devices))
    import machine

    use = machine.CoreUse()
    alone = measure(1, 1, 1, options.rounds)
    rows = []
    for stages in (2, 4):
        for parts in (2, 4, 8, 16):
            if ROWS // parts % (options.devices // stages * SAMPLES) == 0:
                rows.append(measure(stages, parts, options.devices, options.rounds))
                print(f"{stages} stages, {parts} micro-batches", file=sys.stderr)
    for row in rows:
        row["work"] = round(row["cpu_seconds"] / alone["cpu_seconds"], 3)
    print(
        json.dumps(
            {
                "benchmark": "pipeline",
                "devices": options.devices,
                "one_device": alone,
                "pipelines": rows,
                **machine.describe(),
                "versions": machine.versions("jax"),
                **use.read(),
            }
        )
    )


if __name__ == "__main__":
    main()
