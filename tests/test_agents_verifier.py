"""Agents that are programs: what they are told, what is verified, and what is killed."""

import pathlib
import sys

import numpy as np
import pytest
from serving_double import wait_until
from test_agents_play import play

from hjax.agents.command_agent import command_words, load_verifier
from hjax.errors import ConfigError

PROGRAM = """
import json, os, subprocess, sys, time
sys.path.insert(0, {tests!r})
from agents_double import asked, user
told = json.load(open(sys.argv[1]))
what = told["task"]["prompt"]
assert not [name for name in os.environ if name.startswith("OPENAI")], os.environ
if what != "silent":
    found = asked(told["url"], told["key"], messages=[user(what)])
    open("answer.txt", "w").write(found["choices"][0]["message"]["content"])
os.makedirs("deep/er", exist_ok=True)
os.symlink("/etc/passwd", "deep/link")
open("deep/er/seed", "w").write(str(told["seed"]))
if what == "leaves":
    subprocess.Popen(["sleep", "98765"], start_new_session=True, cwd="/")
if what == "late":
    time.sleep(60)
if what == "fails":
    print("it failed")
    os.mkfifo("../fifo")  # what its output might be written to
    os.replace("../fifo", "../output")
    sys.exit(3)
"""
VERIFIER = """
import sys
def verify(task, workspace):
    what = task["prompt"]
    if what == "raises":
        raise ValueError("the verifier's")
    if what == "fails":
        assert workspace.status == 3 and "it failed" in workspace.output
        return None
    assert workspace.status == (None if what == "late" else 0), workspace
    workspace.write("test.py", b"print(open('answer.txt').read() == 'ok')")
    done = workspace.run([sys.executable, "-I", "test.py"])
    try:
        workspace.read("deep/link")
    except Exception:
        return 1.0 * (done.stdout == b"True\\n") + float(workspace.read("deep/er/seed"))
    raise AssertionError("a link was followed")
"""


def commands():
    """The command lines of all processes."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue


@pytest.mark.extended
def test_a_program_is_scored_by_what_it_leaves_and_nothing_of_it_goes_on(tmp_path):
    tests = str(pathlib.Path(__file__).parent)
    (tmp_path / "program.py").write_text(PROGRAM.replace("{tests!r}", repr(tests)))
    (tmp_path / "verify.py").write_text(VERIFIER)
    episodes, _ = play(
        ["fine", "leaves", "raises", "late", "fails"], function="",
        command=f"{sys.executable} {tmp_path}/program.py {{session}}",
        verifier=f"{tmp_path}/verify.py:verify", seconds=6.0,
    )  # fmt: skip
    assert [each.stop_reason for each in episodes] == [
        "done", "done", "exception", "done", "unscored"
    ]  # fmt: skip
    returns = [each.total_reward for each in episodes]
    assert returns[:2] == [1.0, 2.0] and returns[3] == 4.0 and np.isnan(returns[2])
    assert "ValueError: the verifier's" in episodes[2].fault
    wait_until(lambda: not any(b"98765" in each for each in commands()))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("python agent.py", "{session}"),
        ("no-such-program {session}", "there is no program"),
        ("python 'agent.py {session}", "quotation"),
        ("python agent.py {url}", "{url} and {key}"),
    ],
)
def test_a_command_that_cannot_work_is_refused(command, said):
    with pytest.raises(ConfigError, match="agent.command=") as caught:
        command_words(command)
    assert said in str(caught.value)


def test_a_program_needs_a_verifier():
    with pytest.raises(ConfigError, match="agent.verifier=''"):
        load_verifier("")
