"""Learning curves of the report: which metrics share a chart, its title and caption."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hjax.roles import ROLES
from hjax.show.charts import ChartSeries, LineChart, line_chart, value_text

Row = Mapping[str, Any]

# Colours of roles and phases in all charts: numbers of the pages' classes `c0` ... `c13`.
OTHER = 7  # of neither a role nor a phase
HELD_OUT = 11
ROLE_COLORS = {name: number for number, name in enumerate(ROLES)}
PHASE_COLORS = {"generate": 8, "environment": 13, "transition": 12, "prepare": 10, "update": 9}
# Of the ways in which episodes end.
STOP_COLORS = {"max_turns": 1, "context": 2, "timeout": 3, "exception": 4, "killed": 5}


def metric_color(key: str, usual: int = OTHER) -> int:
    """The colour of a metric's curve: its role's, its phase's, or ``usual``."""
    section, _, name = key.partition("/")
    if section == "eval":
        return HELD_OUT
    if section == "time":
        return PHASE_COLORS.get(name, usual)
    if section == "episode":
        return STOP_COLORS.get(name.removeprefix("stop_"), usual)
    return ROLE_COLORS.get(section, usual)


# Title, caption, metrics drawn together. A chart is shown if the run has its first metric.
CURVES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "mean of the step's responses, band: one standard deviation; dots: held-out, greedy",
     ("reward/mean", "eval/reward")),
    ("Accuracy", "held-out", ("eval/accuracy",)),
    ("Turns", "mean of the step's episodes; dots: held-out, greedy",
     ("episode/turns", "eval/turns")),
    ("How episodes end", "share of the step's episodes",
     ("episode/stop_done", "episode/stop_max_turns", "episode/stop_context",
      "episode/stop_timeout", "episode/stop_exception", "episode/stop_killed")),
    ("Cost", "mean of the step's responses", ("cost/mean",)),
    ("Multiplier", "weight of the cost", ("cost/multiplier",)),
    ("KL to the reference", "nats per token, k1", ("kl/reference",)),
    ("KL coefficient", "", ("kl/coefficient",)),
    ("Actor loss", "dots: held-out", ("actor/loss", "eval/loss")),
    ("Critic loss", "", ("critic/loss", "cost_critic/loss")),
    ("Entropy", "nats per token", ("actor/entropy",)),
    ("Response length", "tokens", ("response/length_mean",)),
    ("Explained variance", "of the returns, by the critic", ("critic/explained_variance",)),
    ("Clip fraction", "share of tokens", ("actor/clip_fraction", "critic/clip_fraction")),
    ("Gradient norm", "before clipping", ("actor/grad_norm", "critic/grad_norm")),
    ("Truncated", "share of responses cut at the length limit", ("response/truncated",)),
)  # fmt: skip


# Shown even if constant.
_ALWAYS_SHOWN = ("response/truncated",)
# Sections of hjax's own metrics; all other metrics are a user's own and shown first.
_MACHINE = {"time", "throughput", "memory", "compile", "rollout", "response", "loss", "kl", *ROLES}
# Timing metrics, which are not representative in steps that compile.
TIMED = ("time/", "throughput/")
_MIN_OTHER_STEPS = 2  # steps without compilation needed to leave out those that compile


@dataclasses.dataclass(frozen=True)
class ChartCard:
    """A chart with its title and caption.

    Attributes:
      last: the last value of its only curve; empty where there are several.
      legend: (name, colour, last value) of each curve where there are several.
    """

    title: str
    what: str
    last: str
    chart: LineChart
    legend: Sequence[tuple[str, int, str]]

    @property
    def names(self) -> list[tuple[str, int]]:
        """(name, colour) of the legend."""
        return [(name, color) for name, color, _ in self.legend]


