"""Auto-mapping: how long the search takes, and how near its predictions are.

    python benchmarks/plan.py [--search] [--truth] [--plot=FILE.svg] [--steps=6]

`--search`: seconds of the search for 2 to 5 models of 70B on 64 to 1024 GPUs, on one core.
`--truth`: predicted and measured seconds of a step for a dozen layouts and sizes on 8 simulated
devices, calibrated first, with the rank correlation. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import machine

ROLES = ("actor", "critic", "reference", "reward", "cost")
# The runs whose step time is predicted: changes of a small PPO run on 8 simulated devices.
BASE = {
    "steps": 6,
    "model.hidden_size": 128, "model.layers": 4, "model.heads": 8, "model.kv_heads": 8,
    "model.mlp_size": 512, "model.dtype": "float32", "data.task": "sorting",
    "rollout.prompts": 32, "rollout.samples": 2, "rollout.max_response_length": 32,
    "rollout.max_prompt_length": 32, "warm_start.steps": 0, "eval.every": 0,
    "checkpoint.every": 0, "display.enabled": False, "display.tensorboard": False,
    "display.report": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "colocate, data 8": {},
    "fsdp 8": {"layout.actor.train.data": 1, "layout.actor.train.fsdp": 8,
               "layout.critic.train.data": 1, "layout.critic.train.fsdp": 8},
    "tensor 4": {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 4,
                 "layout.critic.train.tensor": 4},
    "tensor 8 to 2": {"layout.actor.train.tensor": 8, "layout.actor.generate.tensor": 2},
    "split": {"placement": "split"},
    "standalone": {"placement": "standalone"},
    "hidden 256": {"model.hidden_size": 256, "model.mlp_size": 1024},
    "hidden 32, 1 layer": {"model.hidden_size": 32, "model.mlp_size": 64, "model.layers": 1},
    "8 layers": {"model.layers": 8},
    "hidden 64": {"model.hidden_size": 64, "model.mlp_size": 128, "model.layers": 2},
    "responses of 64": {"rollout.max_response_length": 64},
    "96 prompts": {"rollout.prompts": 96},
}  # fmt: skip


def search_times() -> list[dict[str, Any]]:
    """Seconds of the search by models and GPUs."""
    from hjax.launch.paper_tables import WORK
    from hjax.models.arithmetic import counts
    from hjax.models.shapes import published
    from hjax.sharding.mapping.hardware import cluster
    from hjax.sharding.mapping.records import Call, Dataflow
    from hjax.sharding.mapping.search import Problem
    from hjax.sharding.mapping.strategies import plan

    rows = []
    for models, gpus in [(2, 128), (3, 128), (4, 64), (4, 128), (4, 256), (4, 512), (4, 1024),
                         (5, 128), (5, 1024)]:  # fmt: skip
        roles = ROLES[:models]
        calls = [Call("actor", "generate", "generate", 1.0)]
        calls += [Call(role, "score", "forward", 1.0) for role in roles[1:]]
        for role in ("actor", "critic"):
            calls += [Call(role, "update", "update", 1 / 8)] * 8
        shape = published("llama-70b")
        problem = Problem(
            Dataflow("ppo", roles, tuple(calls)),
            {r: counts(shape, r, scalar=r in ("critic", "reward", "cost")) for r in roles},
            WORK,
            cluster(f"{gpus // 8}x8:a100-80g"),
        )
        start = time.process_time()
        found = plan(problem, "auto")
        seconds = time.process_time() - start
        rows.append({"models": models, "gpus": gpus, "seconds": round(seconds, 2)})
        print(f"{models} models, {gpus} GPUs: {seconds:.2f} s, {found.plans[0].total:.0f} s a step")
    return rows


def truth(steps: int) -> dict[str, Any]:
    """Predicted and measured seconds of a step."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import hjax
    from hjax.launch.auto import predict, run_problem
    from hjax.launch.calibrate import calibrate
    from hjax.launch.config import check_config

    profile = calibrate(jax.devices())
    print("predicted / measured; calibrated:", profile.device.flops, profile.constants, flush=True)
    rows: list[dict[str, Any]] = []
    for name, changes in CASES.items():
        config = check_config({**BASE, "steps": steps, "algorithm.name": "PPO", **changes})
        trainer = hjax.Trainer(config)
        try:
            trainer.run()
            taken = {
                key: statistics.median(row[f"time/{key}"] for row in trainer.history[2:])
                for key in ("step", "generate", "prepare", "update")
            }
            shapes = {r: m for r, m in trainer.roles.models.items() if r in trainer.roles.layouts}
            posed = run_problem(
                config, trainer.algorithm_class, shapes, trainer.inputs.prompt_length,
                jax.devices(), True, lambda _: profile,
            )  # fmt: skip
            plan = predict(posed, trainer.roles)
        finally:
            trainer.close()
        rows.append({"case": name, "predicted": plan.total, "measured": taken["step"]})
        parts = zip(("generate", "prepare", "update"), plan.stages)
        stages = ", ".join(f"{k} {s:.3f} / {taken[k]:.3f}" for k, s in parts)
        print(f"{name:<20} {plan.total:.3f} / {taken['step']:.3f} s ({stages})", flush=True)
    ranks = [
        [sorted(r[key] for r in rows).index(row[key]) for row in rows]
        for key in ("predicted", "measured")
    ]
    return {"rank_correlation": round(statistics.correlation(*ranks), 3), "cases": rows}


def plot(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Seconds of the search over GPUs, a line per number of models."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for models in sorted({r["models"] for r in rows}):
        points = sorted((r["gpus"], r["seconds"]) for r in rows if r["models"] == models)
        axes.plot(*zip(*points), "o-", label=f"{models} models")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds on one core")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw the growth")
    parser.add_argument("--steps", type=int, default=6, help="of each measured run")
    args = parser.parse_args()
    use = machine.CoreUse()
    result: dict[str, Any] = {"benchmark": "plan", **machine.describe()}
    if args.search or not args.truth:
        result["search"] = search_times()
        if args.plot:
            plot(result["search"], args.plot)
    if args.truth:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            result["truth"] = truth(args.steps)
    print(json.dumps(result | use.read()))


if __name__ == "__main__":
    main()
