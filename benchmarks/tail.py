"""Steps of RL whose responses end after long and different times, by slots and in one program.

    python benchmarks/tail.py [--algorithm=GRPO] [--steps=6] [--rounds=2] [--prompts=64]
                              [--samples=4] [--length=256] [--hidden=256] [--layers=6]

A decoder from a seed answers the sorting task's prompts: each draw ends a response with about the
chance of one in as many tokens as there are, so most are short and a few run into the limit.
The same run is made twice, in turns: as it is (`slots`), and with all rows decoded in one program
until the last has ended (`static`), which is what hjax did before it had an engine. Prints one JSON
line: medians over the steps after the first of seconds a step and of its generation, their ratios,
response lengths, and by how much the two runs' rewards and losses differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
from typing import Any

import machine
import numpy as np

COMPARED = ("reward/mean", "response/length_mean", "actor/loss", "rollout/token_prob_error")


def run(options: argparse.Namespace, static: bool) -> list[dict[str, Any]]:
    """A run's rows."""
    import hjax
    from hjax.rollout.generator import Generator

    config = hjax.get_config(
        f"{options.algorithm.lower()}.py",
        {
            "steps": options.steps,
            "rollout.prompts": options.prompts,
            "rollout.samples": options.samples,
            "rollout.max_response_length": options.length,
            "algorithm.minibatch": 0,
            "model.hidden_size": options.hidden,
            "model.mlp_size": 3 * options.hidden,
            "model.layers": options.layers,
            "model.max_length": options.length + 64,
            "actor.learning_rate": 1e-6,
            "actor.micro_batch": 32,
            "critic.micro_batch": 32,
            "warm_start.steps": 0,
            "eval.every": 0,
            "checkpoint.every": 0,
            "display.enabled": False,
        },
    )
    ragged = Generator._needs_slots
    if static:
        Generator._needs_slots = lambda *_: False  # type: ignore[method-assign,assignment]
    try:
        with contextlib.closing(hjax.Trainer(config)) as trainer:
            return trainer.run()
    finally:
        Generator._needs_slots = ragged  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algorithm", default="GRPO", choices=("GRPO", "PPO"))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="tokens of a response at most")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    use = machine.CoreUse()
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"step": [], "generate": []} for name in ("slots", "static")
    }
    differences = dict.fromkeys(COMPARED, 0.0)
    lengths: list[float] = []
    for _ in range(options.rounds):
        found = {name: run(options, name == "static") for name in seconds}
        for name, rows in found.items():
            for kind, taken in seconds[name].items():
                taken += [row[f"time/{kind}"] for row in rows[1:]]
        lengths += [row["response/length_mean"] for row in found["slots"]]
        for key in COMPARED:
            one, other = ([row[key] for row in rows] for rows in found.values())
            differences[key] = max(differences[key], float(np.abs(np.subtract(one, other)).max()))
    medians = {
        name: {kind: statistics.median(taken) for kind, taken in kinds.items()}
        for name, kinds in seconds.items()
    }
    line = {
        "benchmark": "tail",
        "algorithm": options.algorithm,
        "seconds": medians,
        "ratios": {
            kind: medians["static"][kind] / medians["slots"][kind] for kind in ("step", "generate")
        },
        "response_length_mean": statistics.mean(lengths),
        "largest_differences": differences,
        **use.read(),
        **machine.describe(),
        **machine.versions("jax", "jaxlib"),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
