"""Tables of ``benchmarks/roofline.py``: how long programs take by data sheet, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.dryrun.plan_programs import STAGE
from hjax.dryrun.programs import phase_of
from hjax.roles import STAGES
from hjax.show.format import duration, flop_count, seconds, size
from hjax.show.memory_table import grouped, name_of
from hjax.show.tables import rows_table

STAGE_COLUMNS = ("stage", "role", "by the plan", "by data sheet", "ratio", "bound", "MFU")


def roofline_table(records: Sequence[Mapping[str, Any]]) -> Any:
    """A row per program: how long it takes by data sheet, what bounds it, beside its minimum.

    Args:
      records: of ``compile_program``, those with a ``roofline``.
    """
    figures = ("predicted", "minimum", "bound", "MFU", "tokens/s", "memory", "FLOPs", "received",
               "of it waited for")  # fmt: skip
    rows = []
    for group in grouped(records):
        found = [record["roofline"] for record in group]
        total = {key: sum(each[key] for each in found) for key in SUMMED}
        least = [record["minimum"] for record in group if record.get("minimum")]
        mfu, rate = group[0].get("mfu"), group[0].get("tokens_per_second")
        received = total["received_bytes"]
        waited = f"{total['synchronous_bytes'] / received:.0%}" if received else ""
        row = (
            name_of(group),
            seconds(total["seconds"]),
            seconds(sum(each["seconds"] for each in least)) if least else "",
            max(found, key=lambda each: each["seconds"])["bound"],
            f"{mfu:.1%}" if mfu else "",
            f"{rate:,.0f}" if rate else "",
            _of(total["bytes"], least, "bytes", size),
            _of(total["flops"], least, "flops", flop_count),
            _of(received, least, "received_bytes", size) if received else "",
            waited,
        )
        rows.append(row)
    return rows_table(("program", *figures), rows, right=figures)


SUMMED = ("seconds", "bytes", "flops", "received_bytes", "synchronous_bytes")


def _of(found: float, least: Sequence[Mapping[str, float]], key: str, told: Any) -> str:
    """An amount, and how many times its minimum that is."""
    floor = sum(each[key] for each in least)
    return f"{told(found)} ({found / floor:.2f}×)" if floor else told(found)


def costliest_table(record: Mapping[str, Any]) -> Any:
    """The lines of source on which a program spends most of its time."""
    figures = ("seconds", "share", "runs", "memory", "FLOPs", "received")
    rows = []
    total = record["roofline"]["seconds"] or 1.0
    for line in record["roofline"]["costliest"]:
        row = (
            short(line["source"]) or line["name"],
            seconds(line["seconds"]),
            f"{line['seconds'] / total:.0%}",
            f"{line['times']:,.0f}",
            size(line["bytes"]) if line["bytes"] else "",
            flop_count(line["flops"]) if line["flops"] else "",
            size(line["received_bytes"]) if line["received_bytes"] else "",
        )
        rows.append(row)
    return rows_table(("line", *figures), rows, right=figures, title=name_of([record]))


def short(source: str) -> str:
    """A place as people know it: from the package's folder on, else the file alone."""
    path, _, line = source.rpartition(":")
    parts = Path(path).parts
    if "hjax" in parts:
        at = len(parts) - 1 - parts[::-1].index("hjax")
        return f"{'/'.join(parts[at:])}:{line}"
    return f"{Path(path).name}:{line}" if path else source


def stage_rows(
    plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What the planner's formulas say of each role's stages beside the compiled programs.

    Args:
      plan: as ``hjax.launch.plan --output`` writes it.
      records: of its programs, with ``roofline`` and ``mfu``.

    Returns:
      rows of ``role``, ``stage`` (or ``transition``), ``planned_seconds`` of a step, and by data
      sheet, from the programs' own text: ``roofline_seconds``, ``bound``, ``mfu``; these are None
      where a program has no account.
    """
    rows = []
    for role, planned in plan["role_seconds"].items():
        mine = [record for record in records if record["role"] == role]
        moves = [record for record in mine if record["program"].startswith("transition")]
        if moves:
            rows.append(_stage_row(role, "transition", plan["seconds"]["transition"], moves))
        for stage in STAGES:
            others = [record for record in mine if record not in moves]
            of_stage = [r for r in others if STAGE[phase_of(r["program"])] == stage]
            if of_stage:
                rows.append(_stage_row(role, stage, planned[stage], of_stage))
    return rows


def _stage_row(
    role: str, stage: str, planned: float, records: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    row = {"role": role, "stage": stage, "planned_seconds": planned}
    if not all(record.get("roofline") for record in records):
        return {**row, "roofline_seconds": None, "bound": None, "mfu": None}
    taken = [record["runs"] * record["roofline"]["seconds"] for record in records]
    total = sum(taken)
    longest = records[taken.index(max(taken))]
    used = [(t, record.get("mfu")) for t, record in zip(taken, records, strict=True)]
    known = [t * mfu for t, mfu in used if mfu is not None]
    mfu = sum(known) / total if total and len(known) == len(used) else None
    bound = longest["roofline"]["bound"]
    return {**row, "roofline_seconds": total, "bound": bound, "mfu": mfu}


def stage_table(stages: Sequence[Mapping[str, Any]]) -> Any:
    """A row per role and stage: the planner's seconds beside those by data sheet."""
    rows = []
    for row in stages:
        planned, found = row["planned_seconds"], row["roofline_seconds"]
        ratio = f"{planned / found:.2f}" if found else ""
        sheet = "" if found is None else duration(found)
        mfu = f"{row['mfu']:.0%}" if row["mfu"] else ""
        texts = [row["stage"], row["role"], duration(planned), sheet, ratio]
        rows.append([*texts, row["bound"] or "", mfu])
    title = "a step's stages: the plan's seconds, and those that the programs say"
    return rows_table(STAGE_COLUMNS, rows, right=STAGE_COLUMNS[2:], title=title)
