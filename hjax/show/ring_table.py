"""How far devices that exchange stand from each other, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ring_rows(rings: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """Rows of roles, mesh axis, mean hops, share of the steps over the network, and how many steps
    use the busiest link; roles whose meshes have the same rings share rows.

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
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title or None, title_justify="left")
    for name in ("roles", "mesh axis", "hops in its rings", "over the network", "busiest link"):
        table.add_column(name, justify="left" if name in ("roles", "mesh axis") else "right")
    for row in ring_rows(rings):
        table.add_row(*map(Text, row))
    return table
