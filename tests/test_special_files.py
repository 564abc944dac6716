"""What is no plain file where hjax reads or writes: links, FIFOs, sockets, devices, mounts, full
disks. Outcomes are exit status, one line, and that nothing else was changed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from helpers import computed, tiny_config, trainer_of
from safetensors import safe_open
from safetensors.numpy import save_file

import hjax
from hjax.dryrun import compilation
from hjax.errors import ConfigError, DataError, RunError, exit_status
from hjax.files import read_json, read_rows
from hjax.launch import __main__ as launch
from hjax.launch import compare, evaluate, export, plan
from hjax.launch.jax_setup import drop_corrupt_entries
from hjax.models.checkpoint import Checkpoints
from hjax.models.export import check_output, export_model
from hjax.models.safetensors_files import TensorFile
from hjax.run.workdir import RUN_FOLDERS, Workdir
from hjax.user_input import check_directory, read_object

SPECIAL = {
    "fifo": "a FIFO",
    "socket": "a socket",
    "device": "a device",
    "dangling": "which does not exist",
    "loop": "loop of links",  # in the system's words or in hjax's
}


@pytest.fixture(autouse=True)
def nothing_waits():
    """A FIFO that is opened is waited for: for ever."""

    def late(*_):
        raise TimeoutError("waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(240)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind, path, tmp_path):
    """Puts something special in a file's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.open(path.parent, os.O_RDONLY)  # a socket's path may have a hundred characters
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")  # endless to a reader
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)


def tree(folder):
    """Paths with their kind, size and time of change."""
    found = sorted(folder.rglob("*"))
    stats = [os.lstat(path) for path in found]
    return [(p, s.st_mode, s.st_size, s.st_mtime_ns) for p, s in zip(found, stats, strict=True)]


def refused(capsys, status, expected, *says):
    """Checks an exit status and its one line."""
    error = capsys.readouterr().err
    assert status == expected, error
    line = error.strip().splitlines()[-1]
    assert line.startswith("hjax: error: ") and "Traceback" not in error
    for text in says:
        assert text in line
    return line


@contextlib.contextmanager
def disk(path, size):
    """A file system of so many bytes."""
    path.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if os.getuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of one step with its checkpoint."""
    path = tmp_path_factory.mktemp("special") / "run"
    with trainer_of("GRPO", {"steps": 1, "checkpoint.every": 1, "actor.lora.rank": 2}, path) as t:
        t.run()
    return path


@pytest.fixture(scope="module")
def model(run, tmp_path_factory):
    """A model's directory."""
    path = tmp_path_factory.mktemp("special") / "model"
    export_model(run, path)
    return path


def made_up_run(path, config):
    """The files of a run that took a step."""
    workdir = Workdir(path)
    workdir.open(config)
    workdir.append("metrics.jsonl", [{"step": 1}])
    workdir.write_json("plan.json", {})
    (path / "checkpoints" / "1").mkdir(parents=True)
    (path / "model").mkdir()
    workdir.close()


