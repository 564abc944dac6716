"""What goes to TensorBoard, Weights & Biases and loggers of a user's own, and again on resume."""

import json
import pathlib
import re
import sys
import types

import numpy as np
import pytest
from helpers import tiny_config, trainer_of

from hjax.errors import ConfigError
from hjax.files import HISTOGRAMS, METRICS, SAMPLES
from hjax.run.loggers import TensorBoard, Wandb, make_loggers
from hjax.run.reporter import histogram, spread_rows
from hjax.run.workdir import Workdir
from hjax.settings.keys import default_config

ROOT = pathlib.Path(__file__).parent.parent
MINE = """
import json
from hjax.run.loggers import Logger

class Lines(Logger):
    def start(self, config, workdir, step):
        self.file = open(workdir / "mine.txt", "a")
        print("start", config["rollout.samples"], step, file=self.file)

    def log(self, step, metrics):
        print(step, sorted(metrics), file=self.file)

    def samples(self, step, rows):
        print(step, rows[0]["kind"], len({row["prompt"] for row in rows}), file=self.file)

    def close(self):
        self.file.close()

def no_logger():
    return 3
"""
ROWS = {
    METRICS: {"step": 1, "reward/mean": 0.5, "kl/reference": None},
    SAMPLES: {"step": 1, "index": 0, "kind": "train",
              "prompt": "2+2=", "response": "4", "reward": 1.0},
    HISTOGRAMS: {"step": 1, "reward": histogram([0.0, 0.5, 1.0, np.nan])},
}  # fmt: skip


def logged(path, logger):
    """A workdir in which one row of each kind was logged twice, as after a kill."""
    for _ in range(2):
        workdir = Workdir(path, [logger()])
        workdir.open(default_config())
        workdir.truncate_after(0)
        for name, row in ROWS.items():
            workdir.append(name, [row])
        workdir.close()
    return path


def test_tensorboard_has_scalars_texts_histograms_and_hyperparameters(tmp_path):
    """Read back as TensorBoard reads it: by the records' protocol buffers."""
    from tensorboardX.proto.event_pb2 import Event

    logged(tmp_path, TensorBoard)
    found = {}
    for file in (tmp_path / "tensorboard").glob("events.*"):
        content = file.read_bytes()
        while content:  # length (8), its checksum (4), the record, its checksum (4)
            length = int.from_bytes(content[:8], "little")
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                found[value.tag] = (event.step, value)
    assert found["reward/mean"][1].simple_value == 0.5 and "kl/reference" not in found
    text = found["samples/train/0/text_summary"][1].tensor.string_val[0].decode()
    assert "2+2=" in text and "4" in text and "reward 1" in text
    histo = found["reward/histogram"][1].histo
    assert (histo.num, histo.min, histo.max, histo.sum) == (3, 0.0, 1.0, 1.5)
    assert sum(histo.bucket) == 3
    assert "_hparams_/session_start_info" in found


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    """The real package; on resume it is the same run."""
    pytest.importorskip("wandb", reason="wandb is not installed: pip install hjax[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(tmp_path, lambda: Wandb("a-project"))
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    kept = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert files and all(kept in file.name or b"reward/mean" in file.read_bytes() for file in files)
    assert any(b"2+2=" in f.read_bytes() for f in tmp_path.glob("wandb/**/*.json"))


def test_wandb_without_a_key_is_one_line(tmp_path, monkeypatch):
    class Refused(Exception):
        pass

    def init(**keys):
        raise Refused("No API key\nconfigured.")

    double = types.SimpleNamespace(
        init=init, Settings=dict, errors=types.SimpleNamespace(Error=Refused)
    )
    monkeypatch.setitem(sys.modules, "wandb", double)
    said = r"^display.wandb=foo: No API key configured\. Log in with `wandb login`, or .*=offline$"
    with pytest.raises(ConfigError, match=said):
        Wandb("foo").start({}, tmp_path, 0)


@pytest.mark.extended
def test_a_logger_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    changes = {"display.logger": f"{tmp_path}/mine.py:Lines", "steps": 1, "checkpoint.every": 1}
    workdir = tmp_path / "run"
    for steps in (1, 2):
        with trainer_of("GRPO", changes | {"steps": steps}, workdir) as trainer:
            trainer.run()
    lines = (workdir / "mine.txt").read_text().splitlines()
    assert [line for line in lines if line.startswith("start")] == ["start 2 0", "start 2 1"]
    assert [line.split()[0] for line in lines if "reward/mean" in line] == ["1", "2"]
    assert "1 train 4" in lines  # eight rows: four prompts with both of their samples
    starts = [json.loads(line) for line in (workdir / "starts.jsonl").read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, 1]
    assert starts[0]["versions"]["jax"] and sum(starts[0]["devices"].values()) >= 1
    documented = set(re.findall(r"`([\w/]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert set(trainer.history[-1]) - documented == {"step"}
    rows = [json.loads(line) for line in (workdir / HISTOGRAMS).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and sum(rows[0]["reward"]["counts"]) == 16


def test_loggers_that_are_none(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    for name, said in (("no_logger", "gives a int"), ("missing", "has no missing")):
        config = tiny_config("GRPO", {"display.logger": f"{tmp_path}/mine.py:{name}"})
        with pytest.raises(ConfigError, match=said):
            make_loggers(config)


def test_histograms_count_what_there_is():
    found = histogram([[1.0, 2.0], [3.0, np.nan]])
    assert (found["low"], found["high"], sum(found["counts"])) == (1.0, 3.0, 3)
    assert (found["counts"][0], found["counts"][10], found["counts"][-1]) == (1, 1, 1)
    assert (found["sum"], found["squares"]) == (6.0, 14.0)
    assert histogram([np.nan]) is None


@pytest.mark.parametrize(
    ("rows", "samples", "count", "chosen"),
    [
        (16, 8, 8, [0, 1, 2, 3, 8, 9, 10, 11]),  # two prompts, four of each
        (64, 8, 8, [0, 1, 8, 9, 16, 17, 24, 25]),
        (64, 1, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 2, 8, [0, 1, 2, 3]),
        (3, 1, 8, [0, 1, 2]),
        (8, 8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_shown_rows_are_of_several_prompts(rows, samples, count, chosen):
    assert spread_rows(rows, samples, count) == chosen