def curve_cards(
    metrics: Sequence[Row], warm_start: Sequence[Row], cost_limit: float | None
) -> tuple[list[ChartCard], list[ChartCard]]:
    """The main charts of a run, and further ones of machine metrics and details.

    Args:
      metrics, warm_start: rows as in metrics.jsonl and warm_start.jsonl.
      cost_limit: drawn into the cost's chart.
    """
    cards: list[ChartCard] = []
    drawn = {"step", "reward/std"}
    times = seconds_of(metrics)

    def curves(*keys: str) -> list[ChartSeries]:
        spreads = {"reward/mean": "reward/std"}
        return [
            series_of(metrics, key, key, metric_color(key, 0), times, spreads.get(key, ""))
            for key in keys
            if points_of(metrics, key)
        ]

    for title, what, keys in CURVES:
        if not points_of(metrics, keys[0]):
            continue
        values = [y for key in keys for _, y in points_of(metrics, key)]
        # A constant metric goes to the further charts.
        if keys[0] in _ALWAYS_SHOWN or len(values) < 2 or min(values) < max(values):
            drawn.update(keys)
            limited = keys[0] == "cost/mean" and cost_limit is not None
            limit = ("limit", cost_limit) if limited and cost_limit is not None else None
            cards.append(chart_card(title, what, curves(*keys), limit))
    if points := points_of(warm_start, "loss"):
        what = "supervised, before the first step; nats per token"
        cards.append(chart_card("Warm start loss", what, [ChartSeries("loss", points, 5)]))
    compiling = compiling_steps(metrics)
    more: list[ChartCard] = []
    for key in sorted({key for row in metrics for key in row} - drawn):
        if not points_of(metrics, key):
            continue
        own = key.partition("/")[0] not in _MACHINE or _is_named_reward(key)
        clipped = compiling if key.startswith(TIMED) else ()
        what = "steps that compile are cut off" if clipped else ""
        (cards if own else more).append(chart_card(key, what, curves(key), None, clipped))
    return cards, more


def _is_named_reward(key: str) -> bool:
    """Whether a metric is a reward that the user named."""
    return key.startswith("reward/") and key not in ("reward/unscored", "reward/std")


def compiling_steps(metrics: Sequence[Row]) -> list[int]:
    """The steps in which something was compiled; none if hardly any other steps remain."""
    counts = [row.get("compile/count") for row in metrics]
    steps = [
        row["step"]
        for row, count, last in zip(metrics, counts, [None, *counts[:-1]])
        if count is not None and count != (last or 0)
    ]
    return steps if len(metrics) - len(steps) >= _MIN_OTHER_STEPS else []


def seconds_of(metrics: Sequence[Row]) -> dict[int, float]:
    """By step, the total seconds up to its end; empty if a step's time is unknown."""
    total, found = 0.0, {}
    for row in metrics:
        if row.get("time/step") is None:
            return {}
        total += row["time/step"]
        found[row["step"]] = total
    return found


def calibration_cards(rows: Sequence[Row]) -> list[ChartCard]:
    """Calibration charts of the last evaluation: observed frequency by predicted probability.

    Args:
      rows: as in calibration.jsonl.
    """
    last = {row.get("of", ""): row for row in rows if row.get("bins")}
    cards = []
    for subject, row in last.items():
        points = [(100 * b["predicted"], 100 * b["observed"]) for b in row["bins"]]
        series = [
            ChartSeries("observed", points, 0, dots=True),
            ChartSeries("predicted", [(50.0, 50.0), (100.0, 100.0)], 7),
        ]
        count = sum(b["count"] for b in row["bins"])
        what = (
            f"held-out {subject or 'predictions'}, step {row['step']}, {count}: share of "
            "preferences that came true, %, by the probability that was given, %"
        )
        chart = line_chart(series, along="probability")
        legend = [(s.name, s.color, "") for s in series]
        cards.append(ChartCard(f"Calibration {subject}".strip(), what, "", chart, legend))
    return cards


def points_of(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have the metric."""
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def series_of(
    metrics: Sequence[Row],
    key: str,
    name: str,
    color: int,
    times: Mapping[int, float],
    spread: str = "",
) -> ChartSeries:
    """The curve of a metric.

    Args:
      times: as of ``seconds_of``.
      spread: the metric that is half the width of a band around it; empty: none.
    """
    rows = [row for row in metrics if row.get(key) is not None]
    return ChartSeries(
        name,
        [(row["step"], row[key]) for row in rows],
        color,
        dots=key.startswith("eval/"),
        spread=[row.get(spread) or 0.0 for row in rows] if spread else None,
        seconds=[times[row["step"]] for row in rows] if times else None,
    )


def chart_card(
    title: str,
    what: str,
    series: Sequence[ChartSeries],
    limit: tuple[str, float] | None = None,
    clipped: Collection[float] = (),
    named: bool = False,
) -> ChartCard:
    """A chart card of some curves; ``named``: with a legend even for a single curve."""
    said = [value_text(s.points[-1][1], [y for _, y in s.points]) for s in series]
    chart = line_chart(series, limit, clipped)
    if len(series) == 1 and not named:
        return ChartCard(title, what, f"last: {said[0]}", chart, [])
    legend = [(s.name, s.color, f"last {text}") for s, text in zip(series, said)]
    return ChartCard(title, what, "", chart, legend)
