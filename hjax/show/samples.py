"""The samples of the report: what the model answered at first, and what it answers now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.charts import escape

Row = Mapping[str, Any]
# Prompts shown.
_SAMPLES = 8


def sample_section(samples: Sequence[Row]) -> str:
    """Held-out prompts before and after, and the first and last step's training samples."""
    held_out = [s for s in samples if s.get("kind") == "eval"]
    train = [s for s in samples if s.get("kind") != "eval"]
    parts = []
    if held_out:
        parts.append(_held_out_table(held_out))
    if train:
        first, last = train[0]["step"], train[-1]["step"]
        columns = [_sample_card(train, first)]
        if last != first:
            columns.append(_sample_card(train, last))
        parts.append(f'<h2>Training samples</h2><div class="two">{"".join(columns)}</div>')
    return "\n".join(parts)


def _held_out_table(samples: Sequence[Row]) -> str:
    """The same held-out prompts, answered at the first and at the last evaluation."""
    first, last = samples[0]["step"], samples[-1]["step"]
    # The first evaluation comes before its step's update.
    before = {s["index"]: s for s in samples if s["step"] == first}
    after = {s["index"]: s for s in samples if s["step"] == last}
    rows = []
    for index in sorted(before)[:_SAMPLES]:
        cells = [f'<td class="text prompt">{escape(before[index]["prompt"])}</td>']
        for sample in (before[index], after.get(index)) if last != first else (before[index],):
            if sample is None:
                cells.append("<td></td>")
                continue
            cells.append(f'<td><div class="text">{escape(sample["response"])}</div>'
                         f"{_chips(sample)}</td>")  # fmt: skip
        rows.append(f"<tr>{''.join(cells)}</tr>")
    heads = [f"before training (step {first})"]
    if last != first:
        heads.append(f"after step {last}")
    head = "".join(f"<th>{h}</th>" for h in ["prompt", *heads])
    return (
        '<h2>Held-out prompts, before and after</h2><div class="card scroll"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _sample_card(samples: Sequence[Row], step: int) -> str:
    rows = [
        f'<tr><td><span class="text prompt">{escape(s["prompt"])}</span> '
        f'<span class="text">{escape(s["response"])}</span><br>{_chips(s)}</td></tr>'
        for s in [s for s in samples if s["step"] == step][:_SAMPLES]
    ]
    return (
        f'<div class="card"><h3>Step {step}</h3><table><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _chips(sample: Row) -> str:
    chips = []
    for key in ("reward", "cost", "advantage"):
        if key in sample:
            value = sample[key]
            text = "unscored" if value is None else f"{round(value, 2) + 0.0:+.2f}"
            chips.append(f'<span class="chip">{key} <b>{text}</b></span>')
    if sample.get("truncated"):
        chips.append('<span class="chip">cut at the limit</span>')
    return " ".join(chips)
