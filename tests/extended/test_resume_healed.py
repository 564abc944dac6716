"""A run after full disks, damaged checkpoints, a clock that jumps, an interrupt: it goes on bit for
bit, or refuses to."""

import contextlib
import itertools
import json
import resource
import shutil
import signal
import subprocess
import time

import pytest
from helpers import computed, read_rows, tiny_config, trainer_of

import hjax
from hjax.errors import ConfigError, DataError, RunError

THREE = {
    "steps": 3,
    "checkpoint.every": 1,
    "checkpoint.keep": 3,
    "display.tensorboard": True,
    "display.report": True,
}


def content(workdir):
    """What must be equal."""
    return [computed(row) for row in read_rows(workdir)], read_rows(workdir, "samples.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three steps left alone, with a checkpoint after each; copy it before changing anything."""
    workdir = tmp_path_factory.mktemp("healed") / "whole"
    with trainer_of("GRPO", THREE, workdir) as trainer:
        trainer.run()
    return workdir


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a full disk, or over a quota: the system refuses to make a file longer, root's too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Messages:
    """A display that keeps what it is told."""

    def __init__(self):
        self.said = []

    def message(self, text):
        self.said.append(text)

    @contextlib.contextmanager
    def phase(self, name):
        yield

    def __getattr__(self, name):
        return lambda *arguments: None


def test_a_full_disk_is_one_line_at_its_step_and_heals(
    whole, tmp_path, monkeypatch, capfd, caplog, recwarn
):
    # And all the while the clock jumps, by years and back.
    jumps = itertools.cycle([0.0, 1e9, -1e9, 3e7, -4e8])
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + next(jumps))
    with trainer_of("GRPO", THREE, tmp_path / "run") as trainer:
        trainer.step()
        trainer.checkpoints.wait()
        begun = time.monotonic()
        # Rows have room (a kilobyte each), arrays of parameters have not.
        with files_of_at_most(24_000), pytest.raises(RunError, match="checkpoint 2 could not be "):
            trainer.step()
            trainer.checkpoints._completing.join()
            trainer.checkpoints.check()
        assert time.monotonic() - begun < 60
        assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2]
        # A row that has no room is half written, and said as well.
        with files_of_at_most(2_000), pytest.raises(RunError, match="could not be writ") as caught:
            trainer.step()
        assert "jsonl" in str(caught.value) and "\n" not in str(caught.value)
        # Its weights are a step further than its rows.
        with pytest.raises(RunError, match="step 3 failed, and weights may be half updated"):
            trainer.run()
    assert capfd.readouterr().err == "" == caplog.text and not recwarn.list
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["1"]
    with trainer_of("GRPO", THREE, tmp_path / "run") as trainer:
        assert [row["step"] for row in trainer.run()] == [2, 3]
    assert content(tmp_path / "run") == content(whole)
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    assert (tmp_path / "run" / "report.html").is_file()


@contextlib.contextmanager
def read_only(folder):
    """As a disk that the system has mounted again, for reading alone; what is open stays open."""
    done = subprocess.run(
        ["mount", "--bind", "-o", "ro", str(folder), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"only root may mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_turns_read_only_is_one_line_and_heals(whole, tmp_path):
    workdir = tmp_path / "run"
    with trainer_of("GRPO", THREE, workdir) as trainer:
        trainer.step()
        trainer.checkpoints.wait()
        with read_only(tmp_path), pytest.raises(RunError, match="[Rr]ead-only") as caught:
            trainer.step()
            trainer.checkpoints.wait()
        assert "\n" not in str(caught.value)
    with read_only(tmp_path), pytest.raises(ConfigError, match="workdir.*: Read-only") as caught:
        with trainer_of("GRPO", THREE, workdir) as trainer:
            trainer.run()
    assert "\n" not in str(caught.value)
    with trainer_of("GRPO", THREE, workdir) as trainer:
        assert [row["step"] for row in trainer.run()] == [2, 3]
    assert content(workdir) == content(whole)


def test_a_damaged_checkpoint_is_repaired_by_the_one_before(whole, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    [array] = [p for p in (workdir / "checkpoints" / "3" / "actor.params").glob("d/*")][:1]
    flipped = bytearray(array.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    array.write_bytes(flipped)
    config = tiny_config("GRPO", THREE)
    with trainer_of("GRPO", THREE, workdir) as trainer:
        with pytest.raises(DataError, match="3: this .*actor.params is not what was saved"):
            trainer.run()
    with pytest.raises(DataError, match="actor.params is not what was saved"):
        hjax.load_model(workdir)
    # A row is gone too, of a step that is not taken again.
    rows = read_rows(workdir)
    kept = [json.dumps(row) + "\n" for row in rows if row["step"] != 1]
    (workdir / "metrics.jsonl").write_text("".join(kept))
    display = Messages()
    trainer = hjax.Trainer(config, workdir, display, repair=True)
    try:
        assert [row["step"] for row in trainer.run()] == [3]
    finally:
        trainer.close()
    damaged, gap = display.said[:2]
    assert damaged.startswith("checkpoint 3 is damaged (actor.params is not what was saved")
    assert gap == "metrics.jsonl has no row of 1 steps: 1"
    assert content(workdir)[0] == content(whole)[0][1:]
    assert content(workdir)[1] == content(whole)[1]


def test_an_interrupted_trainer_refuses_to_go_on(whole, tmp_path, monkeypatch):
    with trainer_of("GRPO", THREE, tmp_path / "run") as trainer:
        trainer.step()
        trainer.checkpoints.wait()
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        algorithm, log = trainer.algorithm, trainer.algorithm.log

        def interrupted(metrics):
            log(metrics)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(algorithm, "log", interrupted)  # an update is under way
        with pytest.raises(KeyboardInterrupt):
            trainer.step()
        signal.signal(signal.SIGINT, handler)
        monkeypatch.undo()
        says = "step 2 was interrupted, and weights may be half updated: close.* last checkpoint"
        for go_on in (trainer.step, trainer.run, trainer.save):
            with pytest.raises(RunError, match=says):
                go_on()
        # Nor can another begin beside it.
        with pytest.raises(ConfigError, match="another Trainer of this process"):
            hjax.Trainer(tiny_config("GRPO", THREE), tmp_path / "run")
    with trainer_of("GRPO", THREE, tmp_path / "run") as trainer:
        assert [row["step"] for row in trainer.run()] == [2, 3]
    assert content(tmp_path / "run") == content(whole)
