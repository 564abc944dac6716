"""Numbers and texts as a person reads them: the columns of the step table, times, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the step table: its title, its metric, how it is written, its width."""

    title: str
    metric: str
    text: Callable[[float], str]
    width: int


def number(value: float) -> str:
    """Three decimals or one, for a column of figures of one size; large ones with an exponent."""
    if abs(value) >= 1000:
        return f"{value:.1e}"
    # Adding 0 turns a rounded -0.0 into 0.0.
    return f"{round(value, 3) + 0:.3f}" if abs(value) < 10 else f"{value:.1f}"


def duration(value: float) -> str:
    """Seconds: `0.25 s`, `12.3 s`, `3:05`."""
    if value >= 60:
        return clock(value)
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def clock(value: float) -> str:
    """Minutes and seconds, or hours: `3:05`, `2:00:00`."""
    whole = int(value + 0.5)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def count(value: float) -> str:
    """A large count: `812`, `12.3k`, `4.5M`, `13.0B`."""
    for least, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= least:
            return f"{value / least:.1f}{unit}"
    return f"{value:.0f}"


def size(value: float) -> str:
    """Bytes: `512 B`, `3.2 MiB`, `12.9 GiB`."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << power:
            return f"{value / (1 << power):.1f} {unit}"
    return f"{value:.0f} B"


def flop_count(value: float) -> str:
    """FLOPs: `1.24 TFLOP`, `812 MFLOP`."""
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {unit}FLOP"
    return f"{value:.3g} FLOP"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"


COLUMNS = {
    column.title: column
    for column in (
        Column("step", "step", count, 9),
        Column("reward", "reward/mean", number, 13),
        Column("accuracy", "eval/accuracy", _percent, 8),
        Column("eval", "eval/reward", number, 6),
        Column("cost", "cost/mean", number, 6),
        Column("multiplier", "cost/multiplier", number, 6),
        Column("KL", "kl/reference", number, 7),
        Column("loss", "actor/loss", lambda x: f"{x:.4f}", 8),
        Column("entropy", "actor/entropy", number, 7),
        Column("length", "response/length_mean", lambda x: f"{x:.1f}", 6),
        Column("tok/s", "throughput/tokens_per_second", count, 7),
        Column("time", "time/step", duration, 7),
        Column("left", "left_seconds", clock, 7),
    )
}


def used_columns(before: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The columns to show: those shown before and those for which this row has a metric."""
    columns = [
        title
        for title, column in COLUMNS.items()
        if title in before or row.get(column.metric) is not None
    ]
    if "time" in columns and "left" not in columns:
        columns.append("left")  # known from the second step on; the table need not change then
    if "accuracy" in columns and "eval" in columns and "eval" not in before:
        columns.remove("eval")  # the accuracy says it already
    return columns


def cells(row: Mapping[str, Any], columns: Iterable[str], total: int) -> list[str]:
    """The texts of a row of the step table; empty where the row lacks the metric."""
    texts = []
    for title in columns:
        column = COLUMNS[title]
        value = row.get(column.metric)
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


def one_line(text: Any) -> str:
    """A model's text, safe to print on one line: line breaks as ⏎, no control characters.

    Lists of token ids (where there is no tokenizer) are written as such.
    """
    text = text if isinstance(text, str) else str(text)
    shown = []
    for character in text:
        if character == "\n":
            shown.append("⏎")
        elif character == "\t":
            shown.append(" ")
        elif character.isprintable():
            shown.append(character)
        else:
            shown.append("·")
    return "".join(shown)


def pick(samples: Sequence[Mapping[str, Any]], n: int) -> list[Mapping[str, Any]]:
    """``n`` of the samples, spread from the lowest to the highest reward."""

    def reward(sample: Mapping[str, Any]) -> float:
        value = sample.get("reward")
        return float("-inf") if value is None else value

    ordered = sorted(samples, key=reward)
    if len(ordered) <= n:
        return ordered
    if n == 1:
        return ordered[-1:]
    return [ordered[round(i * (len(ordered) - 1) / (n - 1))] for i in range(n)]
