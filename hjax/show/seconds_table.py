"""Predicted and measured seconds of a run's calls, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.show.format import duration


def seconds_table(found: Mapping[str, Any]) -> Any:
    """A rich table of the calls of a run.

    Args:
      found: of ``hjax.planning.learning.record``.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("role", "stage", "calls", "predicted", "measured", "ratio"):
        table.add_column(name, justify="left" if name in ("role", "stage", "calls") else "right")
    for call in found["calls"]:
        seconds = [duration(call[key]) for key in ("predicted", "measured")]
        row = call["role"], call["stage"], ", ".join(call["methods"]), *seconds
        table.add_row(*map(Text, (*row, f"{call['ratio']:.2f}")))
    return table
