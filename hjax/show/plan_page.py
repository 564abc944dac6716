"""A plan to look at: tables, a Gantt chart of one step and memory bars, on a terminal or a page."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.show.charts import escape, timeline
from hjax.show.format import count, seconds, size
from hjax.show.memory_table import flops

# Of a step, in their order.
STAGES = ("generation", "preparation", "learning")
COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
_WIDTH = 72  # characters of a Gantt row
_BAR = 30


def show(plan: Mapping[str, Any], console: Any) -> None:
    """Print a described plan: layouts, the Gantt chart, memory, runners-up, constants."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    taken = plan["seconds"]
    console.print(
        Text(f"{plan['algorithm']} on {plan['cluster']}", style="bold"),
        f" a step takes {seconds(taken['total'])}, {count(plan['tokens_per_second'])} tokens/s",
        sep=" ",
    )
    if plan["needs"]:
        console.print(Text(_needs(plan), style="yellow"))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("devices", "role", "model", "train p-t-d", "generate p-t", "axes"):
        table.add_column(name)
    for name in (*STAGES, "resident", "needs"):
        table.add_column(name, justify="right")
    for number, roles in enumerate(plan["placement"]):
        for i, role in enumerate(roles):
            table.add_row(*_row(plan, number, role, first=i == 0))
    console.print(table)
    console.print(_gantt(plan))
    console.print(_memory(plan))
    console.print(_candidates(plan))
    if "compiled" in plan:
        console.print(_compiled(plan["compiled"]))
    measured = plan["origins"]["seconds"].startswith("measured")
    origin = "measured on this machine" if measured else "assumed (docs/auto_mapping.md)"
    console.print(
        f"seconds: from constants {origin}; bytes: {_bytes_origin(plan)}; hardware: data sheets. "
        f"Searched in {plan['search_seconds']:.2f} s.",
        style="dim",
    )


def _needs(plan: Mapping[str, Any]) -> str:
    """One line: what hjax does not do of what the plan rests on."""
    *most, last = plan["needs"]
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"This plan needs {listed}, which hjax does not do."


def _row(plan: Mapping[str, Any], number: int, role: str, first: bool) -> list[str]:
    train, generate = (plan["parallelism"][role].get(s) for s in ("train", "generate"))
    axes = ", ".join(f"{a} {n}" for a, n in plan["layouts"][role]["train"].items())
    times = plan["role_seconds"][role]
    return [
        f"{plan['allocation'][number]}" if first else "",
        role,
        plan["models"][role],
        "-".join(map(str, train)),
        "-".join(map(str, generate)) if generate else "",
        axes,
        *(seconds(times[s]) if times[s] else "" for s in STAGES),
        size(plan["resident_bytes"][role]),
        size(plan["memory_bytes"][role]),
    ]


