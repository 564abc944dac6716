"""A workdir as a run leaves it, written by hand."""

from __future__ import annotations

import json
from pathlib import Path


def written_run(path: Path, seed: int = 0) -> Path:
    """Fill a folder as a run of four steps does; returns it."""
    config = {
        "steps": 4,
        "seed": seed,
        "algorithm": {"name": "SafeRLHF", "cost_limit": 0.1},
        "data": {"task": "harvest", "path": ""},
        "actor": {"path": ""},
    }
    (path / "config.json").write_text(json.dumps(config))
    rows = [
        {
            "step": step,
            "reward/mean": 0.2 * step,
            "reward/std": 0.1,
            "cost/mean": 0.5 / step,
            "cost/multiplier": 1 + step / 10,
            "kl/reference": None if step == 3 else 0.01 * step,
            "time/step": 10.0 if step == 1 else 1.0,
            "compile/count": 3,
            "time/generate": 0.5,
            "time/update": 0.25,
            "own/metric": step,
        }
        for step in range(1, 5)
    ]
    rows[0]["eval/reward"], rows[3]["eval/reward"] = 0.25, 0.75
    samples = [
        {"step": step, "index": 0, "prompt": "<b>&prompt", "response": f"answer {step}",
         "reward": reward, "advantage": 0.5, "truncated": False, "kind": kind}
        for kind in ("eval", "train")
        for step, reward in ((1, None), (4, 1.0))
    ]  # fmt: skip
    write_rows(path / "metrics.jsonl", rows)
    write_rows(path / "samples.jsonl", samples)
    histograms = [
        {"step": step, "reward": {"low": 0.0, "high": 1.0, "counts": [step] * 19 + [8],
                                  "sum": 1.0, "squares": 1.0}}
        for step in range(1, 5)
    ]  # fmt: skip
    write_rows(path / "histograms.jsonl", histograms)
    start = {
        "step": 0, "time": "2026-01-02T03:04:05Z", "command": "python -m hjax.launch",
        "versions": {"hjax": "1.2.3", "jax": "9.8"}, "commit": "abc", "hjax_commit": "def",
        "devices": {"TPU v9": 4}, "processor": "Some CPU", "cores": 8, "system": "Linux",
    }  # fmt: skip
    write_rows(path / "starts.jsonl", [start])
    left_out = {"equal pair": ["a.jsonl:7", "a.jsonl:9"]}
    (path / "left_out_rows.json").write_text(json.dumps(left_out))
    write_rows(path / "warm_start.jsonl", [{"step": i, "loss": 3 / i} for i in (1, 2)])
    (path / "plan.json").write_text(
        json.dumps({
            "placement": [["actor"], ["critic"]],
            "allocation": [2, 1],
            "parallelism": {"actor": {"train": {"data": 2}, "generate": {"data": -1}}},
        })
    )  # fmt: skip
    events = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "pool left"}},
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "pool right"}},
        {"name": "update_actor", "ph": "X", "ts": 2e6, "dur": 5e5, "pid": 0, "tid": 0,
         "args": {"role": "actor", "step": 4}},
        {"name": "update_critic", "ph": "X", "ts": 2.1e6, "dur": 5e5, "pid": 1, "tid": 1,
         "args": {"role": "critic", "step": 4}},
    ]  # fmt: skip
    (path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    return path


def write_rows(path: Path, rows: list) -> None:
    """A `.jsonl` file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
