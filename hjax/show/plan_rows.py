"""Plans (``planning.result``) as terminal tables and as a self-contained HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.text import Text

from hjax.roles import STAGES
from hjax.show import pages
from hjax.show.charts import timeline
from hjax.show.format import count, duration, flop_count, size
from hjax.show.tables import rows_table

PlanRecord = Mapping[str, Any]


class PlanTable(NamedTuple):
    """A table: column titles, rows of texts, and the titles of numeric columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    figures: Sequence[str]

    def shown(self, title: str = "") -> Any:
        """The rich table, its numeric columns right-aligned."""
        return rows_table(self.columns, self.rows, right=self.figures, title=title)


def roles_of(plan: PlanRecord) -> list[str]:
    """All roles, set by set."""
    return [role for roles in plan["placement"] for role in roles]


def set_names(plan: PlanRecord, kinds: bool = False) -> list[str]:
    """Names of a plan's or candidate's sets, such as `actor+reference (8)`: roles and number of
    devices, with ``kinds`` also the pool."""
    places = zip(plan["placement"], plan["allocation"], plan["pools"])
    return [f"{'+'.join(roles)} ({n}{f' of {pool}' if kinds else ''})" for roles, n, pool in places]


def _several(plan: PlanRecord) -> bool:
    """Whether the cluster has several pools of devices."""
    return "+" in plan["cluster"]


def remarks(plan: PlanRecord) -> list[str]:
    """Lines above the tables: the reasons why a run cannot use the plan unchanged."""
    lines = []
    if plan["needs"]:
        lines.append(f"This plan needs {_listed(plan['needs'])}, which hjax does not do.")
    if plan["only_compiles"]:
        lines.append(
            f"hjax compiles this plan and does not run it: {_listed(plan['only_compiles'])}; a "
            "set's processes take all hosts of one slice, and no plan of such sets fits."
        )
    if len(set(plan["kinds"])) > 1:
        lines.append(
            "Sets stand on different devices: before this plan runs, its plan.json must say in "
            "`where` which labels each set's hosts have (docs/cluster.md); placement=auto on the "
            "cluster itself knows them."
        )
    return lines


