"""Steps of a run that generates while it learns, beside what the two take each.

    python benchmarks/overlap.py [--steps=14] [--prompts=16] [--samples=8] [--length=48]
                                 [--hidden=192] [--layers=4]

GRPO of a small decoder on two Ray processes of one CPU device, each kept to a core of its own:
generation in the one, all else in the other (``placement=disaggregate``, ``max_staleness=1``).
Prints one JSON line: medians over the later half of the steps of seconds per step, of generation
and of everything else as the timeline has them, and ``ratio``, the step over the longer of the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics

import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=48, help="tokens of a response")
    parser.add_argument("--hidden", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    steps = options.steps
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import hjax

    config = hjax.get_config(
        "grpo.py",
        {
            "steps": steps,
            "placement": "disaggregate",
            "cluster.processes": 2,
            "cluster.devices_per_process": 1,
            "rollout.max_staleness": 1,
            "rollout.prompts": options.prompts,
            "rollout.samples": options.samples,
            "algorithm.minibatch": 0,
            "algorithm.kl_coef": 0.0,
            "model.hidden_size": options.hidden,
            "model.mlp_size": 3 * options.hidden,
            "model.layers": options.layers,
            "rollout.max_response_length": options.length,
            "warm_start.steps": 1,
            "eval.every": 0,
            "checkpoint.every": 0,
            "display.enabled": False,
        },
    )
    with contextlib.closing(hjax.Trainer(config)) as trainer:
        cores = sorted(os.sched_getaffinity(0))
        for core, role in zip(cores, ("rollout", "actor"), strict=False):
            group = trainer.roles.groups[role]
            for pid in group.pool.executor.pids():
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.sched_setaffinity(int(thread), {core})
        rows = trainer.run()
        spans = trainer.timeline.spans()
    later = range(steps // 2 + 1, steps + 1)

    def busy(role: str) -> float:
        """Seconds per step that a role's calls take; those of the rollout run for later steps."""
        first = min(s.start for s in spans if s.step == later[0])
        last = max(s.end for s in spans if s.step == later[-1])
        mine = [s for s in spans if s.role == role and first <= s.start and s.end <= last]
        return sum(s.end - s.start for s in mine) / len(later)

    seconds = statistics.median(row["time/step"] for row in rows if row["step"] in later)
    generation, learning = busy("rollout"), busy("actor")
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "step_seconds": round(seconds, 3),
                "generation_seconds": round(generation, 3),
                "learning_seconds": round(learning, 3),
                "ratio": round(seconds / max(generation, learning), 3),
                "staleness": rows[-1]["rollout/staleness"],
                **machine.describe(),
            }
        )
    )


if __name__ == "__main__":
    main()
