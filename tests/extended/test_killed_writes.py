"""SIGKILL in the middle of what is written: an asynchronous save, an export, an adapter's export.

A strike comes as soon as the folder that is being written is in a certain state. Whether it has hit
is what it leaves: that folder. It is repeated until it has.
"""

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import TINY, computed, launch, read_rows, trainer_of, write_config

# Each strike is a start of the command.
pytestmark = pytest.mark.timeout(1200)
RUN = TINY | {
    "algorithm.name": "GRPO",
    "steps": 4,
    "cluster.devices_per_process": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
}


def killed_when(ready, found, arguments, cwd):
    """Run a command until what is found is ready, and kill it; whether it came to that."""
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=os.environ | {"MALLOC_ARENA_MAX": "8"},
    ) as process:  # fmt: skip
        old = True  # what an earlier strike has left goes first
        while process.poll() is None:
            now = ready(found())
            if now and not old:
                process.send_signal(signal.SIGKILL)
                break
            old = old and now
            time.sleep(0.0005)
        said = process.stderr.read().decode()
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode < 0


def names(folder):
    """All paths in a folder, which may go meanwhile."""
    walked = os.walk(folder)
    return {os.path.join(at, x) for at, folders, files in walked for x in (*folders, *files)}


def content(workdir):
    """What must be equal: the computed metrics and everything sampled."""
    return [computed(row) for row in read_rows(workdir)], read_rows(workdir, "samples.jsonl")


# What of a checkpoint is there when the strike comes: of its folder, and beside it.
MOMENTS = {
    "begun": lambda found: any(x.endswith(".saving") for x in found),
    "arrays": lambda found: any(".saving/actor." in x for x in found),
    "checksums": lambda found: any(".saving/" in x and "checksums.json" in x for x in found),
    "an old one goes": lambda found: any(x.endswith(".removing") for x in found),
}


def test_a_run_killed_within_its_saves_goes_on_bit_for_bit(tmp_path):
    write_config(tmp_path / "tiny.py", RUN)
    done = launch("tiny.py", "--workdir=whole", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    workdir = tmp_path / "struck"
    checkpoints, left = workdir / "checkpoints", dict(MOMENTS)
    command = ["-m", "hjax.launch", "--config=tiny.py", "--workdir=struck"]
    for number in itertools.count():
        assert number < 16, f"not hit: {sorted(left)}"
        moment = next(iter(left))
        if killed_when(left[moment], lambda: names(checkpoints), command, tmp_path):
            if any(x.endswith((".saving", ".removing")) for x in names(checkpoints)):
                del left[moment]
        else:  # it was done: it goes on from its start
            shutil.rmtree(workdir)
        if not left:
            break
    done = launch("tiny.py", "--workdir=struck", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert content(workdir) == content(tmp_path / "whole")
    assert [p.name for p in checkpoints.iterdir()] == ["4"]


# Exports of one model, one after the other, by the command and by a trainer.
COMMAND = """
import sys
from hjax.launch.export import main
for i in range(300):
    assert main([f"--model={sys.argv[1]}", f"--output={sys.argv[2]}/out{i}", *sys.argv[3:]]) == 0
"""
TRAINER = """
import sys
import hjax
config = hjax.get_config(sys.argv[1] + ".py")
trainer = hjax.Trainer(config, workdir=sys.argv[2] + "-run")
trainer.prepare()
for i in range(300):
    trainer.export(f"{sys.argv[2]}/out{i}")
"""
WRITTEN = {
    "begun": lambda found: any(".hjax-export-" in x for x in found),
    "weights": lambda found: any(x.endswith(".safetensors") for x in found),
    "last": lambda found: any(x.endswith("generation_config.json") for x in found),
}


def files(folder):
    """The bytes of a folder's files by name; the folder's own path is a base's path in them."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    own = os.fsencode(folder.resolve())
    return {str(p.relative_to(folder)): p.read_bytes().replace(own, b"OUT") for p in paths}


def written(folder):
    """What is in the hidden folder of an export that is being written."""
    hidden = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith(".")]
    return {*hidden, *(x for path in hidden for x in names(path))}


@pytest.mark.parametrize("kind", ["command", "adapters", "trainer"])
def test_a_killed_export_is_complete_or_not_there(kind, tmp_path):
    changes = RUN | {"steps": 1, "algorithm.entropy_coef": 0.01}
    changes |= {"actor.lora.rank": 2} if kind == "adapters" else {}
    write_config(tmp_path / "tiny.py", changes)
    flags = ["--adapter"] if kind == "adapters" else []
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
    given = tmp_path / "run"
    if kind == "trainer":
        code, given = TRAINER, tmp_path / "tiny"
        with trainer_of("GRPO", changes, tmp_path / "other") as trainer:
            trainer.prepare()
            trainer.export(tmp_path / "whole")
    else:
        code = COMMAND
        from hjax.launch.export import main

        assert main([f"--model={given}", f"--output={tmp_path}/whole", *flags]) == 0
    whole, left = files(tmp_path / "whole"), dict(WRITTEN)
    if kind == "adapters":
        left["last"] = lambda found: any(x.endswith("base/generation_config.json") for x in found)
    for number in itertools.count():
        assert number < 16, f"not hit: {sorted(left)}"
        out = tmp_path / f"out-{number}"
        out.mkdir()
        moment = next(iter(left))
        arguments = ["-c", code, str(given), str(out), *flags]
        killed_when(left[moment], functools.partial(written, out), arguments, tmp_path)
        unfinished = [path for path in out.iterdir() if path.name.startswith(".")]
        for path in out.iterdir():
            assert path in unfinished or files(path) == whole, (moment, path.name)
        if not unfinished:
            continue
        del left[moment]
        # The next export to that name is whole, and takes with it what was left.
        [path] = unfinished
        os.utime(path, (1, 1))
        name = path.name[1:].partition(".hjax-export-")[0]
        assert not (out / name).exists()
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from hjax.launch.export import main; "
             "sys.exit(main(sys.argv[1:]))",
             f"--model={tmp_path / 'run'}", f"--output={out / name}", *flags],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not path.exists()
        assert kind == "trainer" or files(out / name) == whole
        if not left:
            break
