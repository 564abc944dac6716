"""Tables of a nested description in a terminal, such as that of `--dry_run`."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hjax.show.format import count, size


def print_description(
    description: Mapping[str, Any], title: str = "", stream: TextIO | None = None
) -> None:
    """Print a dict of sections, each a value, a dict, a dict of dicts, or a list of dicts.

    A key (or its section's) that ends in `bytes` is shown in KiB, MiB or GiB; underscores in
    names become blanks.
    """
    console = wide_console(stream)
    if title:
        console.print(Text(title, style="bold"))
    scalars = {k: v for k, v in description.items() if not _is_section(v)}
    if scalars:
        console.print(_pairs(scalars, ""))
    for name, section in description.items():
        if _is_section(section):
            console.print()
            console.print(Text(_words(name), style="bold"))
            console.print(_section(section, name))


def rows_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[str] = (),
    title: str = "",
) -> Any:
    """A rich table of texts; columns in ``right`` are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def wide_console(stream: TextIO | None = None) -> Any:
    """A rich console; 160 columns wide if the output is not a terminal."""
    stream = stream or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 160)


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)
    )


def _section(section: Any, name: str) -> Any:
    if isinstance(section, Mapping):
        if section and all(isinstance(v, Mapping) for v in section.values()):
            return _rows([{"": key, **row} for key, row in section.items()], name)
        return _pairs(section, name)
    return _rows(section, name)


def _pairs(pairs: Mapping[str, Any], unit: str) -> Any:
    grid = Table.grid(padding=(0, 2))
    for key, value in pairs.items():
        text = _value(value, key if key.endswith("bytes") else unit)
        grid.add_row(Text("  " + _words(key)), Text(text))
    return grid


def _rows(rows: Sequence[Mapping[str, Any]], unit: str) -> Any:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        side: Any = "right" if numeric else "left"
        table.add_column(_words(column), justify=side, overflow="fold")
    for row in rows:
        cells = [
            Text(_value(row[c], c if c.endswith("bytes") else unit) if c in row else "")
            for c in columns
        ]
        table.add_row(*cells)
    return table


def _value(value: Any, unit: str) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v, unit)}" for k, v in value.items()) or "–"
    if isinstance(value, (list, tuple)):
        return ", ".join(_value(v, unit) for v in value) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, (int, float)) and unit.endswith("bytes"):
        return size(value)
    if isinstance(value, int):
        return f"{value:,}" if value < 10**7 else f"{value:,} ({count(value)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
