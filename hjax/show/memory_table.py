"""What a device holds during each program of a step, as a table with bars."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.format import flop_count, size

# Figures of a program itself, by their column.
_FIGURES = {
    "arguments": "argument_bytes",
    "outputs": "output_bytes",
    "temporary": "temporary_bytes",
    "code": "code_bytes",
}
# Columns that leave where a line is short, the first one first.
LEAVE = ("bars", "code", "outputs", "peak", "beside it", "temporary", "arguments")
WIDTH = 32  # of a bar, in characters
# Parts of a bar in the order they are drawn: their names, marks and colours.
PARTS = {
    "held": ("█", "blue"),
    "argument": ("▓", "cyan"),
    "temporary": ("▒", "yellow"),
}


def largest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The program during which a device holds most."""
    return max(records, key=lambda record: record["sum_bytes"])


def memory_table(
    records: Sequence[Mapping[str, Any]], memory_bytes: int | None, width: int | None = None
) -> Any:
    """A rich table of the records of ``programs.add_held``.

    Args:
      records: a row each.
      memory_bytes: of a device; None where it has no limit of its own.
      width: characters of a line; columns leave in the order of ``LEAVE`` until a row fits. None:
        all stay.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    scale = max([memory_bytes or 0, *(record["sum_bytes"] for record in records)])
    bars = _legend(memory_bytes)
    columns: dict[str, list[Text]] = {}
    for record in map(_largest_of, grouped(records)):
        held = sum(record["held_bytes"].values())
        peak = record.get("peak_bytes")
        cells = {
            "program": Text(record["name"]),
            **{name: Text(_size(record.get(key))) for name, key in _FIGURES.items()},
            "peak": Text(
                "does not fit" if "refused_bytes" in record else size(peak) if peak else ""
            ),
            "beside it": Text(size(held)),
            "sum": Text(size(record["sum_bytes"]), style="bold"),
            bars: _bar(record, held, scale, memory_bytes),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    for name in LEAVE:
        needed = sum(max(len(n), *(c.cell_len for c in cells)) + 3 for n, cells in columns.items())
        if width is None or needed <= width:
            break
        columns.pop(bars if name == "bars" else name, None)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for name in columns:
        side: Any = "left" if name in ("program", bars) else "right"
        table.add_column(name, justify=side, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _size(value: int | None) -> str:
    return "" if value is None else size(value)


def grouped(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The buckets of a transition together, every other program by itself."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        name = f"{record['role']}.{record['program']}"
        groups.setdefault(re.sub(r"^(\w+\.transition)_\d+$", r"\1", name), []).append(record)
    return list(groups.values())


def _largest_of(group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {**largest(group), "name": name_of(group)}


def name_of(group: Sequence[Mapping[str, Any]]) -> str:
    """``role.program``, how many buckets a transition has, and runs per step if several."""
    record, count = group[0], len(group)
    program = re.sub(r"_\d+$", f" ({count} buckets)", record["program"])
    runs = f" ×{record['runs']}" if record.get("runs", 1) > 1 else ""
    return f"{record['role']}.{program if count > 1 else record['program']}{runs}"


def _legend(memory_bytes: int | None) -> str:
    marks = "  ".join(
        f"{mark} {name}"
        for (mark, _), name in zip(
            PARTS.values(), ("beside it", "arguments", "temporary"), strict=True
        )
    )
    return marks if memory_bytes is None else f"{marks}  | {size(memory_bytes)}"


def _bar(record: Mapping[str, Any], held: int, scale: int, memory_bytes: int | None) -> Any:
    from rich.text import Text

    arguments = record.get("argument_bytes", 0)
    sizes = (held, arguments, record["sum_bytes"] - held - arguments)
    bar, done, reached = Text(), 0, 0
    for (mark, colour), bytes_ in zip(PARTS.values(), sizes, strict=True):
        reached += bytes_
        cells = round(WIDTH * reached / scale) - done
        bar.append(mark * cells, style=colour)
        done += cells
    bar.append("·" * (WIDTH - done), style="dim")
    if memory_bytes is None:
        return bar
    limit = round(WIDTH * memory_bytes / scale)
    return bar[:limit] + Text("|", style="bold red" if limit < done else "bold") + bar[limit:]


def work_table(records: Sequence[Mapping[str, Any]]) -> Any:
    """FLOPs and bytes received, per device and run of each program."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("program")
    for column in ("rows", "FLOPs per device", "received per device"):
        table.add_column(column, justify="right")
    table.add_column("collectives: how many, bytes received per device")
    for group in grouped(records):
        received = [r["received_bytes"] for r in group if "received_bytes" in r]
        table.add_row(
            Text(name_of(group)),
            f"{group[0]['rows']:,}" if group[0]["flops"] else "",  # a transition has none
            flop_count(sum(record["flops"] for record in group)),
            size(sum(received)) if received else "",
            Text(_kinds(group) or "–"),
        )
    return table


def _kinds(group: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, list[int]] = {}
    for record in group:
        for kind, figures in record.get("collectives", {}).items():
            total = found.setdefault(kind, [0, 0])
            total[0] += figures["count"]
            total[1] += figures["received_bytes"]
    return ", ".join(f"{kind} {n:,}: {size(received)}" for kind, (n, received) in found.items())


def verdict(records: Sequence[Mapping[str, Any]], memory_bytes: int) -> str:
    """One sentence: which program needs most, of what its sum is made, what is missing or left."""
    most = largest(records)
    held = ", ".join(f"{name} {size(n)}" for name, n in most["held_bytes"].items())
    own = "it alone would need" if "refused_bytes" in most else "its own"
    parts = f"{own} {size(most['total_bytes'])}" + (f", beside it {held}" if held else "")
    short = most["sum_bytes"] - memory_bytes
    end = f"{size(short)} are missing" if short > 0 else f"{size(-short)} are left"
    return (
        f"most is held during {name_of([most])}: {size(most['sum_bytes'])} per device of "
        f"{size(memory_bytes)}, {end} ({parts})"
    )
