"""Does it learn? Trains shipped configs from several seeds, as the command line does.

Prints one JSON line: for every config and seed the evaluation before the first step and after the
last (`eval/accuracy` where the task has a verifier, `eval/reward`), and the seconds of the whole
command, start and compilation included.

    python benchmarks/learning.py [--configs=ppo,grpo,remax,safe_rlhf] [--seeds=0,1,2,3,4]
        [--figure=FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import machine

CURVE = "eval/accuracy"
KEYS = ("eval/accuracy", "eval/reward", "eval/cost", "reward/mean", "cost/mean")


def train(config: str, seed: int, workdir: pathlib.Path) -> dict[str, Any]:
    """Runs the command to its end; returns first and last figures and the seconds it took."""
    command = [sys.executable, "-m", "hjax.launch", f"--config={config}.py"]
    command += [f"--config.seed={seed}", f"--workdir={workdir}"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    seconds = time.perf_counter() - start
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        sys.exit(f"{config}.py, seed {seed}: exit status {done.returncode}\n{last}")
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    change = {key: [rows[0][key], rows[-1][key]] for key in KEYS if key in rows[-1]}
    curve = [[row["step"], row[CURVE]] for row in rows if CURVE in row]
    return {"seconds": round(seconds, 1), "steps": len(rows), **change, "curve": curve}


def draw(runs: dict[str, dict[str, Any]], path: pathlib.Path) -> None:
    """Held-out accuracy by step, a line per seed and a panel per config (needs matplotlib)."""
    from matplotlib.figure import Figure

    shown = {name: seeds for name, seeds in runs.items() if any(s["curve"] for s in seeds.values())}
    figure = Figure(figsize=(3.4 * len(shown) + 0.6, 2.8), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axis, (name, seeds) in zip(axes, shown.items(), strict=True):
        for seed, run in seeds.items():
            steps, accuracy = zip(*run["curve"], strict=True)
            axis.plot((0, *steps[1:]), accuracy, marker="o", markersize=3, label=f"seed {seed}")
        axis.axhline(0.9, color="gray", linewidth=0.8, linestyle=":")
        axis.set(title=f"{name}.py", xlabel="step", ylim=(0, 1.02))
    axes[0].set_ylabel("held-out accuracy (greedy)")
    axes[0].legend(fontsize="small", loc="lower right")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configs", default="ppo,grpo,remax,safe_rlhf", help="comma-separated")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="comma-separated")
    parser.add_argument("--figure", type=pathlib.Path, help="draw the accuracy curves here (svg)")
    args = parser.parse_args()
    use = machine.CoreUse()
    runs: dict[str, dict[str, Any]] = {}
    for config in args.configs.split(","):
        for seed in args.seeds.split(","):
            with tempfile.TemporaryDirectory() as folder:
                row = train(config, int(seed), pathlib.Path(folder) / "run")
            print(f"{config}.py, seed {seed}: {row}", file=sys.stderr)
            runs.setdefault(config, {})[seed] = row
    if args.figure:
        draw(runs, args.figure)
    result = {"benchmark": "learning", **machine.describe(), **use.read(), "runs": runs}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
