"""A described plan (planning.result) as rows of text, for a terminal and for a page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hjax.roles import STAGES
from hjax.show.format import duration, flop_count, size

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