RUN_NAMES = ("config.json", "metrics.jsonl", "report.html", "checkpoints", "model", ".lock")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_run_whose_files_are_something_else_is_refused_untouched(
    kind, overwrite, tmp_path, capsys
):
    workdir, config = tmp_path / "run", tiny_config("GRPO")
    made_up_run(workdir, config)
    for name in RUN_NAMES:
        kept = tmp_path / "kept"
        (workdir / name).rename(kept) if (workdir / name).exists() else None
        put(kind, workdir / name, tmp_path)
        before = tree(workdir)
        with pytest.raises(ConfigError, match=SPECIAL[kind]) as error:
            Workdir(workdir, overwrite=overwrite).open(config)
        assert name in str(error.value) and "\n" not in str(error.value)
        assert tree(workdir) == before
        (workdir / name).unlink()
        kept.rename(workdir / name) if kept.exists() else None
    put(kind, tmp_path / "itself", tmp_path)
    status = launch.main(["--config=grpo.py", f"--workdir={tmp_path}/itself", "--config.steps=1"])
    refused(capsys, status, 2, "--workdir=", "itself")


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["link", "mount"])
@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "model"])
def test_overwrite_removes_no_link_and_no_mount_and_never_resumes(name, kind, run, tmp_path):
    workdir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(run, workdir)
    config = tiny_config("GRPO", {"steps": 1, "seed": 5, "actor.lora.rank": 2})
    with contextlib.ExitStack() as mounted:
        if kind == "mount":
            if not (workdir / name).is_dir():
                pytest.skip("a file")
            content = list((workdir / name).iterdir())
            shutil.move(workdir / name, elsewhere)
            mounted.enter_context(disk(workdir / name, 2**24))
            for path in content:
                shutil.move(elsewhere / path.name, path)
        else:
            shutil.move(workdir / name, elsewhere)
            (workdir / name).symlink_to(elsewhere)
        before = tree(tmp_path)
        for _ in range(2):  # the second try finds what the first has left
            with pytest.raises(ConfigError, match="--overwrite does not remove") as error:
                hjax.Trainer(config, workdir=workdir, overwrite=True)
            assert name in str(error.value) and "\n" not in str(error.value)
            assert tree(tmp_path) == before
        if kind == "link":
            # A resume follows links.
            with trainer_of("GRPO", {"steps": 2, "actor.lora.rank": 2}, workdir) as trainer:
                assert [row["step"] for row in trainer.run()] == [2]
            assert (workdir / name).is_symlink()


