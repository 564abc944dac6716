"""A plan on a terminal: tables, a Gantt chart of one step and memory bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.show.format import count, duration, size
from hjax.show.plan_rows import (
    CANDIDATE_COLUMNS,
    COMPILED_COLUMNS,
    ROLE_FIGURES,
    ROLE_TEXTS,
    STAGE_COLUMNS,
    PlanRecord,
    candidate_rows,
    compiled_rows,
    remarks,
    role_rows,
    roles_of,
    spans,
    stage_rows,
)
from hjax.show.tables import rows_table

COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
_GANTT_WIDTH = 72  # characters
_BAR_WIDTH = 30


def print_plan(plan: PlanRecord, console: Any, roofline: bool = False) -> None:
    """Print a described plan: layouts, the Gantt chart, memory, runners-up, constants.

    ``roofline``: of a compiled plan how long its stages take by data sheet too.
    """
    from rich.text import Text

    taken = plan["seconds"]
    console.print(
        Text(f"{plan['algorithm']} on {plan['cluster']}", style="bold"),
        f" a step takes {duration(taken['total'])}, {count(plan['tokens_per_second'])} tokens/s",
        sep=" ",
    )
    for line in remarks(plan):
        console.print(Text(line, style="yellow"))
    console.print(rows_table([*ROLE_TEXTS, *ROLE_FIGURES], role_rows(plan), right=ROLE_FIGURES))
    console.print(_gantt(plan))
    console.print(_memory(plan))
    left = f"{plan['slower']} slower, {len(plan['impossible'])} do not fit"
    rows = [*candidate_rows(plan), ["", f"other placements: {left}", ""]]
    console.print(rows_table(CANDIDATE_COLUMNS, rows, right=("step",), title="candidates"))
    if "compiled" in plan:
        memory = size(plan["compiled"]["memory_bytes"])
        title = f"compiled for {plan['compiled']['topology']}, devices of {memory}"
        rows = compiled_rows(plan)
        console.print(rows_table(COMPILED_COLUMNS, rows, right=COMPILED_COLUMNS[1:], title=title))
        if roofline:
            title = "a step's stages: the plan's seconds, and those that the programs say"
            rows = stage_rows(plan)
            console.print(rows_table(STAGE_COLUMNS, rows, right=STAGE_COLUMNS[2:], title=title))
    measured = plan["origins"]["seconds"].startswith("measured")
    origin = "measured" if measured else "assumed (docs/auto_mapping.md)"
    where = [text for text in plan["origins"]["hardware"] if text.startswith("measured")]
    console.print(
        f"seconds: from constants {origin}; bytes: {_bytes_origin(plan)}; hardware: "
        f"{'; '.join(where) or 'data sheets'}. Searched in {plan['search_seconds']:.2f} s.",
        style="dim",
    )


def _gantt(plan: PlanRecord) -> Any:
    from rich.text import Text

    total, roles = plan["seconds"]["total"], roles_of(plan)
    scale = _GANTT_WIDTH / total if total else 0.0
    drawn = Text("one step\n", style="bold")
    for row in range(len(plan["placement"])):
        cells = [(" ", "")] * _GANTT_WIDTH
        for span in (s for s in spans(plan) if s["row"] == row):
            left = int(span["start"] * scale)
            right = max(left + 1, int((span["start"] + span["length"]) * scale))
            text = f"{span['role']} {span['stage'][:5]}"[: right - left].ljust(right - left)
            style = _style(roles, span["role"], "black on ")
            for i, letter in enumerate(text):
                if left + i < _GANTT_WIDTH:
                    cells[left + i] = (letter, style)
        drawn.append(f"{plan['allocation'][row]:>6} ")
        for letter, style in cells:
            drawn.append(letter, style=style)
        drawn.append("\n")
    begin, end = "0 s", duration(total)
    room = _GANTT_WIDTH - len(begin) - len(end)
    drawn.append(f"{'':>6} {begin}{'':>{max(room, 1)}}{end}\n", style="dim")
    return drawn


def _style(roles: Sequence[str], role: str, prefix: str = "") -> str:
    return prefix + COLORS[roles.index(role) % len(COLORS)]


def _memory(plan: PlanRecord) -> Any:
    from rich.text import Text

    drawn = Text("memory per device\n", style="bold")
    roles = roles_of(plan)
    for names, needed, usable in zip(
        plan["placement"], plan["set_memory_bytes"], plan["usable_bytes"]
    ):
        used = 0
        drawn.append("       ")
        for role in names:
            cells = round(_BAR_WIDTH * plan["resident_bytes"][role] / usable)
            drawn.append("█" * cells, style=_style(roles, role))
            used += cells
        working = max(0, round(_BAR_WIDTH * needed / usable) - used)
        drawn.append("▒" * working + "·" * max(0, _BAR_WIDTH - used - working))
        drawn.append(f" {size(needed)} of {size(usable)}  {'+'.join(names)}\n")
    drawn.append("       █ resident, by role  ▒ most at work  · free\n", style="dim")
    return drawn


def _bytes_origin(plan: Mapping[str, Any]) -> str:
    if "compiled" not in plan:
        return "assumed, from formulas"
    versions = plan["compiled"]["versions"].items()
    return f"compiled, by {', '.join(f'{name} {version}' for name, version in versions)}"


def seconds_table(found: Mapping[str, Any]) -> Any:
    """A rich table of the calls of a run.

    Args:
      found: of ``hjax.planning.learning.record``.
    """
    columns = ("role", "stage", "calls", "predicted", "measured", "ratio")
    rows = []
    for call in found["calls"]:
        seconds = [duration(call[key]) for key in ("predicted", "measured")]
        row = call["role"], call["stage"], ", ".join(call["methods"]), *seconds
        rows.append((*row, f"{call['ratio']:.2f}"))
    return rows_table(columns, rows, right=columns[3:])
