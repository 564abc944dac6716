"""A described plan (planning.result) as rows of text, for a terminal and for a page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.roles import STAGES
from hjax.show.format import count, duration, flop_count, size
from hjax.show.tables import rows_table

PlanRecord = Mapping[str, Any]
# Titles of the columns of the rows below.
ROLE_TEXTS = ("devices", "role", "model", "train p-t-d", "generate p-t", "axes", "settings")
ROLE_FIGURES = (*STAGES, "resident", "needs")
CANDIDATE_COLUMNS = ("step", "placement", "why")
COMPILED_COLUMNS = (
    "program", "runs", "bytes by formula", "bytes compiled", "FLOPs", "received", "by data sheet",
)  # fmt: skip
STAGE_COLUMNS = ("stage", "role", "by the plan", "by data sheet", "ratio", "bound", "MFU")


def roles_of(plan: PlanRecord) -> list[str]:
    """All roles, set by set."""
    return [role for roles in plan["placement"] for role in roles]


def set_names(plan: PlanRecord, kinds: bool = False) -> list[str]:
    """`actor+reference (8)`, of a plan or a candidate: who shares how many devices, and with
    ``kinds`` of which."""
    places = zip(plan["placement"], plan["allocation"], plan["pools"])
    return [
        f"{'+'.join(roles)} ({n}{f' of {pool}' if kinds else ''})" for roles, n, pool in places
    ]


def _several(plan: PlanRecord) -> bool:
    """Whether the cluster has several pools of devices."""
    return "+" in plan["cluster"]


def remarks(plan: PlanRecord) -> list[str]:
    """What stands above the tables: why a run does not take the plan as it is, a line each."""
    lines = (_needs_text(plan), _only_compiles_text(plan), _kinds_text(plan))
    return [line for line in lines if line]


def _needs_text(plan: PlanRecord) -> str:
    """One line: what hjax does not do of what the plan rests on; empty where it does it all."""
    if not plan["needs"]:
        return ""
    return f"This plan needs {_listed(plan['needs'])}, which hjax does not do."


def _only_compiles_text(plan: PlanRecord) -> str:
    """One line: why hjax compiles the plan and does not run it; empty where it does."""
    if not plan["only_compiles"]:
        return ""
    return (
        f"hjax compiles this plan and does not run it: {_listed(plan['only_compiles'])}; a set's "
        "processes take all hosts of one slice, and no plan of such sets fits."
    )


def _kinds_text(plan: PlanRecord) -> str:
    """One line: what a run must be told of sets on different devices; empty where all are alike."""
    if len(set(plan["kinds"])) == 1:
        return ""
    return (
        "Sets stand on different devices: before this plan runs, its plan.json must say in `where` "
        "which labels each set's hosts have (docs/cluster.md); placement=auto on the cluster "
        "itself knows them."
    )


def _listed(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)} and {last}" if most else last


def role_rows(plan: PlanRecord) -> list[list[str]]:
    """A row per role under ``ROLE_TEXTS`` and ``ROLE_FIGURES``; devices with a set's first."""
    rows = []
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
    return rows


def settings_text(plan: PlanRecord, role: str) -> str:
    """What the plan fixes of a role beside its layout, and in how many waves it decodes."""
    settings, words = plan["settings"][role], []
    if rows := settings.get("micro_batch"):
        words.append(f"micro_batch {rows}")
    if (policy := settings.get("remat", "none")) != "none":
        words.append(f"remat {policy}")
    if (away := settings["offload"]) != "none":
        words.append(f"offload {away}")
    waves = plan["waves"].get(role, 1)
    if slots := settings.get("slots"):
        words.append(f"slots {slots}")
    elif waves > 1:
        words.append(f"{waves} waves")
    return ", ".join(words)


def candidate_rows(plan: PlanRecord) -> list[list[str]]:
    """A row per candidate under ``CANDIDATE_COLUMNS``."""
    kinds = _several(plan)
    return [
        [duration(c["seconds"]), " | ".join(set_names(c, kinds)), c["reason"]]
        for c in plan["candidates"]
    ]


def compiled_rows(plan: PlanRecord) -> list[list[str]]:
    """A row per compiled program under ``COMPILED_COLUMNS``; none where nothing was compiled."""
    if "compiled" not in plan:
        return []
    return [
        [
            f"{row['role']}.{row['program']}",
            str(row["runs"]),
            "" if row["predicted_bytes"] is None else size(row["predicted_bytes"]),
            size(row["compiled_bytes"]),
            flop_count(row["flops"]) if row["flops"] else "",
            size(row["received_bytes"]),
            _seconds(row["roofline_seconds"]),
        ]
        for row in plan["compiled"]["programs"]
    ]


def stage_rows(plan: PlanRecord) -> list[list[str]]:
    """A row per role and stage under ``STAGE_COLUMNS``: the planner's seconds beside those of the
    compiled programs by data sheet."""
    stages = plan["compiled"]["stages"]
    rows = []
    for row in stages:
        planned, found = row["planned_seconds"], row["roofline_seconds"]
        ratio = f"{planned / found:.2f}" if found else ""
        mfu = f"{row['mfu']:.0%}" if row["mfu"] else ""
        texts = [row["stage"], row["role"], duration(planned), _seconds(found), ratio]
        rows.append([*texts, row["bound"] or "", mfu])
    return rows


def _seconds(found: float | None) -> str:
    return "" if found is None else duration(found)


def spans(plan: PlanRecord) -> list[dict[str, Any]]:
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
