"""How long a step's programs take by data sheet, what bounds them, and where the time goes.

    python benchmarks/roofline.py --config=NAME.py --topology=KIND:SIZES [--json] [--nocache]
                                  [--optimization=O0] [--config.a.b=VALUE ...]

Takes the flags of ``python -m hjax.launch.compile``, does what it does, and reads the optimised
programs once more: of each its seconds by bandwidths and peaks, what bounds it, how far it is from
the least it has to do, which lines cost most (docs/compile.md#how-long-by-data-sheet). Of a config
whose placement is a plan (``hjax.launch.plan --output=DIR`` writes both) the plan's seconds stand
beside them, by role and stage. With ``--json`` each of ``programs`` has ``roofline``, ``minimum``,
``mfu`` and ``tokens_per_second`` too, ``step`` has ``predicted_seconds``, and ``stages`` are a
plan's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hjax.dryrun.topologies import prepare_environment
from hjax.launch.command import run_or_help
from hjax.launch.compile import parse, report
from hjax.launch.process_exit import run_and_exit
from hjax.show.format import seconds
from hjax.show.tables import wide_console


def costs(asked: Any, console: Any) -> dict[str, Any]:
    """What ``hjax.launch.compile --json`` says of a step, and what its programs cost."""
    from program_costs.account import READER, beside_minimum, limits_of
    from program_costs.tables import stage_rows

    from hjax.dryrun.compilation import mesh_devices
    from hjax.dryrun.step import compile_prepared, prepare_step

    step = prepare_step(asked)
    description = compile_prepared(step, console, READER)
    records = description["programs"]
    for record, program in zip(records, step.programs, strict=True):
        limits = limits_of(step.topology, mesh_devices(step.rehearsal, program.role))
        if record.get("roofline") and limits is not None:
            worker = step.rehearsal.workers[program.role]
            record |= beside_minimum(record, program, worker, step.prompt_length, limits)
    if all(record.get("roofline") for record in records):
        total = sum(r["roofline"]["seconds"] * r["runs"] for r in records)
        description["step"]["predicted_seconds"] = total
    placement = str(asked.config.placement)
    if placement.endswith(".json"):
        plan = json.loads(Path(placement).read_text())
        if "role_seconds" in plan:  # one that was searched for, not written by hand
            description["stages"] = stage_rows(plan, records)
    return description


def show(description: dict[str, Any], console: Any) -> None:
    """Print how long the programs take by data sheet, and where."""
    from program_costs.tables import costliest_table, roofline_table, stage_table

    records = [record for record in description["programs"] if record.get("roofline")]
    if not records:
        console.print(f"no data sheet of {description['topology']['device_kind']}: no roofline")
        return
    console.print(roofline_table(records))
    for record in sorted(records, key=lambda r: -r["roofline"]["seconds"] * r["runs"])[:3]:
        console.print(costliest_table(record))
    if opaque := sorted({name for r in records for name in r["roofline"]["opaque"]}):
        console.print(f"kernels that do not say what they multiply: {', '.join(opaque[:5])}")
    if total := description["step"].get("predicted_seconds"):
        console.print(
            f"a step's programs, one after another, by data sheet: {seconds(total)}; what kernels "
            "lose within themselves, launches and the host are not in it"
        )
    if stages := description.get("stages"):
        console.print(stage_table(stages))


def main() -> int:
    def run(arguments: list[str]) -> int:
        prepare_environment()  # before JAX is imported
        asked, as_json = parse(arguments)
        console = wide_console()
        description = costs(asked, console)
        show(description, console)
        return report(asked, description, as_json, console)

    return run_or_help(None, lambda: str(__doc__), run)


if __name__ == "__main__":
    run_and_exit(main)
