"""A plan as a self-contained HTML page."""

from __future__ import annotations

from typing import Any

from hjax.show.charts import timeline
from hjax.show.format import count, duration, size
from hjax.show.pages import COLORS, render
from hjax.show.plan_rows import (
    CANDIDATE_COLUMNS,
    COMPILED_COLUMNS,
    ROLE_FIGURES,
    ROLE_TEXTS,
    STAGE_COLUMNS,
    STAGES,
    PlanRecord,
    candidate_rows,
    compiled_rows,
    remarks,
    role_rows,
    roles_of,
    set_names,
    spans,
    stage_rows,
)

_BAR_WIDTH = 700  # of a device's memory, in the drawing's units
_AT_WORK = 7  # colour


def plan_page(plan: PlanRecord) -> str:
    """The page of a described plan: layouts, a timeline of one step, memory, runners-up."""
    tokens = f"{count(plan['tokens_per_second'])} tokens/s"
    return render(
        "plan.jinja",
        name=f"plan · {plan['algorithm']}",
        title=f"{plan['algorithm']} on {plan['cluster']}",
        details=f"a step takes {duration(plan['seconds']['total'])} · {tokens}",
        remarks=remarks(plan),
        role_columns=(*ROLE_TEXTS, *ROLE_FIGURES),
        roles=role_rows(plan),
        step=_one_step(plan),
        memory=_memory_bars(plan),
        candidate_columns=CANDIDATE_COLUMNS,
        candidates=candidate_rows(plan),
        topology=plan.get("compiled", {}).get("topology", ""),
        compiled_columns=COMPILED_COLUMNS,
        compiled=compiled_rows(plan),
        stage_columns=STAGE_COLUMNS,
        stages=stage_rows(plan) if "compiled" in plan else [],
        origins=plan["origins"],
    )


def _one_step(plan: PlanRecord) -> Any:
    """The timeline of a step, a row per set of devices."""
    roles, taken = roles_of(plan), plan["seconds"]
    drawn = [
        {
            "row": span["row"],
            "start": span["start"],
            "length": span["length"],
            "color": roles.index(span["role"]) % COLORS,
            "names": [f"{span['role']} {span['stage']}", span["role"]],
            "title": f"{span['role']}\n{span['stage']}\n{duration(span['length'])}",
        }
        for span in spans(plan)
    ]
    generation = taken["generation"] + taken["transition"]
    starts = (0.0, generation, generation + taken["preparation"])
    return timeline(set_names(plan), drawn, list(zip(starts, STAGES)))


def _memory_bars(plan: PlanRecord) -> list[dict[str, Any]]:
    """Per set: ``parts`` (what each role keeps, then what is used at work) and a ``text``."""
    roles, bars = roles_of(plan), []
    for names, needed, usable in zip(
        plan["placement"], plan["set_memory_bytes"], plan["usable_bytes"]
    ):
        parts, x = [], 0.0
        for role in names:
            resident = plan["resident_bytes"][role]
            width = _BAR_WIDTH * resident / usable
            parts.append(
                {
                    "x": round(x, 1),
                    "width": round(width, 1),
                    "color": roles.index(role) % COLORS,
                    "title": f"{role}: {size(resident)}",
                    "faint": False,
                }
            )
            x += width
        working = max(0.0, _BAR_WIDTH * needed / usable - x)
        parts.append(
            {
                "x": round(x, 1),
                "width": round(working, 1),
                "color": _AT_WORK,
                "title": "at work",
                "faint": True,
            }
        )
        text = f"{size(needed)} of {size(usable)} · {'+'.join(names)}"
        bars.append({"parts": parts, "text": text})
    return bars
