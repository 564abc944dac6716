"""What bounds each program of a step, its minimum and its costliest lines, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.show.format import flop_count, seconds, size
from hjax.show.memory_table import grouped, name_of


def roofline_table(records: Sequence[Mapping[str, Any]]) -> Any:
    """A row per program: how long it takes by data sheet, what bounds it, beside its minimum.

    Args:
      records: of ``compile_program``, those with a ``roofline``.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("program")
    for column in ("predicted", "minimum", "bound", "MFU", "tokens/s", "memory", "FLOPs",
                   "received", "of it waited for"):  # fmt: skip
        table.add_column(column, justify="right")
    for group in grouped(records):
        found = [record["roofline"] for record in group]
        total = {key: sum(each[key] for each in found) for key in SUMMED}
        least = [record["minimum"] for record in group if record.get("minimum")]
        mfu, rate = group[0].get("mfu"), group[0].get("tokens_per_second")
        received = total["received_bytes"]
        waited = f"{total['synchronous_bytes'] / received:.0%}" if received else ""
        table.add_row(
            Text(name_of(group)),
            seconds(total["seconds"]),
            seconds(sum(each["seconds"] for each in least)) if least else "",
            max(found, key=lambda each: each["seconds"])["bound"],
            f"{mfu:.1%}" if mfu else "",
            f"{rate:,.0f}" if rate else "",
            _of(total["bytes"], least, "bytes", size),
            _of(total["flops"], least, "flops", flop_count),
            _of(received, least, "received_bytes", size) if received else "",
            waited,
        )
    return table


SUMMED = ("seconds", "bytes", "flops", "received_bytes", "synchronous_bytes")


def _of(found: float, least: Sequence[Mapping[str, float]], key: str, told: Any) -> str:
    """An amount, and how many times its minimum that is."""
    floor = sum(each[key] for each in least)
    return f"{told(found)} ({found / floor:.2f}×)" if floor else told(found)


def costliest_table(record: Mapping[str, Any]) -> Any:
    """The lines of source on which a program spends most of its time."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1), title=name_of([record]), title_justify="left"
    )
    table.add_column("line")
    for column in ("seconds", "share", "runs", "memory", "FLOPs", "received"):
        table.add_column(column, justify="right")
    total = record["roofline"]["seconds"] or 1.0
    for line in record["roofline"]["costliest"]:
        table.add_row(
            Text(short(line["source"]) or line["name"]),
            seconds(line["seconds"]),
            f"{line['seconds'] / total:.0%}",
            f"{line['times']:,.0f}",
            size(line["bytes"]) if line["bytes"] else "",
            flop_count(line["flops"]) if line["flops"] else "",
            size(line["received_bytes"]) if line["received_bytes"] else "",
        )
    return table


def short(source: str) -> str:
    """A place as people know it: from the package's folder on, else the file alone."""
    path, _, line = source.rpartition(":")
    parts = Path(path).parts
    if "hjax" in parts:
        at = len(parts) - 1 - parts[::-1].index("hjax")
        return f"{'/'.join(parts[at:])}:{line}"
    return f"{Path(path).name}:{line}" if path else source
