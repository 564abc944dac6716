"""The learning curves of the report: which metrics share a chart, and what stands above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.charts import LineChart, Series, line_chart, value_text

Row = Mapping[str, Any]

# Title, what it says, metrics drawn together; shown where the run has the first of them.
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "mean of the step's responses, band: one standard deviation; dots: held-out, greedy",
     ("reward/mean", "eval/reward")),
    ("Accuracy", "held-out prompts, greedy", ("eval/accuracy",)),
    ("Cost", "mean of the step's responses", ("cost/mean",)),
    ("Multiplier", "weight of the cost", ("cost/multiplier",)),
    ("KL to the reference", "nats per token, k1", ("kl/reference",)),
    ("KL coefficient", "", ("kl/coefficient",)),
    ("Actor loss", "", ("actor/loss",)),
    ("Critic loss", "", ("critic/loss", "cost_critic/loss")),
    ("Entropy", "nats per token", ("actor/entropy",)),
    ("Response length", "tokens", ("response/length_mean",)),
    ("Explained variance", "of the returns, by the critic", ("critic/explained_variance",)),
    ("Clip fraction", "share of tokens", ("actor/clip_fraction", "critic/clip_fraction")),
    ("Gradient norm", "before clipping", ("actor/grad_norm", "critic/grad_norm")),
    ("Truncated", "share of responses cut at the length limit", ("response/truncated",)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Card:
    """A chart with its title, what it shows, the last values and who has which colour."""

    title: str
    what: str
    last: str
    chart: LineChart
    legend: Sequence[tuple[str, int]]


def curve_cards(
    metrics: Sequence[Row], warm_start: Sequence[Row], cost_limit: float | None
) -> tuple[list[Card], list[Card]]:
    """The charts of a run, and those of all other metrics.

    Args:
      metrics, warm_start: rows as in metrics.jsonl and warm_start.jsonl.
      cost_limit: drawn into the cost's chart.
    """
    cards: list[Card] = []
    drawn = {"step", "reward/std"}
    for title, what, keys in CURVES:
        values = [y for key in keys for _, y in points_of(metrics, key)]
        # What never moves has no curve to show: it stands among the others.
        if points_of(metrics, keys[0]) and (len(values) < 2 or min(values) < max(values)):
            drawn.update(keys)
            limited = keys[0] == "cost/mean" and cost_limit is not None
            limit = ("limit", cost_limit) if limited and cost_limit is not None else None
            cards.append(_card(title, what, _series(metrics, keys), limit))
    points = points_of(warm_start, "loss")
    if points:
        what = "supervised, before the first step; nats per token"
        cards.append(_card("Warm start loss", what, [Series("loss", points, 5)]))
    others = sorted({key for row in metrics for key in row} - drawn)
    rest = [(key, points_of(metrics, key)) for key in others]
    return cards, [_card(key, "", [Series(key, points, 7)]) for key, points in rest if points]


def points_of(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the metric."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _series(metrics: Sequence[Row], keys: Sequence[str]) -> list[Series]:
    series = []
    for color, key in enumerate(keys):
        points = points_of(metrics, key)
        if not points:
            continue
        spread = None
        if key == "reward/mean":
            rows = [row for row in metrics if row.get(key) is not None]
            spread = [row.get("reward/std") or 0.0 for row in rows]
        series.append(Series(key, points, color, dots=key.startswith("eval/"), spread=spread))
    return series


def _card(
    title: str, what: str, series: Sequence[Series], limit: tuple[str, float] | None = None
) -> Card:
    last = " · ".join(value_text(s.points[-1][1], [y for _, y in s.points]) for s in series)
    legend = [(s.name, s.color) for s in series] if len(series) > 1 else []
    return Card(title, what, last, line_chart(series, limit), legend)
