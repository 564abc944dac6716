"""Folders of killed processes are removed by the next one, and no others."""

import os
import signal
import subprocess
import sys

import pytest

from hjax.errors import ConfigError
from hjax.sandbox.local_sandbox import LocalSandbox
from hjax.temporary_folders import TemporaryFolder

OLD = (1, 1)  # seconds, of access and change


def killed(code, folder):
    """Run Python with a temporary directory until it prints a line; then kill it."""
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(flush=True)\nimport time; time.sleep(100)"],
        env=os.environ | {"TMPDIR": str(folder)}, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"\n"
        process.send_signal(signal.SIGKILL)


MADE = "from hjax.temporary_folders import TemporaryFolder\nmade = TemporaryFolder('hjax-x-')"


def test_the_next_one_removes_what_a_killed_process_left(tmp_path):
    killed(MADE, tmp_path)
    [left] = tmp_path.iterdir()
    (deep := left / "a").mkdir(mode=0)
    deep.chmod(0)
    os.utime(left, OLD)
    with TemporaryFolder("hjax-x-", tmp_path) as folder:
        (folder / "b").mkdir()
        assert [*tmp_path.iterdir()] == [folder]
    assert not [*tmp_path.iterdir()]


def test_one_that_was_just_made_may_have_no_lock_yet(tmp_path):
    killed(MADE, tmp_path)
    TemporaryFolder("hjax-x-", tmp_path).remove()
    assert len([*tmp_path.iterdir()]) == 1


def test_folders_in_use_and_others_stay(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    with TemporaryFolder("hjax-x-", tmp_path) as used:
        names = ["hjax-x-no_lock_", "hjax-x-mine", "hjax-x-UPPER678", "hjax-y-abcdefgh"]
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / ("lock" if name != names[0] else "file")).touch()
        (tmp_path / "hjax-x-empty678").mkdir()
        (tmp_path / "hjax-x-fifo5678").mkdir()
        os.mkfifo(tmp_path / "hjax-x-fifo5678" / "lock")
        (tmp_path / "hjax-x-locklink").mkdir()
        (tmp_path / "hjax-x-locklink" / "lock").symlink_to(elsewhere / "lock")
        (tmp_path / "hjax-x-aa_links").symlink_to(elsewhere)
        (tmp_path / "hjax-x-aa_files").touch()
        if os.getuid() == 0:  # of another user
            other = tmp_path / "hjax-x-aa_other"
            other.mkdir()
            (other / "lock").touch()
            os.chown(other, 12345, 12345)
        before = sorted(tmp_path.iterdir())
        for path in before:
            os.utime(path, OLD, follow_symlinks=False)
        TemporaryFolder("hjax-x-", tmp_path).remove()
        # A FIFO that nobody has can be locked as a file can: that folder's process has ended. So
        # has one that was killed before it made a file.
        ended = [tmp_path / "hjax-x-fifo5678", tmp_path / "hjax-x-empty678"]
        assert sorted(tmp_path.iterdir()) == [path for path in before if path not in ended]
        assert used.is_dir()


def test_sandboxes_of_a_killed_run_are_removed_by_the_next(tmp_path, monkeypatch):
    try:
        LocalSandbox()
    except ConfigError as error:
        pytest.skip(str(error))
    code = (
        "from hjax.sandbox.local_sandbox import LocalSandbox\n"
        "box = LocalSandbox()\nname = box.create()\n"
        "box.exec(name, ['sh', '-c', 'mkdir -m 0 closed; echo > file'])"
    )
    killed(code, tmp_path)
    left = [path for path in tmp_path.iterdir() if (path / "work").is_dir()]
    assert [path.name.startswith("hjax-sandbox-") for path in left] == [True]
    os.utime(left[0], OLD)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    box = LocalSandbox()
    name = box.create()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    box.kill(name)
    assert not [*tmp_path.iterdir()]
