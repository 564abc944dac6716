"""What a signal does to the command, and where it is a guest in another's process."""

import math
import os
import re
import signal
import subprocess
import sys
import time
import types

import pytest
from helpers import ONE_DEVICE, TINY, command, computed, read_rows

from hjax.launch import signals as launch_signals
from hjax.launch.signals import Signals, is_main_module
from hjax.run.workdir import Workdir


class Left(Exception):
    """Instead of the end of the process."""


@pytest.fixture
def ended(monkeypatch):
    """Signals whose end of the process is an exception with its status, and its line."""

    def end(status, line=""):
        raise Left(status, line)

    monkeypatch.setattr(launch_signals, "_exit_now", end)


def watched(said):
    display = types.SimpleNamespace(message=said.append)
    return types.SimpleNamespace(stop_requested=0), display


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_before_there_is_a_run_a_signal_ends_the_command(ended, number):
    with pytest.raises(Left) as left:
        Signals().handle(number)
    line = f"hjax: stopped by {signal.Signals(number).name} before the run began\n"
    assert left.value.args == (128 + number, line)


def test_signals_within_a_second_are_one_request(ended, monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signals = Signals()
    signals.own = True
    trainer, display = watched(said)
    with signals.watching(trainer, display):
        signals.handle(signal.SIGTERM)
        assert trainer.stop_requested == signals.received == signal.SIGTERM
        now[0] += 0.9
        signals.handle(signal.SIGINT)  # a wrapper passes on what came to both
        assert trainer.stop_requested == signals.received == signal.SIGTERM
        assert said == [launch_signals.STOPPING_MESSAGE]
        now[0] += 0.2
        with pytest.raises(Left) as left:
            signals.handle(signal.SIGINT)
    line = "hjax: stopped at once; nothing saved since the start; go on with the same command\n"
    assert left.value.args == (130, line)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([], "nothing saved since the start"),
        ([4, 10], "saved up to step 10"),
        (None, "nothing saved since the start"),  # not even the folder of checkpoints
        ([0], "saved up to step 0"),  # the warm start
    ],
)
def test_a_second_signal_says_what_stands_and_what_goes_on(saved, said, ended, tmp_path):
    if saved is not None:
        (tmp_path / "sft" / "checkpoints").mkdir(parents=True)
    for step in saved or []:
        (tmp_path / "sft" / "checkpoints" / str(step)).mkdir()
    signals = Signals()
    signals.own = True
    trainer, display = watched([])
    trainer.workdir = Workdir(tmp_path / "sft")
    with signals.watching(trainer, display, None, tmp_path):  # of a stage: the workdir of all
        signals.handle(signal.SIGINT)
        signals._since -= 1.1
        with pytest.raises(Left) as left:
            signals.handle(signal.SIGTERM)
    go_on = f"go on with the same command and --workdir={tmp_path}"
    assert left.value.args == (143, f"hjax: stopped at once; {said}; {go_on}\n")


def test_in_a_notebook_the_first_interrupt_stops_and_a_later_one_is_its_own(monkeypatch):
    now, said = [100.0], []
    monkeypatch.setattr(launch_signals.time, "monotonic", lambda: now[0])
    before, signals = signal.getsignal(signal.SIGINT), Signals()
    trainer, display = watched(said)
    with signals.watching(trainer, display):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert trainer.stop_requested == signals.received == signal.SIGINT
        now[0] += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Step:
    """A run whose step takes a time of which some has gone, on a clock of its own."""

    def __init__(self, seconds: float, saving: float, updates_at: float = math.inf):
        self.now, self.step_number, self.joined = 0.0, 12, []
        self.seconds, self.updates_at = seconds, updates_at
        self.checkpoints = types.SimpleNamespace(save_seconds=saving, join=self.join)

    def seconds_left(self):
        if self.now >= min(self.updates_at, self.ends):
            return None
        return max(self.seconds - self.now, 0.0)

    def join(self, seconds):
        self.joined.append(seconds)
        return 10

    ends = math.inf  # when the step ends, whatever was expected


@pytest.mark.parametrize(
    ("run", "left_at"),
    [
        (Step(5, saving=2), None),  # 5 + 2 + 1 of 10 seconds
        (Step(8, saving=2), 0.0),  # 8 + 2 + 1
        (Step(math.inf, saving=0), 0.0),  # the first one's time is not known
        (Step(5, saving=2, updates_at=3), None),
        (Step(5, saving=2, updates_at=60), 7.0),  # it is late: the last moment for saving
    ],
)
def test_a_step_is_left_if_it_cannot_end_in_the_time_of_grace(run, left_at, ended, monkeypatch):
    def sleep(seconds):
        run.now += seconds

    monkeypatch.setattr(time, "monotonic", lambda: run.now)
    monkeypatch.setattr(time, "sleep", sleep)
    if run.updates_at == math.inf:
        run.ends = run.seconds
    if left_at is None:
        launch_signals._leave_in_time(run, 10.0, "go on with --workdir=runs/x")
        assert run.joined == []
        return
    with pytest.raises(Left) as left:
        launch_signals._leave_in_time(run, 10.0, "go on with --workdir=runs/x")
    assert run.now == pytest.approx(left_at, abs=0.11)
    assert left.value.args == (
        143,
        "hjax: stopped by SIGTERM: step 13 would not have ended in time and is left; checkpoint "
        "10 stands, go on with --workdir=runs/x\n",
    )
    assert run.joined == [pytest.approx(9.0 - left_at, abs=0.11)]


