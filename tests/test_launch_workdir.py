"""The workdir: what a killed run leaves can be read and continued."""

import json
import pathlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest

from hjax.errors import ConfigError, DataError, RunError
from hjax.run.loggers import TensorBoard
from hjax.run.workdir import CHANGEABLE, METRICS, SAMPLES, WARM_START, Workdir, check_unlocked
from hjax.settings.config_loading import default_config


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


@pytest.mark.parametrize(
    "change",
    [
        {"reward__max_unscored": 0.9},
        {"reward__timeout_seconds": 600.0},
        {"checkpoint__every": 1, "checkpoint__keep": 5},
        {"rollout__max_prob_error": 0.0, "rollout__warn_prob_error": 3.0},
    ],
)
def test_what_an_error_tells_to_change_may_change(change, tmp_path):
    Workdir(tmp_path).open(default_config())
    assert Workdir(tmp_path).open(config_with(**change))


@pytest.mark.parametrize("page", ["design.md", "guides/resuming.md"])
def test_the_pages_name_what_may_change(page):
    text = (pathlib.Path(__file__).parent.parent / "docs" / page).read_text()
    [sentence] = re.findall(r"(?:Only|On resume) `steps`, .*?(?:may change|_prob_error`\.)", text)
    named = {name.replace(".*", ".") for name in re.findall(r"`([a-z_.*]+)`", sentence)}
    assert named == set(CHANGEABLE)


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


def test_an_older_run_goes_on(tmp_path):
    """It was written when unroll_layers was a bool, data.packing a number, and there was
    data.length_buckets."""
    Workdir(tmp_path).open(default_config())
    old = json.loads((tmp_path / "config.json").read_text())
    old["model"]["unroll_layers"] = True
    old["data"] |= {"length_buckets": 0, "packing": 0}
    old["rollout"]["surplus"] = old["rollout"].pop("extra_samples")  # names of before
    old["actor"]["warmup_steps"] = old["actor"].pop("warmup_updates")
    (tmp_path / "config.json").write_text(json.dumps(old))
    (tmp_path / METRICS).write_text('{"step": 1}\n')
    assert Workdir(tmp_path).check(default_config())
    assert Workdir(tmp_path).with_recorded_packing(default_config()).data.packing == "0"
    overwriting = Workdir(tmp_path, overwrite=True)
    assert overwriting.with_recorded_packing(default_config()).data.packing == "auto"
    with pytest.raises(ConfigError, match="config.data.packing='0', now '64'"):
        Workdir(tmp_path).check(config_with(data__packing="64"))
    old["data"]["packing"] = 64
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert Workdir(tmp_path).with_recorded_packing(default_config()).data.packing == "64"
    assert Workdir(tmp_path).check(config_with(data__packing=64))
    old["data"]["length_buckets"] = 4
    (tmp_path / "config.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match="length_buckets=4: packs do that now, .*packing; give"):
        Workdir(tmp_path).check(default_config())


def test_a_run_that_chose_goes_on_so(tmp_path):
    Workdir(tmp_path).open(default_config())
    (tmp_path / METRICS).write_text('{"step": 1}\n')
    assert Workdir(tmp_path).with_recorded_packing(default_config()).data.packing == "auto"
    with pytest.raises(ConfigError, match="config.data.packing='auto', now '0'"):
        Workdir(tmp_path).check(config_with(data__packing=0))


def test_a_file_is_no_workdir(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        Workdir(tmp_path / "file").open(default_config())


def test_two_processes_do_not_share_a_workdir(workdir):
    code = (
        "import sys\n"
        "from hjax.settings.config_loading import default_config\n"
        "from hjax.run.workdir import Workdir\n"
        "Workdir(sys.argv[1]).open(default_config())\n"
    )
    command = [sys.executable, "-c", code, str(workdir.path)]
    other = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "another process is training here" in other.stderr
    workdir.close()
    Workdir(workdir.path).open(default_config())


@pytest.mark.extended
def test_a_directory_in_use_is_known_without_taking_it(workdir):
    code = "import sys; from hjax.run.workdir import check_unlocked\n"
    code += "from hjax.errors import ConfigError\n"
    code += "try: check_unlocked(sys.argv[1])\n"
    code += "except ConfigError as error: print(error)\n"
    command = [sys.executable, "-c", code, str(workdir.path)]
    for _ in range(2):  # a look does not release what another holds
        said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        assert "another process is training here" in said
    workdir.close()
    check_unlocked(workdir.path)  # nor does it take what is free
    assert subprocess.run(command, capture_output=True, text=True, timeout=120).stdout == ""
    Workdir(workdir.path).open(default_config())


def test_nor_do_two_of_one_process(workdir):
    for _ in range(2):  # a refused one does not give the lock up
        with pytest.raises(ConfigError, match=r"another Trainer .* close\(\) it first"):
            Workdir(workdir.path).open(default_config())
    link = workdir.path.with_name("link")
    link.symlink_to(workdir.path)
    with pytest.raises(ConfigError, match="another Trainer"):
        Workdir(link).open(default_config())
    workdir.close()
    Workdir(link).open(default_config())  # and one that nobody holds any more frees it
    Workdir(link).open(default_config())


def test_a_start_that_failed_leaves_nothing(tmp_path):
    made = Workdir(tmp_path / "new" / "run")
    made.open(default_config())
    made.write_json("plan.json", {})
    (made.path / "model").mkdir()
    made.checkpoints.mkdir()
    made.discard()
    assert list((tmp_path / "new").iterdir()) == []
    # What somebody else had there stays, and so does a run.
    (tmp_path / "mine" / "model").mkdir(parents=True)
    made = Workdir(tmp_path / "mine")
    made.open(default_config())
    made.discard()
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["model"]
    made.open(default_config())
    made.mark_started()
    made.discard()
    assert (tmp_path / "mine" / "config.json").is_file()


def test_a_gap_is_found(workdir):
    workdir.append(METRICS, [{"step": step} for step in (1, 2, 5)])
    assert workdir.missing_steps(6) == [3, 4, 6] and workdir.missing_steps(2) == []


def test_what_cannot_be_written_is_one_line(workdir):
    # Even root cannot write into a folder as a file.
    for name in ("samples.jsonl", "timeline.json"):
        (workdir.path / name).mkdir()
    with pytest.raises(RunError, match="samples.jsonl could not be written: Is a directory"):
        workdir.append(SAMPLES, [{"step": 1}])
    with pytest.raises(RunError, match="timeline.json could not be written: Is a directory"):
        workdir.write_json("timeline.json", {})
    events = Workdir(workdir.path.with_name("events"), [TensorBoard()])
    events.open(default_config())
    (events.path / "tensorboard").write_text("")
    with pytest.raises(RunError, match="tensorboard could not be written: File exists"):
        events.truncate_after(0)
    events.close()


def test_events_of_one_second_are_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)  # the clock stands, or was set back
    for step in (1, 2):
        made = Workdir(tmp_path, [TensorBoard()])
        made.open(default_config())
        made.truncate_after(step - 1)
        made.append(METRICS, [{"step": step, "reward/mean": float(step)}])
        made.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


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
