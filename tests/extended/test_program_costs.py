"""`benchmarks/roofline.py`: a step's programs by data sheet, beside the least they have to do."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from program_costs.tables import stage_rows, stage_table
from rich.console import Console

COMMAND = pathlib.Path(__file__).parents[2] / "benchmarks" / "roofline.py"


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_small_step_is_what_the_compiler_and_a_calculation_by_hand_say(tmp_path):
    arguments = (
        "--config=ppo.py", "--topology=v5e:2x2", "--optimization=O0", "--json",
        "--config.model.layers=1", "--config.model.dtype=float32",
    )  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, str(COMMAND), *arguments],
        env={**environment, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    description = json.loads(done.stdout.splitlines()[-1])
    programs = {(p["role"], p["program"]): p for p in description["programs"]}
    update = programs["actor", "update"]
    # In its text products are convolutions.
    found, least = update["roofline"], update["minimum"]
    assert found["flops"] == pytest.approx(update["product_flops"], rel=0.02)
    assert found["received_bytes"] == update["received_bytes"]
    assert least["received_bytes"] == pytest.approx(update["received_bytes"], rel=0.01)
    decoder = 16 * 128 + 4 * 128**2 + 3 * 128 * 384 + 3 * 128
    assert least["bytes"] == pytest.approx(2 * 12 * decoder, rel=1e-3)  # and counters
    assert found["seconds"] == pytest.approx(
        found["memory_seconds"] + found["compute_seconds"] + found["network_seconds"]
    )
    assert found["seconds"] >= least["seconds"] and 0 < update["mfu"] < 1
    lines = [line["source"] for line in found["costliest"]]
    assert any("hjax/" in line for line in lines)
    assert description["step"]["predicted_seconds"] > 4 * found["seconds"]
    assert "a step's programs, one after another, by data sheet" in done.stdout
    assert description["fits"] and "are left" in done.stdout


def test_a_plan_s_seconds_stand_beside_those_of_its_programs():
    plan = {
        "seconds": {"transition": 0.5},
        "role_seconds": {"actor": {"generation": 3.0, "preparation": 1.0, "learning": 4.0}},
    }
    update = {
        "role": "actor", "program": "update", "runs": 4, "mfu": 0.5,
        "roofline": {"seconds": 2.0, "bound": "compute"},
    }  # fmt: skip
    records = [
        update,
        {**update, "program": "transition_0", "runs": 1, "mfu": None},
        {**update, "program": "compute_log_prob", "runs": 1, "roofline": None, "mfu": None},
    ]
    by_stage = {row["stage"]: row for row in stage_rows(plan, records)}
    assert set(by_stage) == {"transition", "preparation", "learning"}
    learning = by_stage["learning"]
    assert learning["roofline_seconds"] == 4 * 2.0 and learning["mfu"] == 0.5
    assert learning["planned_seconds"] == 4.0 and learning["bound"] == "compute"
    assert by_stage["transition"]["planned_seconds"] == 0.5
    assert by_stage["transition"]["mfu"] is None
    # A program without an account leaves its stage without one.
    assert by_stage["preparation"]["roofline_seconds"] is None
    console = Console(width=160)
    with console.capture() as shown:
        console.print(stage_table(list(by_stage.values())))
    (line,) = (x for x in shown.get().splitlines() if x.split()[:2] == ["learning", "actor"])
    assert "8.00 s" in line and "compute" in line and "50%" in line
