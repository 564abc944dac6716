"""Samples of the report: responses before, during and after training."""

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.charts import value_text
from hjax.show.format import printable, signed
from hjax.show.session_tree import session_tree

Row = Mapping[str, Any]
# Prompts shown.
_SAMPLES = 8
# Limits of the samples that a page's script can browse: steps, and characters of all samples.
_STEPS, _CHARACTERS = 120, 3_000_000


def held_out_table(samples: Sequence[Row]) -> dict[str, Any] | None:
    """Responses to the same held-out prompts at the first and at the last evaluation.

    Returns:
      ``heads`` of the answers' columns, and ``rows`` of ``prompt`` and ``answers``
      (``sample_record``; None if a prompt was not evaluated again); None without evaluations.
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
        answers = [sample_record(stage[index]) if index in stage else None for stage in stages]
        rows.append({"index": index, "prompt": str(stages[0][index]["prompt"]), "answers": answers})
    return {"heads": heads, "rows": rows}


def training_samples(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """The first and the last step's training samples: ``step`` and ``answers``."""
    train = [s for s in samples if s.get("kind") != "eval"]
    steps = sorted({train[0]["step"], train[-1]["step"]}) if train else []
    return [
        {"step": step, "answers": [sample_record(s) for s in train if s["step"] == step][:_SAMPLES]}
        for step in steps
    ]


def browsable_samples(samples: Sequence[Row], histograms: Sequence[Row]) -> dict[str, Any]:
    """Samples and histograms that the page's script shows step by step.

    If a page would become too large, steps are left out evenly; the first and the last stay.

    Returns:
      ``train`` and ``eval``: ``steps``, and in ``rows`` for each step a list of ``sample_record``
      with the row's ``index``; ``histograms``: ``steps``, and ``rows`` as in histograms.jsonl.
    """
    found: dict[str, Any] = {}
    for kind in ("train", "eval"):
        by_step: dict[int, list[dict[str, Any]]] = {}
        for sample in samples:
            if (sample.get("kind") == "eval") == (kind == "eval"):
                shown = sample_record(sample) | {"index": sample.get("index", 0)}
                by_step.setdefault(sample["step"], []).append(shown)
        found[kind] = _thinned_to_page({step: rows[:_SAMPLES] for step, rows in by_step.items()})
    found["histograms"] = _thinned_to_page({row["step"]: row for row in histograms})
    return found


def _thinned_to_page(by_step: Mapping[int, Any]) -> dict[str, Any]:
    """``steps`` and ``rows``, thinned out evenly until they fit on a page."""
    steps = sorted(by_step)
    characters = sum(len(str(by_step[step])) for step in steps)
    most = _STEPS
    if characters > _CHARACTERS:
        most = max(2, min(most, int(len(steps) * _CHARACTERS / characters)))
    if len(steps) > most:
        places = [round(i * (len(steps) - 1) / (most - 1)) for i in range(most)]
        steps = [steps[place] for place in dict.fromkeys(places)]
    return {"steps": steps, "rows": [by_step[step] for step in steps]}


def histogram_bars(row: Row | None) -> dict[str, Any] | None:
    """The last step's rewards as bars in hundredths of a chart's height; None without rewards."""
    found = (row or {}).get("reward")
    if not found:
        return None
    most = max(found["counts"]) or 1
    return {
        "step": row["step"] if row else 0,
        "heights": [round(100 * count / most, 1) for count in found["counts"]],
        "low": value_text(found["low"]),
        "high": value_text(found["high"]),
        "most": most,
    }


def sample_record(sample: Row) -> dict[str, Any]:
    """``prompt``, ``response``, ``scores`` as (name, text), and whether it was ``truncated``; of an
    episode also its ``turns``, ``stop_reason`` and ``return``, and of an agent's session its
    ``calls`` (``session_tree``)."""
    given = {key: sample[key] for key in ("reward", "cost", "advantage") if key in sample}
    scores = [(key, "unscored" if x is None else signed(x)) for key, x in given.items()]
    record = {
        "prompt": printable(str(sample["prompt"])),
        "response": printable(str(sample["response"])),
        "scores": scores,
        "truncated": bool(sample.get("truncated")),
    }
    if "turns" in sample:
        record["turns"] = [_turn_record(turn) for turn in sample["turns"]]
        if sample.get("calls"):
            record["calls"] = session_tree(sample["calls"])
        record |= {"stop_reason": sample["stop_reason"], "return": sample.get("reward")}
    return record


def _turn_record(turn: Row) -> dict[str, Any]:
    """A turn's texts; its reward is empty where it is 0."""
    return {
        "action": printable(str(turn["action"])),
        "observation": printable(str(turn["observation"])),
        "reward": signed(turn["reward"]) if turn["reward"] else "",
        "valid": bool(turn["valid"]),
        "fresh": bool(turn.get("fresh")),
    }
