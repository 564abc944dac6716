"""The command signalled and killed at every moment: saved or untouched, and bit for bit goes on."""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys

import pytest
from helpers import TINY, command, computed, launch, read_rows, write_config
from struck import MOMENTS

STRUCK = pathlib.Path(__file__).parents[1] / "struck.py"
RUN = TINY | {
    "algorithm.name": "GRPO",
    "steps": 4,
    "cluster.devices_per_process": 1,
    "checkpoint.every": 1,
    "warm_start.steps": 2,
    "display.report": True,
}


def content(workdir):
    """What must be equal: the computed metrics and everything sampled."""
    rows = [computed(row) for row in read_rows(workdir)]
    return rows, read_rows(workdir, "samples.jsonl"), read_rows(workdir, "warm_start.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config of a tiny run, and it undisturbed."""
    folder = tmp_path_factory.mktemp("struck")
    write_config(folder / "tiny.py", RUN)
    done = launch("tiny.py", "--workdir=whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def strike(folder, workdir, moment, nth, signals, **changes):
    """Run it until it is struck; its exit status and what it said."""
    done = subprocess.run(
        [sys.executable, STRUCK, moment, str(nth), signals, "--config=tiny.py",
         f"--workdir={workdir}", *command(changes)],
        cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stderr


def saved(workdir):
    """The last step of which there is a checkpoint; None without any."""
    folder = workdir / "checkpoints"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return max(steps, default=None)


def check(struck, workdir, signals):
    """Whether what a strike has left is saved or untouched, and said in one line."""
    status, said = struck
    last = saved(workdir)
    if status == 0:  # all was over before it came
        assert last == RUN["steps"]
    elif signals.endswith("KILL"):
        assert status == -signal.SIGKILL, said
    else:
        number = getattr(signal, f"SIG{signals.split('+')[0]}")
        assert status == 128 + number, said
        rows = read_rows(workdir) if (workdir / "metrics.jsonl").exists() else []
        at_once = re.search(r"\+[1-9]", signals)  # a second one that is no repetition
        if said or not at_once:
            assert said.count("\n") == 1 and f"stopped by {signal.Signals(number).name}" in said
        if "saved" in said:
            assert f"after step {last} of" in said and rows[-1]["step"] == last
        else:
            assert "before the run began" in said or "before step 1" in said or at_once
    for file in workdir.rglob("*.json"):
        if not any(part.startswith(".") for part in file.relative_to(workdir).parts):
            json.loads(file.read_text())


# One run, struck again and again until it is done.
EVERYDAY = [
    ("start", 1, "HUP", 129, "stopped by SIGHUP before the run began"),
    ("warm start", 1, "TERM", 143, "stopped by SIGTERM before step 1"),
    ("generate", 1, "INT+0.1+INT+0.2+TERM", 130, "stopped by SIGINT after step 1 of 4, saved"),
    ("update", 1, "KILL", -9, ""),
    ("row", 1, "HUP", 129, "stopped by SIGHUP after step 2 of 4, saved"),
    ("checkpoint", 1, "KILL", -9, ""),
    ("report", 1, "KILL", -9, ""),
]


def test_a_run_struck_at_every_moment_goes_on_bit_for_bit(folder):
    workdir = folder / "everyday"
    for moment, nth, signals, status, says in EVERYDAY:
        struck = strike(folder, "everyday", moment, nth, signals)
        assert struck[0] == status and says in struck[1], (moment, struck)
        check(struck, workdir, signals)
        if moment == "start":
            assert not workdir.exists()
    assert content(workdir) == content(folder / "whole")
    # The last kill came before its report, and after all else.
    report = workdir / "report.html"
    assert "step 2 of 4, not finished" in report.read_text()
    again = launch("tiny.py", "--workdir=everyday", cwd=folder)
    assert again.returncode == 0 and again.stdout.count("\n") == 1, again.stderr
    assert "everyday is finished: 4 of 4 steps; give a larger --config.steps" in again.stdout
    assert "4 steps" in report.read_text() and "not finished" not in report.read_text()
    left = [p.name for p in workdir.rglob(".*") if p.name != ".lock"]
    assert left == []


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="a terminal's end is no signal here")
@pytest.mark.parametrize("name", ["TERM", "INT", "HUP"])
def test_a_signal_while_it_starts_ends_it(name, folder):
    """From the first line on, at a moment that differs each time."""
    number = getattr(signal, f"SIG{name}")
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "hjax.launch", "--config=tiny.py",
         "--workdir=begun"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "8"},
    ) as process:  # fmt: skip
        wanted = random.choice(["hjax.launch.huge_pages", "ml_collections", "hjax.run.workdir"])
        said = []
        for line in process.stderr:  # what it has imported
            said.append(line)
            if line.strip().endswith(wanted):
                process.send_signal(number)
                break
        said += process.stderr.read().splitlines()
    assert process.returncode == 128 + number, (wanted, said[-5:])
    own = [line for line in said if not line.startswith("import time:")]
    assert own == [f"hjax: stopped by SIG{name} before the run began"], wanted
    assert not (folder / "begun").exists()


def test_truncated_arrays_leave_one_line_in_a_shell(folder):
    # Reads of other arrays are under way when the first fails, where no checksum says so before.
    shutil.copytree(folder / "whole", folder / "cut")
    os.remove(folder / "cut" / "checkpoints" / "4" / "checksums.json")
    arrays = [f for f in (folder / "cut" / "checkpoints" / "4").glob("*/ocdbt*/d/*")]
    for file in arrays:
        os.truncate(file, file.stat().st_size // 2)
    assert len(arrays) > 2
    done = launch("tiny.py", "--workdir=cut", "--config.steps=5", cwd=folder)
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 2 and "4: this checkpoint cannot be read" in done.stderr


SIGNALS = ["TERM", "INT", "HUP", "KILL", "INT+0.1+INT", "HUP+0.3+TERM", "TERM+1.2+TERM"]
STRIKES = 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(20))
def test_two_hundred_strikes(seed, folder):
    """Ten of them a run; in every other one devices change, and all is equal to 1e-5."""
    rng, name = random.Random(seed), f"seed-{seed}"
    fixed = seed % 2 == 0
    workdir, steps = folder / name, RUN["steps"]
    hit = 0
    for _ in range(4 * STRIKES):
        devices = 1 if fixed else rng.choice([1, 2])
        moment, signals = rng.choice(list(MOMENTS)), rng.choice(SIGNALS)
        nth = rng.choice([1, 1, 2])
        if saved(workdir) == steps and moment != "report":
            # Done already: it goes on from an earlier one, or from nothing.
            shutil.rmtree(workdir / "checkpoints" / str(steps))
            nth = 1
        struck = strike(
            folder, name, moment, nth, signals, **{"cluster.devices_per_process": devices}
        )
        check(struck, workdir, signals)
        hit += struck[0] != 0
        if hit == STRIKES:
            break
    assert hit == STRIKES  # a run may be over before its moment comes
    done = launch("tiny.py", f"--workdir={name}", cwd=folder)
    assert done.returncode == 0, done.stderr
    if fixed:
        assert content(workdir) == content(folder / "whole")
        return
    rows, expected = content(workdir)[0], content(folder / "whole")[0]
    for row, undisturbed in zip(rows, expected, strict=True):
        assert row == pytest.approx(undisturbed, rel=1e-5, abs=1e-5)
