"""The samples of the report: what the model answered at first, and what it answers now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# Prompts shown.
_SAMPLES = 8


def held_out_table(samples: Sequence[Row]) -> dict[str, Any] | None:
    """The same held-out prompts, answered at the first and at the last evaluation.

    Returns:
      ``heads`` of the answers' columns, and ``rows`` of ``prompt`` and ``answers`` (as of
      ``answer``; None where it was not asked again); None without evaluations.
    """
    held_out = [s for s in samples if s.get("kind") == "eval"]
    if not held_out:
        return None
    first, last = held_out[0]["step"], held_out[-1]["step"]
    # The first evaluation comes before its step's update.
    heads = [f"before training (step {first})"]
    stages = [{s["index"]: s for s in held_out if s["step"] == first}]
    if last != first:
        heads.append(f"after step {last}")
        stages.append({s["index"]: s for s in held_out if s["step"] == last})
    rows = []
    for index in sorted(stages[0])[:_SAMPLES]:
        answers = [answer(stage[index]) if index in stage else None for stage in stages]
        rows.append({"prompt": str(stages[0][index]["prompt"]), "answers": answers})
    return {"heads": heads, "rows": rows}


def training_samples(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """The first and the last step's training samples: ``step`` and ``answers``."""
    train = [s for s in samples if s.get("kind") != "eval"]
    steps = sorted({train[0]["step"], train[-1]["step"]}) if train else []
    return [
        {"step": step, "answers": [answer(s) for s in train if s["step"] == step][:_SAMPLES]}
        for step in steps
    ]


def answer(sample: Row) -> dict[str, Any]:
    """``prompt``, ``response``, ``scores`` as (name, text), and whether it was ``truncated``."""
    scores = []
    for key in ("reward", "cost", "advantage"):
        if key in sample:
            value = sample[key]
            # Adding 0 turns a rounded -0.0 into 0.0.
            text = "unscored" if value is None else f"{round(value, 2) + 0.0:+.2f}"
            scores.append((key, text))
    return {
        "prompt": str(sample["prompt"]),
        "response": str(sample["response"]),
        "scores": scores,
        "truncated": bool(sample.get("truncated")),
    }