def spans(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What runs when: ``row`` (set), ``role``, ``stage``, ``start`` and ``length`` in seconds."""
    found, start = [], 0.0
    for stage in STAGES:
        longest = 0.0
        for row, roles in enumerate(plan["placement"]):
            at = start
            for role in roles:
                length = plan["role_seconds"][role][stage]
                if length:
                    found.append(
                        {"row": row, "role": role, "stage": stage, "start": at, "length": length}
                    )
                at += length
            longest = max(longest, at - start)
        # Simulated devices share cores: a stage may last longer than its slowest set.
        moved = plan["seconds"]["transition"] if stage == STAGES[0] else 0.0
        start += max(longest, plan["seconds"][stage] + moved)
    return found


def _names(plan: Mapping[str, Any]) -> list[str]:
    return [f"{'+'.join(roles)} ({n})" for roles, n in zip(plan["placement"], plan["allocation"])]


def _roles(plan: Mapping[str, Any]) -> list[str]:
    return [role for roles in plan["placement"] for role in roles]


def _gantt(plan: Mapping[str, Any]) -> Any:
    from rich.text import Text

    total, roles = plan["seconds"]["total"], _roles(plan)
    scale = _WIDTH / total if total else 0.0
    drawn = Text("one step\n", style="bold")
    for row in range(len(plan["placement"])):
        cells = [(" ", "")] * _WIDTH
        for span in (s for s in spans(plan) if s["row"] == row):
            left = int(span["start"] * scale)
            right = max(left + 1, int((span["start"] + span["length"]) * scale))
            label = f"{span['role']} {span['stage'][:5]}"[: right - left].ljust(right - left)
            style = f"black on {COLORS[roles.index(span['role']) % len(COLORS)]}"
            for i, letter in enumerate(label):
                if left + i < _WIDTH:
                    cells[left + i] = (letter, style)
        drawn.append(f"{plan['allocation'][row]:>6} ")
        for letter, style in cells:
            drawn.append(letter, style=style)
        drawn.append("\n")
    left_label, right_label = "0 s", seconds(total)
    room = _WIDTH - len(left_label) - len(right_label)
    drawn.append(f"{'':>6} {left_label}{'':>{max(room, 1)}}{right_label}\n", style="dim")
    return drawn


def _memory(plan: Mapping[str, Any]) -> Any:
    from rich.text import Text

    drawn = Text("memory per device\n", style="bold")
    roles = _roles(plan)
    for names, needed, usable in zip(
        plan["placement"], plan["set_memory_bytes"], plan["usable_bytes"]
    ):
        used = 0
        drawn.append("       ")
        for role in names:
            cells = round(_BAR * plan["resident_bytes"][role] / usable)
            drawn.append("█" * cells, style=COLORS[roles.index(role) % len(COLORS)])
            used += cells
        working = max(0, round(_BAR * needed / usable) - used)
        drawn.append("▒" * working + "·" * max(0, _BAR - used - working))
        drawn.append(f" {size(needed)} of {size(usable)}  {'+'.join(names)}\n")
    drawn.append("       █ resident, by role  ▒ most at work  · free\n", style="dim")
    return drawn


def _candidates(plan: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title="candidates", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("placement")
    table.add_column("why")
    for candidate in plan["candidates"]:
        table.add_row(
            seconds(candidate["seconds"]), " | ".join(_names(candidate)), candidate["reason"]
        )
    left = f"{plan['slower']} slower, {len(plan['impossible'])} do not fit"
    table.add_row("", f"other placements: {left}", "")
    return table


def _bytes_origin(plan: Mapping[str, Any]) -> str:
    if "compiled" not in plan:
        return "assumed, from formulas"
    versions = plan["compiled"]["versions"].items()
    return f"compiled, by {', '.join(f'{name} {version}' for name, version in versions)}"


COMPILED = ("program", "runs", "bytes by formula", "bytes compiled", "FLOPs", "received",
            "roofline a run")  # fmt: skip


def _compiled_rows(compiled: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            f"{row['role']}.{row['program']}",
            str(row["runs"]),
            "" if row["predicted_bytes"] is None else size(row["predicted_bytes"]),
            size(row["compiled_bytes"]),
            flops(row["flops"]) if row["flops"] else "",
            size(row["received_bytes"]),
            seconds(row["roofline_seconds"]),
        ]
        for row in compiled["programs"]
    ]


def _compiled(compiled: Mapping[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    title = f"compiled for {compiled['topology']}, devices of {size(compiled['memory_bytes'])}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left")
    for name in COMPILED:
        table.add_column(name, justify="left" if name == "program" else "right")
    for row in _compiled_rows(compiled):
        table.add_row(*row)
    return table


def page(plan: Mapping[str, Any]) -> str:
    """A self-contained HTML page of a described plan."""
    roles = _roles(plan)
    taken = plan["seconds"]
    head = (
        f"<header><h1>{escape(plan['algorithm'])} on {escape(plan['cluster'])}</h1><p>a step takes "
        f"{seconds(taken['total'])} · {count(plan['tokens_per_second'])} tokens/s</p></header>"
    )
    drawn = [
        {
            "row": s["row"],
            "start": s["start"],
            "length": s["length"],
            "color": roles.index(s["role"]) % 8,
            "names": [f"{s['role']} {s['stage']}", s["role"]],
            "title": f"{s['role']}\n{s['stage']}\n{seconds(s['length'])}",
        }
        for s in spans(plan)
    ]
    chart = timeline(_names(plan), drawn, _marks(plan))
    rows = [
        _row(plan, number, role, first=i == 0)
        for number, names in enumerate(plan["placement"])
        for i, role in enumerate(names)
    ]
    titles = ("devices", "role", "model", "train p-t-d", "generate p-t", "axes", *STAGES,
              "resident", "needs")  # fmt: skip
    candidates = [
        [seconds(c["seconds"]), " | ".join(_names(c)), c["reason"]] for c in plan["candidates"]
    ]
    body = [
        head,
        *([f"<p>{escape(_needs(plan))}</p>"] if plan["needs"] else []),
        "<h2>Who runs where</h2>",
        _table(titles, rows),
        "<h2>One step</h2>",
        f'<div class="card">{chart}</div>',
        "<h2>Memory per device</h2>",
        f'<div class="card">{_memory_svg(plan, roles)}</div>',
        "<h2>Candidates</h2>",
        _table(("step", "placement", "why"), candidates),
        *_compiled_html(plan),
        f"<footer>seconds: {escape(plan['origins']['seconds'])}; bytes: "
        f"{escape(plan['origins']['memory_bytes'])}. Written by hjax.</footer>",
    ]
    colors = "".join(
        f"svg .fill.c{i} {{ fill: var(--c{i}); }} .swatch.c{i} {{ background: var(--c{i}); }}\n"
        for i in range(8)
    )
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(
        title=escape(f"plan · {plan['algorithm']}"), colors=colors, body="\n".join(body)
    )


def _compiled_html(plan: Mapping[str, Any]) -> list[str]:
    if "compiled" not in plan:
        return []
    title = f"<h2>Compiled for {escape(plan['compiled']['topology'])}</h2>"
    return [title, _table(COMPILED, _compiled_rows(plan["compiled"]))]


def _marks(plan: Mapping[str, Any]) -> list[tuple[float, str]]:
    taken = plan["seconds"]
    generation = taken["generation"] + taken["transition"]
    starts = (0.0, generation, generation + taken["preparation"])
    return list(zip(starts, STAGES))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(t)}</th>" for t in titles)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _memory_svg(plan: Mapping[str, Any], roles: Sequence[str]) -> str:
    parts = []
    rows = zip(plan["placement"], plan["set_memory_bytes"], plan["usable_bytes"])
    for number, (names, needed, usable) in enumerate(rows):
        y, x = number * 36, 0.0
        parts.append(f'<rect class="lane" x="0" y="{y}" width="700" height="26" rx="4"/>')
        for role in names:
            width = 700 * plan["resident_bytes"][role] / usable
            title = f"{role}: {size(plan['resident_bytes'][role])}"
            parts.append(
                f'<rect class="fill c{roles.index(role) % 8}" x="{x:.1f}" y="{y}" '
                f'width="{width:.1f}" height="26"><title>{escape(title)}</title></rect>'
            )
            x += width
        peak = 700 * needed / usable
        parts.append(
            f'<rect class="fill c7" opacity="0.5" x="{x:.1f}" y="{y}" '
            f'width="{max(0.0, peak - x):.1f}" height="26"><title>at work</title></rect>'
        )
        label = f"{size(needed)} of {size(usable)} · {'+'.join(names)}"
        parts.append(f'<text class="tick" x="710" y="{y + 17}">{escape(label)}</text>')
    height = 36 * len(plan["placement"])
    return f'<svg viewBox="0 0 1000 {height}">{"".join(parts)}</svg>'
