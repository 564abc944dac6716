"""Memory table: bytes that a device holds during each program of a step, with bars."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.table import Table
from rich.text import Text

from hjax.show.format import flop_count, size
from hjax.show.tables import rows_table, wide_console

# Figures of a program itself, by their column.
_FIGURES = {
    "arguments": "argument_bytes",
    "outputs": "output_bytes",
    "temporary": "temporary_bytes",
    "code": "code_bytes",
}
# Columns dropped where a line is too short, in this order.
DROP_ORDER = ("bars", "code", "outputs", "peak", "beside it", "temporary", "arguments")
WIDTH = 32  # of a bar, in characters
# Parts of a bar in the order they are drawn: their names, marks and colours.
PARTS = {"beside it": ("█", "blue"), "arguments": ("▓", "cyan"), "temporary": ("▒", "yellow")}


def largest(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The record of the program during which a device holds most bytes."""
    return max(records, key=lambda record: record["sum_bytes"])


def memory_table(
    records: Sequence[Mapping[str, Any]], memory_bytes: int | None, width: int | None = None
) -> Any:
    """A rich table of the records of ``programs.add_held``.

    Args:
      records: a row each.
      memory_bytes: of a device; None where it has no limit of its own.
      width: characters of a line; columns are dropped in ``DROP_ORDER`` until a row fits. None: all
        stay.
    """
    scale = max([memory_bytes or 0, *(record["sum_bytes"] for record in records)])
    bars = _legend(memory_bytes)
    columns: dict[str, list[Text]] = {}
    for record in map(_largest_of, grouped(records)):
        held = sum(record["held_bytes"].values())
        peak = record.get("peak_bytes")
        cells = {
            "program": Text(record["name"]),
            **{name: Text(_amount(record.get(key), size)) for name, key in _FIGURES.items()},
            "peak": Text(
                "does not fit" if "refused_bytes" in record else _amount(peak or None, size)
            ),
            "beside it": Text(size(held)),
            "sum": Text(size(record["sum_bytes"]), style="bold"),
            bars: _bar(record, held, scale, memory_bytes),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    for name in DROP_ORDER:
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


def print_memory(
    records: Sequence[Mapping[str, Any]], memory_bytes: int | None, stream: TextIO | None = None
) -> None:
    """Print the ``memory_table`` of a step."""
    console = wide_console(stream)
    console.print("\n[bold]memory per device[/bold]")
    console.print(memory_table(records, memory_bytes, console.width))


def grouped(records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Records grouped by table row: a transition's buckets together, every other program alone."""
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


def _amount(value: float | None, text_of: Callable[[float], str]) -> str:
    """A figure as text; empty if None."""
    return "" if value is None else text_of(value)


def _legend(memory_bytes: int | None) -> str:
    marks = "  ".join(f"{mark} {name}" for name, (mark, _) in PARTS.items())
    return marks if memory_bytes is None else f"{marks}  | {size(memory_bytes)}"


def _bar(record: Mapping[str, Any], held: int, scale: int, memory_bytes: int | None) -> Any:
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
    """A rich table of FLOPs and bytes received, per device and run of each program."""
    figures = ("rows", "FLOPs per device", "received per device")
    columns = ("program", *figures, "collectives: how many, bytes received per device")
    rows = []
    for group in grouped(records):
        received = [r["received_bytes"] for r in group if "received_bytes" in r]
        flops = sum(record["flops"] for record in group)
        count = f"{group[0]['rows']:,}" if group[0]["flops"] else ""  # a transition has none
        moved = size(sum(received)) if received else ""
        rows.append((name_of(group), count, flop_count(flops), moved, _kinds(group) or "–"))
    return rows_table(columns, rows, right=figures)


def _kinds(group: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, list[int]] = {}
    for record in group:
        for kind, figures in record.get("collectives", {}).items():
            total = found.setdefault(kind, [0, 0])
            total[0] += figures["count"]
            total[1] += figures["received_bytes"]
    return ", ".join(f"{kind} {n:,}: {size(received)}" for kind, (n, received) in found.items())


def verdict(records: Sequence[Mapping[str, Any]], memory_bytes: int) -> str:
    """One sentence: the program of most memory, the parts of its sum, and bytes missing or left."""
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


def ring_rows(rings: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Rows of roles, mesh axis, mean hops, share of ring steps over the network, and number of
    steps that share the busiest link. Roles with equal rings share rows.

    Args:
      rings: by role and axis ``hops``, ``network`` and ``busiest``.
    """
    roles: dict[Any, list[str]] = {}
    for role, axes in rings.items():
        key = tuple((axis, *sorted(found.items())) for axis, found in axes.items())
        roles.setdefault(key, []).append(role)
    rows: list[tuple[str, ...]] = []
    for names in roles.values():
        for number, (axis, found) in enumerate(rings[names[0]].items()):
            network = f"{100 * found['network']:.0f} %" if found["network"] else ""
            hops = f"{found['hops']:.2f}" if found["network"] < 1 else ""
            label = ", ".join(names) if number == 0 else ""
            rows.append((label, axis, hops, network, str(found["busiest"])))
    return rows


def ring_table(rings: Mapping[str, Mapping[str, Mapping[str, float]]], title: str = "") -> Any:
    """A rich table of ``ring_rows``."""
    figures = ("hops in its rings", "over the network", "busiest link")
    return rows_table(("roles", "mesh axis", *figures), ring_rows(rings), figures, title)
