"""Output never ends a command, and a command that is done ends."""

import os
import pathlib
import subprocess
import sys

import pytest

from hjax import launch

# A command that prints much, with letters that ASCII has not, and in the end what became of it.
SCRIPT = """
import sys
from hjax.launch.process_exit import run_and_leave
def main():
    for i in range(20_000):
        print("10388> → 01388 ± …")
    print("▶", flush=True)
    print("done", file=sys.stderr)
    return 3
run_and_leave(main)
"""
COMMAND = [sys.executable, "-c", SCRIPT]


def run(shell, env=None):
    """A command of a shell, in which "$@" is the script's."""
    line = ["bash", "-c", shell, "bash", *COMMAND]
    full = {**os.environ, **(env or {})}
    return subprocess.run(line, capture_output=True, timeout=120, env=full)


@pytest.mark.parametrize(
    ("shell", "status", "says"),
    [
        ('"$@" | head -1; exit ${PIPESTATUS[0]}', 3, "done\n"),
        ('"$@" | true; exit ${PIPESTATUS[0]}', 3, "done\n"),
        ('"$@" >&-', 3, "done\n"),
        ('"$@" >/dev/full', 3,
         "hjax: standard output cannot be written: No space left on device\ndone\n"),
        ('"$@" 2>&-', 3, ""),
        ('"$@" >&- 2>&- <&-', 3, ""),
        ('"$@" 2>/dev/full >/dev/full', 3, ""),
    ],
)  # fmt: skip
def test_output_that_nobody_takes_does_not_end_it(shell, status, says):
    done = run(shell)
    assert (done.returncode, done.stderr.decode()) == (status, says)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_a_terminal_has_not_are_written_plainly(encoding):
    done = run('"$@"', {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"})
    first, last = done.stdout.splitlines()[0].decode(encoding), done.stdout.splitlines()[-1]
    expected = {"ascii": "10388> -> 01388 +- ...", "latin-1": "10388> -> 01388 ± ..."}
    assert (first, last, done.returncode) == (expected[encoding], b">", 3)


def test_every_command_goes_through_this_door():
    files = pathlib.Path(launch.__file__).parent.glob("*.py")
    texts = {file.stem: file.read_text() for file in files}
    doors = {name for name, text in texts.items() if "\nif __name__" in text and "def main" in text}
    assert len(doors) >= 8
    assert {name for name in doors if "    run_and_leave(main)\n" not in texts[name]} == set()


def test_a_hung_pool_of_threads_does_not_keep_it():
    script = """
import time
from concurrent.futures import ThreadPoolExecutor
from hjax.launch import process_exit
process_exit._LEAVE_SECONDS = 0.5
def main():
    ThreadPoolExecutor().submit(time.sleep, 600)
    print("the last line")
    return 4
process_exit.run_and_leave(main)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (4, "the last line\n")
    assert "left behind threads that do not end: ThreadPoolExecutor-0_0" in done.stderr