# A reward function that waits from the moment on that a file is there.
SLOW = """
import pathlib, time
def reward(prompts, responses, **columns):
    here = pathlib.Path(__file__)
    here.with_name("called").write_text("")
    while here.with_name("wait").exists():
        time.sleep(0.05)
    return [float(len(r)) for r in responses]
"""


@pytest.mark.extended
def test_a_run_that_waits_for_rewards_leaves_its_step_and_goes_on(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    keys = {**TINY, **ONE_DEVICE, "algorithm.name": "GRPO", "checkpoint.every": 2, "steps": 5}
    keys |= {"reward.function": f"{tmp_path}/slow.py:reward", "reward.timeout_seconds": 600}

    def start(name, *more):
        arguments = ["--config=base.py", f"--workdir={tmp_path}/{name}", *command(keys), *more]
        return subprocess.Popen(
            [sys.executable, "-m", "hjax.launch", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def rows(name):
        file = tmp_path / name / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    run = start("left", "--grace_seconds=8")
    while rows("left") < 3:
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    (tmp_path / "called").unlink()
    (tmp_path / "wait").write_text("")
    while not (tmp_path / "called").exists():
        time.sleep(0.05)
    began = time.monotonic()
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert time.monotonic() - began < 8
    assert run.returncode == 143
    match = re.search(r"step (\d) would not have ended in time and is left; checkpoint (\d)", said)
    assert match and int(match[2]) in (2, 4) and int(match[2]) < int(match[1]), said
    (tmp_path / "wait").unlink()
    for name in ("left", "whole"):
        _, said = start(name).communicate(timeout=240)
    left, whole = ([computed(r) for r in read_rows(tmp_path / n)] for n in ("left", "whole"))
    assert len(left) == 5 and left == whole


# Prints what a child gets that is forked after the command has its handlers; they are the parent's.
FORK = """
import os, signal, time
from hjax.launch.signals import Signals
signals = Signals()
signals.install()
signals._trainer = type("", (), {})()  # as if there were a run
child = os.fork()
if not child:
    time.sleep(20)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], signals.received, flush=True)
os.kill(os.getpid(), signal.SIGHUP)
time.sleep(0.5)
print(signals.received)
"""


# Signals itself when Python has given up its handlers, on its way out.
LATE = """
import os, signal, sys, time
from hjax.launch.signals import Signals
class Last:
    def __del__(self, kill=os.kill, me=os.getpid(), number=signal.{name}, sleep=time.sleep):
        kill(me, number)
        sleep(0.3)
signals = Signals()
signals.install()
sys.last = Last()
signals.ignore_further()
sys.exit(7)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_when_all_is_done_a_signal_changes_nothing(name):
    code = LATE.format(name=name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_a_fork_has_signals_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [str(int(signal.SIGTERM)), "0", str(int(signal.SIGHUP))], done


def test_nohup_keeps_its_promise():
    code = (
        "import os, signal, time; from hjax.launch.signals import Signals; Signals().install()\n"
        "os.kill(os.getpid(), signal.SIGHUP); time.sleep(0.3); print('still here')"
    )
    ignoring = ["sh", "-c", 'trap \'\' HUP; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(ignoring, capture_output=True, text=True, timeout=60)
    assert done.stdout == "still here\n", done.stderr


@pytest.mark.parametrize(
    "arguments, argv, expected",
    [
        (["-m", "hjax.launch", "--config=a.py"], ["x", "--config=a.py"], True),
        (["-X", "dev", "-mhjax.launch"], ["x"], True),
        (["-m", "cProfile", "-m", "hjax.launch", "-h"], ["x", "-h"], True),
        (["-m", "ipykernel_launcher", "-f", "kernel.json"], ["x", "--config=a.py"], False),
        (["-m", "ipykernel_launcher", "-f", "kernel.json"], ["x"], False),
        (["script.py"], ["script.py"], False),
        ([], [""], False),
    ],
)
def test_a_guest_knows_that_it_is_one(arguments, argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", *arguments])
    monkeypatch.setattr(sys, "argv", argv)
    assert is_main_module("hjax.launch") is expected


# As a notebook's kernel does it; the process would be replaced if it took itself for the command.
RUN_IN_KERNEL = """
import os, signal, sys, time
import hjax.launch.huge_pages, hjax.launch.process_exit
hjax.launch.process_exit._EXIT_GRACE_SECONDS = 0.1
hjax.launch.huge_pages.huge_pages_available = lambda: True
os.execve = lambda *arguments: (print("replaced", flush=True), os._exit(9))
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
handler, streams = signal.getsignal(signal.SIGINT), (sys.stdout, sys.stderr)
for module, flag in (("hjax.launch", "--help"), ("hjax.launch.plan", "--calibrate --help")):
    shell.run_line_magic("run", f"-m {module} -- {flag}")
assert signal.getsignal(signal.SIGINT) is handler
assert (sys.stdout, sys.stderr) == streams
time.sleep(0.5)  # after which a command of its own would be gone
print("the kernel is still here")
"""


@pytest.mark.extended
def test_percent_run_leaves_the_kernel_alone(tmp_path):
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", RUN_IN_KERNEL], capture_output=True, text=True, timeout=120,
        env=os.environ | {"IPYTHONDIR": str(tmp_path)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1] == "the kernel is still here", done.stdout + done.stderr
    assert "usage: python -m hjax.launch " in done.stdout
