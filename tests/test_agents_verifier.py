"""Agents that are programs: what they are told, what is verified, and what is killed."""

import os
import pathlib
import socket
import sys

import numpy as np
import pytest
from serving_double import wait_until
from test_agents_play import play

from hjax.agents.agent_settings import AgentSettings
from hjax.agents.command_agent import command_words, load_verifier
from hjax.errors import ConfigError
from hjax.run.episode_validation import check_agent
from hjax.sandbox import local_sandbox
from hjax.sandbox.sandbox_settings import SandboxSettings
from hjax.settings.keys import default_config

PROGRAM = """
import json, os, subprocess, sys, time
sys.path.insert(0, {tests!r})
from agents_double import asked, user
told = json.load(open(sys.argv[1]))
assert "answer" not in told["task"] and os.listdir(".") == [], told
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


@pytest.fixture
def files(tmp_path):
    """A folder that the program can read, and its verifier beside it."""
    tests = pathlib.Path(__file__).parent
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/agents_double.py").write_text((tests / "agents_double.py").read_text())
    text = PROGRAM.replace("{tests!r}", repr(f"{tmp_path}/agent"))
    (tmp_path / "agent/program.py").write_text(text)
    (tmp_path / "verify.py").write_text(VERIFIER)
    for folder in (*tmp_path.parents[:-2], tmp_path):  # pytest closes them to other users
        folder.chmod(folder.stat().st_mode | 0o055)
    return tmp_path


def settings_in(files, program="program.py", **changes):
    return {
        "function": "", "command": f"{sys.executable} -I {files}/agent/{program} {{session}}",
        "verifier": f"{files}/verify.py:verify", "readable": (f"{files}/agent",), "seconds": 10.0,
        **changes,
    }  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("confined", [True, False])
def test_a_program_is_scored_by_what_it_leaves_and_nothing_of_it_goes_on(files, confined):
    episodes, _ = play(
        ["fine", "leaves", "raises", "late", "fails"], **settings_in(files, confined=confined)
    )
    assert [each.stop_reason for each in episodes] == [
        "done", "done", "exception", "done", "unscored"
    ], episodes[0].fault  # fmt: skip
    returns = [each.total_reward for each in episodes]
    assert returns[:2] == [1.0, 2.0] and returns[3] == 4.0 and np.isnan(returns[2])
    assert "ValueError: the verifier's" in episodes[2].fault
    wait_until(lambda: not any(b"98765" in each for each in commands()))


# What a policy would try that has its agent run programs: each must fail.
ATTEMPTS = """
import json, os, socket, sys, urllib.request
told = json.load(open(sys.argv[1]))
body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
head = {"Authorization": f"Bearer {told['key']}"}
urllib.request.urlopen(urllib.request.Request(f"{told['url']}/chat/completions", body, head)).read()
port, other = int(told["url"].split(":")[2].split("/")[0]), int(told["task"]["port"])
won = []
def attempt(name, do):
    try:
        do()
        won.append(name)
    except OSError:
        pass
attempt("verifier", lambda: open(told["task"]["verifier"]).read())
attempt("secret", lambda: open("/etc/shadow").read())
attempt("other port", lambda: socket.create_connection(("127.0.0.1", other), 2))
attempt("other host", lambda: socket.create_connection(("10.0.0.1", port), 2))
attempt("datagram", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
attempt("listen", lambda: socket.socket().bind(("127.0.0.1", 0)))
attempt("signal", lambda: os.kill(int(told["task"]["pid"]), 0))
attempt("outside", lambda: open(told["task"]["verifier"] + ".new", "w"))
open("won.json", "w").write(json.dumps(won))
"""


@pytest.mark.extended
def test_a_confined_program_reaches_the_gateway_alone(files):
    (files / "agent/attempts.py").write_text(ATTEMPTS)
    (files / "verify.py").write_text(
        "import json\ndef verify(task, workspace):\n"
        "    assert workspace.status == 0, workspace.output\n"
        "    return float(len(json.loads(workspace.read('won.json'))))\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as other:
        task = {
            "port": other.getsockname()[1], "verifier": f"{files}/verify.py", "pid": os.getpid()
        }  # fmt: skip
        [episode], _ = play([task], **settings_in(files, "attempts.py"))
    assert not episode.fault and episode.total_reward == 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"readable": ("{files}",)}, "agent.verifier=.*could read it"),
        ({"readable": ("{files}/none",)}, "agent.readable=.*there is no such file"),
        ({"sandbox": SandboxSettings("mine.py:Mine")}, "sandbox.function=mine.py:Mine is another"),
    ],
)
def test_a_program_that_cannot_be_confined_is_refused(files, changes, said, monkeypatch):
    monkeypatch.setattr(SandboxSettings, "make", lambda self: None)
    changes = dict(changes)
    if "readable" in changes:
        changes["readable"] = (changes["readable"][0].format(files=files),)
    with pytest.raises(ConfigError, match=said):
        AgentSettings(**settings_in(files, **changes)).check()


def test_without_namespaces_the_network_is_not_the_gateways_alone(files, monkeypatch):
    """So it is refused, unless the run says that programs may reach others."""
    layers = {"landlock": 4, "seccomp": 1, "namespaces": 0, "users": 1}
    monkeypatch.setattr(local_sandbox, "probed_layers", lambda: layers)
    monkeypatch.setattr(local_sandbox, "_reachable", lambda paths: True)
    with pytest.raises(ConfigError, match="agent.confined=True: .*needs namespaces.*=False runs"):
        AgentSettings(**settings_in(files)).check()


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


def test_words_that_are_paths_are_made_absolute(tmp_path, monkeypatch):
    """A program begins in another folder; a word that a folder happens to have too is a word."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "test").mkdir()
    words = command_words("python3 agent.py test ./test {session}")
    assert words[1:] == [f"{tmp_path}/agent.py", "test", f"{tmp_path}/test", "{session}"]
    assert words[0].startswith("/") and words[0].endswith("python3")


def test_a_program_needs_a_verifier():
    with pytest.raises(ConfigError, match="agent.verifier=''"):
        load_verifier("")


@pytest.mark.parametrize("changes", [{"readable": "/a"}, {"confined": False}])
def test_keys_of_programs_are_refused_beside_a_function(changes):
    config = default_config()
    config.agent.update({"function": "a.py:b"} | changes)
    with pytest.raises(ConfigError, match=f"agent.{next(iter(changes))}=.*it is of agent.command"):
        check_agent(config)
