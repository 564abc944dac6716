"""Auto-mapping: how long the search takes for 2 to 6 models of 70B on 64 to 1024 GPUs, on one core.

    python benchmarks/plan.py [--only=MODELSxGPUS,...] [--plot=FILE.svg]

Of hjax's own numerics and all that is searched: layouts, rows per pass, rematerialisation, offload,
slots. Prints one JSON line. How near its predictions are: plan_truth.py.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import machine

ROLES = ("actor", "critic", "reference", "reward", "cost", "cost_critic")
SIZES = ((2, 128), (3, 128), (4, 64), (4, 128), (4, 256), (4, 512), (4, 1024), (5, 128), (5, 1024),
         (6, 128), (6, 1024))  # fmt: skip


def search_times(sizes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Seconds of the search by models and GPUs."""
    from paper_experiments import PAPER_WORK

    from hjax.models.cost_inputs import MASTERS, model_counts
    from hjax.models.presets import preset
    from hjax.planning.hardware import parse_cluster
    from hjax.planning.plan_types import Dataflow, PlannedCall
    from hjax.planning.search import PlanProblem
    from hjax.planning.search_space import SearchSpace
    from hjax.planning.strategies import search_strategy

    rows = []
    for models, gpus in sizes:
        roles = ROLES[:models]
        calls = [PlannedCall("actor", "generate", "generate", 1.0)]
        calls += [PlannedCall(role, "score", "forward", 1.0) for role in roles[1:]]
        learned = [role for role in ("actor", "critic", "cost_critic") if role in roles]
        for role in learned:
            calls += [PlannedCall(role, "update", "update", 1 / 8)] * 8
        shape = preset("llama-70b")
        problem = PlanProblem(
            Dataflow("ppo", roles, tuple(calls)),
            {r: model_counts(shape, r, scalar=r not in ("actor", "reference")) for r in roles},
            PAPER_WORK,
            parse_cluster(f"{gpus // 8}x8:a100-80g"),
            numerics=MASTERS,
            space=SearchSpace(even=True),
            offload=dict.fromkeys(roles, "any"),
        )
        start = time.process_time()
        found = search_strategy(problem, "auto")
        seconds = time.process_time() - start
        rows.append({"models": models, "gpus": gpus, "seconds": round(seconds, 2)})
        print(f"{models} models, {gpus} GPUs: {seconds:.2f} s, {found.fastest.total:.0f} s a step")
    return rows


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
    parser.add_argument("--only", default="", help="such as 4x128,6x1024")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw the growth")
    args = parser.parse_args()
    use = machine.CoreUse()
    result: dict[str, Any] = {"benchmark": "plan", **machine.describe()}
    sizes = [size.partition("x") for size in args.only.split(",") if size]
    asked = [(int(models), int(gpus)) for models, _, gpus in sizes]
    result["search"] = search_times(asked or SIZES)
    if args.plot:
        plot(result["search"], args.plot)
    print(json.dumps(result | use.read()))


if __name__ == "__main__":
    main()