def _listed(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def role_table(plan: PlanRecord) -> PlanTable:
    """A row per role; the first role of a set has the set's devices."""
    texts = ("devices", "role", "model", "train p-t-d", "generate p-t", "axes", "settings")
    figures, rows = (*STAGES, "resident", "needs"), []
    for roles, devices, pool in zip(plan["placement"], plan["allocation"], plan["pools"]):
        where = f"{devices} of {pool}" if _several(plan) else str(devices)
        for role in roles:
            sizes, times = plan["parallelism"][role], plan["role_seconds"][role]
            axes = plan["layouts"][role]["train"]
            rows.append(
                [
                    where if role == roles[0] else "",
                    role,
                    plan["models"][role],
                    "-".join(map(str, sizes["train"])),
                    "-".join(map(str, sizes.get("generate", ()))),
                    ", ".join(f"{axis} {n}" for axis, n in axes.items()),
                    settings_text(plan, role),
                    *(duration(times[stage]) if times[stage] else "" for stage in STAGES),
                    size(plan["resident_bytes"][role]),
                    size(plan["memory_bytes"][role]),
                ]
            )
    return PlanTable((*texts, *figures), rows, figures)


def settings_text(plan: PlanRecord, role: str) -> str:
    """A role's planned settings beside its layout, and its number of decoding waves."""
    settings, words = plan["settings"][role], []
    if rows := settings.get("micro_batch"):
        words.append(f"micro_batch {rows}")
    if (policy := settings.get("remat", "none")) != "none":
        words.append(f"remat {policy}")
    if (offload := settings["offload"]) != "none":
        words.append(f"offload {offload}")
    waves = plan["waves"].get(role, 1)
    if slots := settings.get("slots"):
        words.append(f"slots {slots}")
    elif waves > 1:
        words.append(f"{waves} waves")
    return ", ".join(words)


def candidate_table(plan: PlanRecord) -> PlanTable:
    """A row per candidate."""
    kinds = _several(plan)
    rows = [
        [duration(c["seconds"]), " | ".join(set_names(c, kinds)), c["reason"]]
        for c in plan["candidates"]
    ]
    return PlanTable(("step", "placement", "why"), rows, ("step",))


def compiled_table(plan: PlanRecord) -> PlanTable:
    """A row per program of a compiled plan."""
    figures = ("runs", "bytes by formula", "bytes compiled", "FLOPs", "received")
    rows = [
        [
            f"{row['role']}.{row['program']}",
            str(row["runs"]),
            "" if row["predicted_bytes"] is None else size(row["predicted_bytes"]),
            size(row["compiled_bytes"]),
            flop_count(row["flops"]) if row["flops"] else "",
            size(row["received_bytes"]),
        ]
        for row in plan["compiled"]["programs"]
    ]
    return PlanTable(("program", *figures), rows, figures)


def spans(plan: PlanRecord) -> list[dict[str, Any]]:
    """Timeline of a step: ``row`` (set), ``role``, ``stage``, ``start``, ``length`` in seconds."""
    found, start = [], 0.0
    for stage in STAGES:
        longest = 0.0
        for row, roles in enumerate(plan["placement"]):
            at = start
            for role in roles:
                length = plan["role_seconds"][role][stage]
                if length:
                    found.append(dict(row=row, role=role, stage=stage, start=at, length=length))
                at += length
            longest = max(longest, at - start)
        # Simulated devices share cores: a stage may last longer than its slowest set.
        moved = plan["seconds"]["transition"] if stage == STAGES[0] else 0.0
        start += max(longest, plan["seconds"][stage] + moved)
    return found


COLORS = ("cyan", "magenta", "green", "yellow", "blue", "red", "white")
_GANTT_WIDTH = 72  # characters
_BAR_WIDTH = 30


def print_plan(plan: PlanRecord, console: Any) -> None:
    """Print a described plan: layouts, the Gantt chart, memory, runners-up, constants."""
    taken = plan["seconds"]
    console.print(
        Text(f"{plan['algorithm']} on {plan['cluster']}", style="bold"),
        f" a step takes {duration(taken['total'])}, {count(plan['tokens_per_second'])} tokens/s",
        sep=" ",
    )
    for line in remarks(plan):
        console.print(Text(line, style="yellow"))
    console.print(role_table(plan).shown())
    console.print(_gantt(plan))
    console.print(_memory(plan))
    left = f"{plan['slower']} slower, {len(plan['impossible'])} do not fit"
    candidates = candidate_table(plan)
    rows = [*candidates.rows, ["", f"other placements: {left}", ""]]
    console.print(candidates._replace(rows=rows).shown("candidates"))
    if "compiled" in plan:
        memory = size(plan["compiled"]["memory_bytes"])
        title = f"compiled for {plan['compiled']['topology']}, devices of {memory}"
        console.print(compiled_table(plan).shown(title))
    measured = plan["origins"]["seconds"].startswith("measured")
    origin = "measured" if measured else "assumed (docs/auto_mapping.md)"
    where = [text for text in plan["origins"]["hardware"] if text.startswith("measured")]
    console.print(
        f"seconds: from constants {origin}; bytes: {_bytes_origin(plan)}; hardware: "
        f"{'; '.join(where) or 'data sheets'}. Searched in {plan['search_seconds']:.2f} s.",
        style="dim",
    )


def _gantt(plan: PlanRecord) -> Any:
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
    drawn = Text("memory per device\n", style="bold")
    roles = roles_of(plan)
    for names, needed, usable in _memory_of_sets(plan):
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
      found: of ``hjax.planning.profile_correction.correction_record``.
    """
    columns = ("role", "stage", "calls", "predicted", "measured", "ratio")
    rows = []
    for call in found["calls"]:
        seconds = [duration(call[key]) for key in ("predicted", "measured")]
        row = call["role"], call["stage"], ", ".join(call["methods"]), *seconds
        rows.append((*row, f"{call['ratio']:.2f}"))
    return rows_table(columns, rows, right=columns[3:])


_PAGE_BAR = 700  # of a device's memory, in the drawing's units
_AT_WORK = 7  # colour


def plan_page(plan: PlanRecord) -> str:
    """The page of a described plan: layouts, a timeline of one step, memory, runners-up."""
    tokens, compiled = f"{count(plan['tokens_per_second'])} tokens/s", "compiled" in plan
    return pages.render(
        "plan.jinja",
        name=f"plan · {plan['algorithm']}",
        title=f"{plan['algorithm']} on {plan['cluster']}",
        details=f"a step takes {duration(plan['seconds']['total'])} · {tokens}",
        remarks=remarks(plan),
        roles=role_table(plan),
        step=_one_step(plan),
        memory=_memory_bars(plan),
        candidates=candidate_table(plan),
        topology=plan["compiled"]["topology"] if compiled else "",
        compiled=compiled_table(plan) if compiled else None,
        origins=plan["origins"],
    )


def _one_step(plan: PlanRecord) -> Any:
    """The timeline of a step, a row per set of devices."""
    roles, taken = roles_of(plan), plan["seconds"]
    drawn = [
        span
        | {
            "color": roles.index(span["role"]) % pages.COLORS,
            "names": [f"{span['role']} {span['stage']}", span["role"]],
            "title": f"{span['role']}\n{span['stage']}\n{duration(span['length'])}",
        }
        for span in spans(plan)
    ]
    generation = taken["generation"] + taken["transition"]
    starts = (0.0, generation, generation + taken["preparation"])
    return timeline(set_names(plan), drawn, list(zip(starts, STAGES)))


def _memory_bars(plan: PlanRecord) -> list[dict[str, Any]]:
    """Per set: ``parts`` (resident bytes of each role, then transient ones) and a ``text``."""
    roles, resident, bars = roles_of(plan), plan["resident_bytes"], []
    for names, needed, usable in _memory_of_sets(plan):
        kept = [
            (f"{role}: {size(resident[role])}", resident[role], roles.index(role) % pages.COLORS)
            for role in names
        ]
        left = max(0, needed - sum(held for _, held, _ in kept))
        parts, x = [], 0.0
        for title, held, color in (*kept, ("at work", left, _AT_WORK)):
            width = _PAGE_BAR * held / usable
            at = {"x": round(x, 1), "width": round(width, 1)}
            parts.append(at | {"color": color, "title": title, "faint": title == "at work"})
            x += width
        text = f"{size(needed)} of {size(usable)} · {'+'.join(names)}"
        bars.append({"parts": parts, "text": text})
    return bars


def _memory_of_sets(plan: PlanRecord) -> Iterator[tuple[Sequence[str], float, float]]:
    """Per set: its roles, the bytes needed per device, and the usable bytes of a device."""
    return zip(plan["placement"], plan["set_memory_bytes"], plan["usable_bytes"])
