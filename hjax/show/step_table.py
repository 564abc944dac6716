"""The step table: its columns, the texts of a row, and which columns fit into a line."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hjax.show.format import clock, count, duration, number

GAP = 2  # blanks between columns


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the step table: title, metric, format function, width in characters."""

    title: str
    metric: str
    text: Callable[[float], str]
    width: int


COLUMNS = {
    column.title: column
    for column in (
        Column("step", "step", count, 9),
        Column("reward", "reward/mean", number, 13),
        Column("accuracy", "eval/accuracy", lambda x: f"{100 * x:.1f}%", 8),
        Column("pair_acc", "eval/pair_accuracy", lambda x: f"{100 * x:.1f}%", 8),
        Column("margin", "actor/margin", number, 7),
        Column("eval", "eval/reward", number, 6),
        Column("cost", "cost/mean", number, 6),
        Column("multiplier", "cost/multiplier", number, 10),
        Column("KL", "kl/reference", number, 7),
        Column("loss", "actor/loss", lambda x: f"{x:.4f}", 8),
        Column("eval_loss", "eval/loss", lambda x: f"{x:.4f}", 9),
        Column("entropy", "actor/entropy", number, 7),
        Column("turns", "episode/turns", lambda x: f"{x:.1f}", 5),
        Column("length", "response/length_mean", lambda x: f"{x:.1f}", 6),
        Column("calls/s", "throughput/calls_per_second", number, 7),
        Column("wait", "time/calls_wait", duration, 7),
        Column("agents", "time/agents", duration, 7),
        Column("env", "time/environment", duration, 7),
        Column("tok/s", "throughput/tokens_per_second", count, 7),
        Column("time", "time/step", duration, 7),
        Column("left", "left_seconds", clock, 7),
    )
}
# Columns by importance: where a row is too wide, the last ones are dropped first.
IMPORTANCE = (
    "step", "reward", "accuracy", "cost", "KL", "loss", "pair_acc", "margin", "eval", "eval_loss",
    "multiplier", "turns", "time", "left", "calls/s", "agents", "wait", "env", "length", "tok/s",
    "entropy",
)  # fmt: skip


def metric_of(column: Column, row: Mapping[str, Any]) -> str:
    """The column's metric; without an actor the loss is that of the first role."""
    if column.title != "loss" or column.metric in row:
        return column.metric
    losses = (key for key in row if key.endswith("/loss") and not key.startswith("eval/"))
    return next(losses, column.metric)


def used_columns(before: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The columns to show: those shown before and those for which this row has a metric."""
    columns = [
        title
        for title, column in COLUMNS.items()
        if title in before or row.get(metric_of(column, row)) is not None
    ]
    if "time" in columns and "left" not in columns:
        columns.append("left")  # has values from the second step on; so columns stay the same
    if "accuracy" in columns and "eval" in columns and "eval" not in before:
        columns.remove("eval")  # redundant beside the accuracy
    return columns


def fitting_columns(
    columns: Sequence[str],
    widths: Mapping[str, int],
    room: int | None,
    importance: Sequence[str] = IMPORTANCE,
) -> list[str]:
    """Drop the least important columns until a row fits; at least one stays.

    Args:
      columns: titles, in their order.
      widths: characters of each, without the gap between two.
      room: characters of a line; None: unlimited.
      importance: all titles, the most important first.
    """
    kept = list(columns)
    for title in reversed(importance):
        needed = sum(widths[c] for c in kept) + GAP * (len(kept) - 1)
        if room is None or needed <= room or len(kept) == 1:
            break
        if title in kept:
            kept.remove(title)
    return kept


def row_cells(row: Mapping[str, Any], columns: Iterable[str], total: int) -> list[str]:
    """The texts of a row of the step table; empty where the row lacks the metric."""
    texts = []
    for title in columns:
        column = COLUMNS[title]
        value = row.get(metric_of(column, row))
        if title == "step":
            text = f"{row['step']}/{total}"
        elif value is None:
            text = ""
        else:
            text = column.text(value)
            if title == "reward" and row.get("reward/std") is not None:
                text += f" ±{number(row['reward/std']):>5}"
        texts.append(text)
    return texts
