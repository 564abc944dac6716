"""The workdir: what a killed run leaves can be read and continued."""

import json
import subprocess
import sys

import numpy as np
import pytest

from hjax.errors import ConfigError, DataError
from hjax.run.workdir import METRICS, SAMPLES, WARM_START, Workdir
from hjax.settings.reading import default_config


@pytest.fixture
def workdir(tmp_path):
    made = Workdir(tmp_path / "run")
    made.open(default_config())
    yield made
    made.close()


def config_with(**changes):
    config = default_config()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


def test_nothing_is_written_before_open(tmp_path):
    made = Workdir(tmp_path / "run")
    assert made.rows(METRICS) == [] and not made.finished()
    assert not (tmp_path / "run").exists()


def test_open_says_whether_a_run_was_there(tmp_path):
    for expected in (False, True):
        made = Workdir(tmp_path / "run")
        assert made.open(default_config()) is expected
        made.close()
    assert json.loads((tmp_path / "run" / "config.json").read_text())["rollout"]["stop"] == []


def test_some_keys_may_change_on_resume(tmp_path):
    Workdir(tmp_path).open(default_config())
    changed = config_with(
        steps=7, placement="split", layout__actor__train__tensor=2, display__enabled=False
    )
    assert Workdir(tmp_path).open(changed)
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 7


def test_other_keys_may_not_change(tmp_path):
    Workdir(tmp_path).open(default_config())
    (tmp_path / METRICS).write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"config.seed=0, now 3.*another --workdir"):
        Workdir(tmp_path).open(config_with(seed=3))
    config = default_config()
    config.algorithm.bonus = 1.0
    with pytest.raises(ConfigError, match="config.algorithm.bonus=absent, now 1.0"):
        Workdir(tmp_path).check(config)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_a_file_is_no_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        Workdir(tmp_path / "file").open(default_config())


def test_two_processes_do_not_share_a_workdir(workdir):
    code = (
        "import sys\n"
        "from hjax.settings.reading import default_config\n"
        "from hjax.run.workdir import Workdir\n"
        "Workdir(sys.argv[1]).open(default_config())\n"
    )
    command = [sys.executable, "-c", code, str(workdir.path)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "another process is training here" in other.stderr
    workdir.close()
    subprocess.run(command, check=True, timeout=120)


def test_rows_are_whole_lines_of_plain_json(workdir):
    row = {"step": 1, "reward/mean": np.float32(0.5), "kl/reference": float("nan"), "x": np.inf}
    workdir.append(METRICS, [row])
    assert (workdir.path / METRICS).read_text() == (
        '{"step": 1, "reward/mean": 0.5, "kl/reference": null, "x": null}\n'
    )


def test_a_torn_last_line_is_dropped(workdir):
    workdir.append(METRICS, [{"step": 1}])
    with open(workdir.path / METRICS, "a") as file:
        file.write('{"step": 2, "rew')
    assert workdir.rows(METRICS) == [{"step": 1}]
    workdir.close()
    again = Workdir(workdir.path)
    again.open(default_config())
    again.append(METRICS, [{"step": 2}])
    assert again.rows(METRICS) == [{"step": 1}, {"step": 2}]
    again.close()


def test_a_damaged_line_is_named(workdir):
    (workdir.path / METRICS).write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match="metrics.jsonl:2"):
        workdir.rows(METRICS)


def test_truncate_after_drops_what_the_checkpoint_does_not_know(workdir):
    for name in (METRICS, SAMPLES, WARM_START):
        workdir.append(name, [{"step": step} for step in (1, 2, 3)])
    workdir.truncate_after(2)
    assert [len(workdir.rows(name)) for name in (METRICS, SAMPLES, WARM_START)] == [2, 2, 3]
    workdir.truncate(WARM_START, 0)
    assert workdir.rows(WARM_START) == []
    leftovers = [p.name for p in workdir.path.iterdir() if "jsonl." in p.name]
    assert leftovers == []


def test_json_files_are_replaced_whole(workdir):
    workdir.write_json("plan.json", {"placement": [("actor",)], "share": np.float64("nan")})
    assert workdir.read_json("plan.json") == {"placement": [["actor"]], "share": None}
    assert workdir.read_json("timeline.json") is None


def test_finished_needs_the_last_row_and_its_checkpoint(workdir):
    steps = default_config().steps
    workdir.append(METRICS, [{"step": steps}])
    assert not workdir.finished()
    # What orbax writes before it renames does not count.
    (workdir.checkpoints / f"{steps}.orbax-checkpoint-tmp").mkdir(parents=True)
    assert not workdir.finished()
    (workdir.checkpoints / str(steps)).mkdir()
    assert workdir.finished() and not workdir.finished(steps + 1)


def test_a_run_that_took_no_step_gives_way_to_another(tmp_path):
    first = Workdir(tmp_path)
    first.open(default_config())
    first.append(WARM_START, [{"step": 1, "loss": 1.0}])
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)  # of the warm start
    (tmp_path / "notes.txt").write_text("mine")
    first.close()
    assert Workdir(tmp_path).check(default_config())
    second = Workdir(tmp_path)
    assert not second.open(config_with(seed=3))
    second.close()
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 3
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"config.json", "notes.txt", ".lock"}


def test_overwriting_takes_what_a_run_wrote_and_nothing_else(tmp_path):
    first = Workdir(tmp_path)
    first.open(default_config())
    first.append(METRICS, [{"step": 1}])
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "notes.txt").write_text("mine")
    first.close()
    second = Workdir(tmp_path, overwrite=True)
    assert not second.check(config_with(seed=3)) and second.rows(METRICS)  # not yet
    assert not second.open(config_with(seed=3)) and not second.rows(METRICS)
    second.close()
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "notes.txt", ".lock"}