@pytest.mark.extended
def test_checkpoints_whose_run_is_gone_are_neither_resumed_nor_kept_by_overwrite(run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(run, workdir)
    (workdir / "config.json").unlink()
    before = tree(workdir)
    changes = {"steps": 1, "actor.lora.rank": 2, "seed": 5}
    with pytest.raises(ConfigError, match="checkpoints without the config.json"):
        hjax.Trainer(tiny_config("GRPO", changes), workdir=workdir)
    assert tree(workdir) == before
    trainer = hjax.Trainer(tiny_config("GRPO", changes), workdir=workdir, overwrite=True)
    rows = trainer.run()
    trainer.close()
    with trainer_of("GRPO", changes) as alone:
        assert [computed(row) for row in rows] == [computed(row) for row in alone.run()]


def test_overwrite_interrupted_in_the_middle_begins_again(tmp_path, monkeypatch):
    workdir, config = tmp_path / "run", tiny_config("GRPO")
    made_up_run(workdir, config)

    def interrupted(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hjax.run.workdir.shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Workdir(workdir, overwrite=True).open(config)
    # Nothing of it is left that a resume would take, and it is still known to be a run's.
    assert (workdir / "config.json").exists() and not (workdir / "checkpoints").exists()
    again = Workdir(workdir, overwrite=True)
    assert not again.open(config)
    assert {path.name for path in workdir.iterdir()} == {"config.json", ".lock"}
    again.close()


FOREIGN = ("model/config.json", "report.html", "metrics.jsonl", "tensorboard/a", "checkpoints/5/a")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_files_that_are_of_no_run_are_neither_replaced_nor_removed(name, overwrite, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=f"its {name.partition('/')[0]} is not of a run"):
        Workdir(tmp_path, overwrite=overwrite).open(tiny_config("GRPO"))
    assert tree(tmp_path) == before


def test_other_files_and_empty_folders_are_no_hindrance(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model").mkdir()
    workdir = Workdir(tmp_path)
    assert not workdir.open(tiny_config("GRPO"))
    workdir.discard()
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "model"}


@pytest.mark.parametrize("within", ["checkpoints", "checkpoints/1", "checkpoints/7", "model/x"])
def test_a_run_within_folders_of_another_is_refused(within, tmp_path):
    made_up_run(tmp_path / "run", tiny_config("GRPO"))
    (tmp_path / "link").symlink_to(tmp_path / "run")
    before = tree(tmp_path)
    for run in ("run", "link"):
        with pytest.raises(ConfigError, match=f"within {within.partition('/')[0]}/ of the run"):
            Workdir(tmp_path / run / within).open(tiny_config("GRPO"))
        with pytest.raises(ConfigError, match=f"within {within.partition('/')[0]}/ of the run"):
            check_output(tmp_path / run / within)  # of an export
    check_output(tmp_path / "run" / "exported")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("at", ["checkpoints", "checkpoints/1", "model"])
def test_overwrite_removes_nothing_of_a_bound_or_nested_mount(at, tmp_path):
    workdir, elsewhere = tmp_path / "a run", tmp_path / "elsewhere"
    made_up_run(workdir, tiny_config("GRPO"))
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("mine")
    bind = ["mount", "--bind", str(elsewhere), str(workdir / at)]
    if os.getuid() or subprocess.run(bind, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        before = tree(tmp_path)
        with pytest.raises(ConfigError, match="mount point, which --overwrite does not remove"):
            Workdir(workdir, overwrite=True).open(tiny_config("GRPO"))
        assert tree(tmp_path) == before
    finally:
        subprocess.run(["umount", "-l", str(workdir / at)], check=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_workdir_that_cannot_be_written_is_named(overwrite, tmp_path):
    with disk(tmp_path / "disk", 2**20) as mounted:
        (mounted / "run").mkdir()
        if overwrite:
            made_up_run(mounted / "run", tiny_config("GRPO"))
        subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)
        with pytest.raises(ConfigError, match=r"run/\.lock: Read-only file system"):
            Workdir(mounted / "run", overwrite=overwrite).open(tiny_config("GRPO"))


@pytest.mark.extended
def test_a_models_directory_is_no_workdir(model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    before = tree(folder)
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="not the config of a run"):
            Workdir(folder, overwrite=overwrite).open(tiny_config("GRPO"))
        assert tree(folder) == before


def test_a_checkpoint_that_is_a_link_is_let_go_with_what_it_leads_to_kept(tmp_path):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, lambda saving: [], {"step": 1})
    checkpoints.wait()
    (folder / "1").rename(elsewhere)
    (folder / "1").symlink_to(elsewhere)
    checkpoints.save(2, lambda saving: [], {"step": 2})
    checkpoints.wait()
    assert [p.name for p in folder.iterdir()] == ["2"] and (elsewhere / "controller.json").exists()


@pytest.mark.extended
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_checkpoints_files_that_are_something_else_are_refused(kind, run, tmp_path, capsys):
    # Without checksums, as those of earlier versions, too: its reader would wait for a FIFO.
    for name in ("actor.params/manifest.ocdbt", "actor.params/_METADATA", "checksums.json"):
        folder = tmp_path / name.replace("/", " ")
        shutil.copytree(run, folder)
        put(kind, folder / "checkpoints" / "1" / name, tmp_path)
        (folder / "checkpoints" / "1" / "checksums.json").unlink() if "actor" in name else None
        status = export.main([f"--model={folder}", f"--output={tmp_path}/out"])
        refused(capsys, status, 2, name, SPECIAL[kind])
        assert not (tmp_path / "out").exists()


@pytest.mark.extended
@pytest.mark.parametrize("content", ["fifo", "{}", "[]", '{"actor": 1}', '{"actor": {}}'])
def test_a_workdir_whose_config_is_none_is_refused_in_one_line(content, run, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    put(content, folder / "config.json", tmp_path)
    if content != "fifo":
        (folder / "config.json").write_text(content)
    status = export.main([f"--model={folder}", f"--output={tmp_path}/out"])
    refused(capsys, status, 2, "run/config.json: ")


def test_a_file_that_only_claims_to_be_large_is_not_read(tmp_path):
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match=f"config.json: {2**40} bytes; at most {2**26}"):
        read_object(tmp_path / "config.json")
    with pytest.raises(DataError, match=f"config.json: {2**40} bytes; at most {2**30}"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["config.json", "samples.jsonl", "starts.jsonl"])
def test_a_run_whose_files_only_claim_to_be_large(name, tmp_path):
    """The end of its rows is looked at, no more."""
    workdir, config = tmp_path / "run", tiny_config("GRPO")
    made_up_run(workdir, config)
    with open(workdir / name, "ab") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match=f"{name}: .*damaged"):
        Workdir(workdir).open(config)
    if name != "config.json":
        (workdir / name).write_bytes(b'{"step": 1}\n' * 2**23 + b'{"step"')
        opened = Workdir(workdir)
        assert opened.open(config)
        opened.close()
        assert (workdir / name).stat().st_size == 12 * 2**23


def test_a_comparison_takes_the_place_of_no_other_file(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    before = tree(tmp_path)
    status = compare.main([str(run), f"{tmp_path}/run", f"--output={tmp_path}/run/metrics.jsonl"])
    refused(capsys, status, 2, "its name must end in .html")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["sparse", "dangling", "loop"])
def test_rows_that_are_none_or_without_end_are_refused(kind, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_rows(path) == [{"step": 1}, {"step": 2}]
    path.unlink()
    assert read_rows(path) == []
    if kind == "sparse":
        with open(path, "wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to("nothing" if kind == "dangling" else path.name)
    with pytest.raises(DataError, match="bytes or more" if kind == "sparse" else SPECIAL[kind]):
        read_rows(path)


def test_a_folder_in_the_place_of_a_models_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(DataError, match="tokenizer.json: a directory, not a file"):
        check_directory(tmp_path)


MODEL_FILES = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.extended
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_models_files_that_are_something_else_are_refused_by_name(kind, model, tmp_path, capsys):
    for name in (*MODEL_FILES, "chat_template.jinja", "generation_config.json"):
        folder = tmp_path / f"of {name}"
        shutil.copytree(model, folder)
        put(kind, folder / name, tmp_path)
        status = export.main([f"--model={folder}", f"--output={tmp_path}/out"])
        refused(capsys, status, 2, name, SPECIAL[kind])
        assert not (tmp_path / "out").exists()


@pytest.mark.extended
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("command", ["export", "adapter", "evaluate", "compare", "plan"])
def test_an_output_that_is_something_else_is_refused_untouched(
    command, kind, run, tmp_path, capsys
):
    output = tmp_path / f"out{ENDINGS.get(command, '')}"
    put(kind, output, tmp_path)
    before = tree(tmp_path)
    status = written(command, run, output)
    refused(capsys, status, 2, str(output)[:40])
    assert tree(tmp_path) == before


ENDINGS = {"evaluate": ".jsonl", "compare": ".html"}


def written(command, run, output):
    """Runs a command that writes; returns its status."""
    if command in ("export", "adapter"):
        flags = ["--adapter"] if command == "adapter" else []
        return export.main([f"--model={run}", f"--output={output}", *flags])
    if command == "evaluate":
        return evaluate.main(
            [f"--model={run}", f"--output={output}", "--task=sorting", "--limit=64"]
        )
    if command == "compare":
        other = run.parent / "other"
        if not other.exists():
            shutil.copytree(run, other)
        return compare.main([str(run), str(other), f"--output={output}"])
    cluster = ["--cluster=1x8:h100", "--samples=4", "--models=qwen2.5-0.5b"]
    return plan.main(["--algorithm=grpo", *cluster, f"--output={output}"])


@pytest.mark.extended
def test_outputs_go_through_links(run, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "target")
    assert written("export", run, tmp_path / "out") == 0
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "target" / "model.safetensors").is_file()
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert written("compare", run, tmp_path / "link.html") == 0
    assert (tmp_path / "link.html").is_symlink()
    assert "<html" in (tmp_path / "page.html").read_text()
    with disk(tmp_path / "mounted", 2**22) as mounted:
        with pytest.raises(ConfigError, match="is a mount point"):
            export_model(run, mounted)


@pytest.mark.extended
@pytest.mark.parametrize("size", [0.02, 0.6, 0.97])
@pytest.mark.parametrize("command", ["export", "adapter", "evaluate", "compare", "plan"])
def test_a_full_disk_is_one_line_and_leaves_nothing(command, size, run, tmp_path, capsys):
    # A share of what the command writes: the disk is full within each of its files.
    name = f"out{ENDINGS.get(command, '')}"
    assert written(command, run, tmp_path / name) == 0
    out = tmp_path / name
    files = [out] if out.is_file() else [p for p in out.rglob("*") if p.is_file()]
    needed = sum(-(-p.stat().st_size // 4096) * 4096 for p in files)
    capsys.readouterr()
    with disk(tmp_path / "disk", max(4096, int(needed * size) // 4096 * 4096)) as full:
        status = written(command, run, full / name)
        refused(capsys, status, 1, "No space left on device", name)
        assert list(full.iterdir()) == []


def filled(folder):
    """Fills what room there is, but for one page."""
    with open(folder / "ballast", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(folder / "ballast", "rb+") as file:
        file.truncate(max(file.seek(0, 2) - 4096, 0))


@pytest.mark.extended
def test_a_run_whose_disk_is_full_says_so_and_goes_on_once_there_is_room(tmp_path):
    config = {"steps": 2, "checkpoint.every": 1, "display.report": True}
    with disk(tmp_path / "disk", 2**25) as full:
        with trainer_of("GRPO", config, full / "run") as trainer:
            trainer.run(1)
            filled(full)
            with pytest.raises(RunError, match="No space left on device") as error:
                trainer.run(1)
            assert "\n" not in str(error.value) and str(full) not in str(error.value)[300:]
            with pytest.raises(RunError, match="No space left on device"):
                trainer.export(full / "out")
            assert not (full / "out").exists() and not list(full.glob(".out*"))
            with pytest.raises(RunError, match="No space left on device"):
                trainer.workdir.write_json("timeline.json", [0] * 10000)
            (full / "ballast").unlink()
        assert not list((full / "run").rglob(".*.part"))
        assert not list((full / "run" / "checkpoints").glob(".*"))
        with trainer_of("GRPO", config, full / "run") as trainer:
            again = trainer.run()
    with trainer_of("GRPO", config) as trainer:
        assert computed(trainer.run()[-1]) == computed(again[-1])


def test_a_new_run_on_a_full_disk_leaves_no_folder(tmp_path):
    with disk(tmp_path / "disk", 4096) as full:
        with pytest.raises(RunError, match="config.json: No space left on device"):
            hjax.Trainer(tiny_config("GRPO"), workdir=full / "run")
        assert list(full.iterdir()) == []


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_entries_of_the_cache_of_programs_are_removed(kind, tmp_path):
    put(kind, tmp_path / "jit_x-cache", tmp_path)
    assert drop_corrupt_entries(tmp_path) == 1
    assert not list(tmp_path.glob("*-cache"))


def with_header(path, change):
    """Writes a safetensors file of two tensors with its header changed."""
    import json

    save_file({"a": np.arange(4, dtype=np.float32), "b": np.ones(2, np.float32)}, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header, body = change(header, body)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def offsets(**at):
    def change(header, body):
        for name, (start, stop) in at.items():
            header[name] |= {"data_offsets": [start, stop], "shape": [(stop - start) // 4]}
        return header, body

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (offsets(a=(0, 16), b=(8, 16)), "'b' begins within the bytes of 'a'"),
        (offsets(a=(0, 16), b=(0, 16)), "begins within the bytes of"),
        (offsets(a=(0, 8)), "8 bytes before 'b' belong to no tensor"),
        (offsets(a=(4, 16)), "4 bytes before 'a' belong to no tensor"),
        (lambda header, body: (header, body + b"more"), "its last 4 bytes belong to no tensor"),
        (lambda header, body: ({"a": header["a"]}, body), "its last 8 bytes belong to no tensor"),
        *(
            (lambda header, body, s=shape: (header | {"a": header["a"] | {"shape": s}}, body), says)
            for shape, says in {
                (4.0,): "'a' has offsets and shape 0, 16, 4.0; whole numbers of 0 or more",
                (4, True): "0, 16, 4, True; whole numbers of 0 or more",
                (-2, -2): "0, 16, -2, -2; whole numbers of 0 or more",
                (10**4000,) * 300: "whole numbers of 0 or more",  # minutes to multiply
                (2**62, 4): "'a' has a shape that no array has",
            }.items()
        ),
        (
            lambda header, body: (header | {"a": header["a"] | {"data_offsets": [0.0, 16]}}, body),
            "'a' has offsets and shape 0.0, 16, 4; whole numbers of 0 or more",
        ),
    ],
)
def test_bytes_of_two_tensors_and_of_none_are_refused_as_the_library_does(change, says, tmp_path):
    path = tmp_path / "model.safetensors"
    with_header(path, lambda header, body: (header, body))
    assert TensorFile(path).rows("b").tolist() == [1, 1]
    with_header(path, change)
    with pytest.raises(ConfigError, match=says):
        TensorFile(path)
    with pytest.raises(Exception, match="header|metadata|offset"), safe_open(path, "np"):
        pass


@pytest.mark.parametrize("repeated", ["a", "dtype", "shape"])
def test_a_key_that_a_header_has_twice_is_refused(repeated, tmp_path):
    entry = '{"dtype": "F32", "dtype2": "F16", "shape": [2], "shape2": [4], "data_offsets": [0, 8]}'
    entry = entry.replace(f"{repeated}2", repeated)
    text = f'{{"a": {entry}, "{"a" if repeated == "a" else "__metadata__"}": {entry}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ConfigError, match=f"a key comes twice in an object: '{repeated}'"):
        TensorFile(path)


def test_empty_tensors_share_no_bytes(tmp_path):
    tensors = {"z": np.zeros((0, 3), np.float32), "a": np.ones(3, np.float32)}
    tensors["m"] = np.zeros((2, 0), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    file = TensorFile(tmp_path / "model.safetensors")
    assert file.shapes == {"z": (0, 3), "a": (3,), "m": (2, 0)}
    assert file.rows("a").tolist() == [1, 1, 1] and file.rows("m").shape == (2, 0)


@pytest.mark.extended
def test_names_of_folders_are_those_of_a_run(run):
    folders = {path.name for path in run.iterdir() if path.is_dir()}
    assert folders <= {*RUN_FOLDERS, "logs"} and "checkpoints" in folders


@pytest.mark.extended
def test_a_cache_whose_disk_is_full(tmp_path, capsys):
    """Results that would be kept are one line; programs that JAX would keep are compiled."""
    with disk(tmp_path / "disk", 4096) as full:
        status = exit_status(lambda: compilation._store(full / "x.json", {"text": "x" * 9000}))
        refused(capsys, status, 1, "x.json: No space left on device")
        assert list(full.iterdir()) == []
        environment = {
            "JAX_COMPILATION_CACHE_DIR": str(full / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        done = subprocess.run(
            [sys.executable, "-c", "import jax.numpy as x; print(x.arange(8).sum())"],
            env=os.environ | environment, capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "28\n"), done.stderr
        drop_corrupt_entries(full / "programs")
        assert sum(path.stat().st_size for path in full.rglob("*-cache")) <= 4096
