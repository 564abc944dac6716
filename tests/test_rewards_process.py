"""Reward functions in a process of their own: nothing that they do outlives or hurts the run."""

import logging
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hjax import isolated_process
from hjax.machine import descendants
from hjax.rewards.function import RewardFunction, load_function
from hjax.rewards.reward_results import RewardResult, parse_rewards
from hjax.rewards.reward_serialization import from_bytes, to_bytes

SECONDS = 0.2
# What is a thread's or a process's own: where it is, what it has started, what it keeps.
FILE = '''
import asyncio, functools, json, os, pathlib, re, subprocess, sys, threading, time

HERE = pathlib.Path(__file__).parent
calls = []

def good(prompts, responses, **columns):
    calls.append(len(responses))
    return [float(len(calls))] * len(responses)

def where(prompts, responses, **columns):
    """Which process it is, and whether JAX was imported for it."""
    return {"pid": [float(os.getpid() % 10**6)], "jax": [float("jax" in sys.modules)]}

def holds_the_interpreter(prompts, responses, **columns):
    re.match(r"(a+)+$", "a" * 40 + "b")
    return [1.0] * len(responses)

def sleeps(prompts, responses, **columns):
    time.sleep(60)

def hung_pool(prompts, responses, **columns):
    from concurrent.futures import ThreadPoolExecutor
    ThreadPoolExecutor().submit(time.sleep, 60).result()

async def hung_thread_of_a_loop(prompts, responses, **columns):
    await asyncio.to_thread(time.sleep, 60)

async def never_done(prompts, responses, **columns):
    await asyncio.sleep(60)

def swallows(prompts, responses, **columns):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

class Hangs:
    shape = ()
    def item(self):
        time.sleep(60)

class Raises:
    def __float__(self):
        raise ValueError("no number")
    __repr__ = __float__

class Real(float):
    def __float__(self):
        raise ValueError("no number")
    __repr__ = __float__

class Exits(Real):
    def __float__(self):
        raise SystemExit(3)

def hanging_value(prompts, responses, **columns):
    return [Hangs() for _ in responses]

def raising_values(prompts, responses, **columns):
    return [Raises(), Real(), 1.0]

def exiting_value(prompts, responses, **columns):
    return [Exits(), 1.0, 1.0]

def exits(prompts, responses, **columns):
    sys.exit(3)

def leaves(prompts, responses, **columns):
    os._exit(7)

def crashes(prompts, responses, **columns):
    os.kill(os.getpid(), 11)

def ends_its_keeper(prompts, responses, **columns):
    os.kill(os.getppid(), 9)
    time.sleep(60)

def ends_its_group(prompts, responses, **columns):
    os.killpg(0, 9)

def changes_folder(prompts, responses, **columns):
    os.chdir("/")
    os.environ["HJAX_A_REWARD_WAS_HERE"] = "1"
    return [1.0] * len(responses)

def forks(prompts, responses, **columns):
    os.fork()
    return [float(os.getpid())] * len(responses)

def closes_everything(prompts, responses, **columns):
    os.closerange(3, 100)
    return [1.0] * len(responses)

def leaves_processes(prompts, responses, **columns):
    """One child of its own, and one that has left its session and its parent."""
    one = subprocess.Popen(["sleep", "60"])
    script = (
        "import os, time; os.fork() and os._exit(0); os.setsid(); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    two = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    (HERE / "pids").write_text(f"{one.pid} {two.stdout.readline()}")
    if responses[0] == "hang":
        time.sleep(60)
    os._exit(0)

def as_asked(prompts, responses, **columns):
    while responses[0] == "hang":
        pass
    return os._exit(1) if responses[0] == "leave" else [1.0]

def prints(prompts, responses, **columns):
    print("said by a reward")
    print("an error of it", file=sys.stderr)
    return [1.0] * len(responses)

def very_long(prompts, responses, **columns):
    raise ValueError("x" * 10**6)

class Locked:
    """What holds a lock cannot be pickled, but made again where its file is read."""
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self, prompts, responses, **columns):
        with self.lock:
            return [2.0] * len(responses)

locked = Locked()
partial = functools.partial(good, level=1)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "mine.py").write_text(FILE)
    return folder


@pytest.fixture(autouse=True)
def little_grace(monkeypatch):
    monkeypatch.setattr(isolated_process, "_GRACE_SECONDS", 0.2)


@pytest.fixture
def made(folder):
    """A reward function of the file by its name."""
    functions = []

    def make(name, seconds=SECONDS, **options):
        function = load_function(f"{folder}/mine.py:{name}")
        functions.append(RewardFunction(function, seconds, **options))
        return functions[-1]

    yield make
    for function in functions:
        function.close()


def judge(function, *responses):
    responses = responses or ("r0", "r1", "r2")
    count = len(responses)
    return function(["p"] * count, responses, {"answer": ["a"] * count}, [[1]] * count,
                    [[2]] * count)  # fmt: skip


def gone(pid):
    """Whether a process ends within a few seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


# What a call does, how it comes out, and what is said of it.
BAD = {
    "holds_the_interpreter": ("timeout", "took longer than 0.2 s; its process was ended"),
    "sleeps": ("timeout", "took longer than 0.2 s"),
    "hung_pool": ("timeout", "took longer than 0.2 s"),
    "hung_thread_of_a_loop": ("timeout", "took longer than 0.2 s"),
    "never_done": ("timeout", "took longer than 0.2 s; it was cancelled"),
    "swallows": ("timeout", "took longer than 0.2 s"),
    "hanging_value": ("timeout", "took longer than 0.2 s"),
    "exits": ("exception", "SystemExit: 3"),
    "exiting_value": ("exception", "SystemExit: 3"),
    "leaves": ("killed", "its process ended with exit status 7"),
    "crashes": ("killed", "its process was ended by SIGSEGV"),
    "ends_its_keeper": ("killed", "its process ended"),
    "ends_its_group": ("killed", "its process ended"),
    "closes_everything": ("killed", "its process ended"),
    "very_long": ("exception", "ValueError: xxx"),
}


# Of several that hang or end alike, one is tested every day.
ALIKE = (
    "hung_pool", "hung_thread_of_a_loop", "swallows", "hanging_value", "exiting_value", "leaves",
    "ends_its_group",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.extended] * (n in ALIKE)) for n in BAD]
)
def test_a_call_that_goes_wrong_is_one_outcome_and_leaves_nothing(name, made):
    outcome, says = BAD[name]
    function = made(name)
    before = set(descendants(os.getpid()))
    threads = threading.active_count()
    begun = time.monotonic()
    result = judge(function)
    assert result.row_outcomes == (outcome,) * 3 and np.isnan(result.rewards).all()
    assert says in result.first_traceback and len(result.first_traceback) < 30_000
    # Deadline, grace, and a start on a machine that has other things to do.
    assert time.monotonic() - begun < 10
    function.close()
    left = set(descendants(os.getpid())) - before
    assert all(gone(pid) for pid in left) and threading.active_count() <= threads


HANG = pytest.mark.extended


@pytest.mark.parametrize(
    "response, outcome",
    [pytest.param("hang", "timeout", marks=HANG), ("leave", "killed")],
)
def test_after_one_call_has_failed_the_next_is_answered(response, outcome, made):
    function = made("as_asked", 2.0)
    assert judge(function, response).row_outcomes == (outcome,)
    assert judge(function, "fine").rewards.tolist() == [1.0]


@pytest.mark.parametrize("runs_in", ["process", "thread"])
def test_values_that_raise_when_read_leave_their_sequence_unscored(runs_in, made):
    result = judge(made("raising_values", 20, runs_in=runs_in))
    assert result.row_outcomes == ("wrong_type", "wrong_type", "ok")
    assert "something that repr cannot show (Raises)" in result.first_traceback


def test_in_a_thread_what_is_late_counts_for_nothing(made):
    # It lets nobody else run for longer than its deadline, and then returns.
    def slow(prompts, responses, **columns):
        re.match(r"(a+)+$", "a" * 22 + "b")
        return [1.0] * 3

    result = judge(RewardFunction(slow, 0.01))
    assert result.row_outcomes == ("timeout",) * 3 and np.isnan(result.rewards).all()


def test_the_same_process_answers_call_after_call_without_jax(made):
    function = made("where", 20)
    first, second = judge(function, "r"), judge(function, "r")
    assert first.named["pid"] == second.named["pid"] != os.getpid() % 10**6
    assert first.named["jax"] == 0
    counting = made("good", 20)
    assert [judge(counting).rewards[0] for _ in range(3)] == [1, 2, 3]
    assert counting.function.__globals__["calls"] == []  # here it was never called


def test_a_fork_and_another_folder_are_the_processes_own(made):
    here = os.getcwd()
    assert judge(made("changes_folder", 20)).row_outcomes == ("ok",) * 3
    assert os.getcwd() == here and "HJAX_A_REWARD_WAS_HERE" not in os.environ
    forking = made("forks", 20)
    one, two = judge(forking), judge(forking)
    assert one.row_outcomes == ("ok",) * 3 and (one.rewards == two.rewards).all()


@pytest.mark.parametrize("response", [pytest.param("hang", marks=HANG), "leave"])
def test_processes_that_it_started_end_with_it(response, made, folder):
    (folder / "pids").unlink(missing_ok=True)
    function = made("leaves_processes", 2.0)
    result = judge(function, response)
    assert result.row_outcomes == ("timeout" if response == "hang" else "killed",)
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)


def test_what_it_prints_is_printed_here(made, capfd):
    function = made("prints", 20)
    judge(function)
    function.close()
    out, err = capfd.readouterr()
    assert "said by a reward" in out and "an error of it" in err


@pytest.mark.parametrize("name, value", [("locked", 2.0), ("partial", 1.0)])
def test_whatever_a_file_holds_is_made_again_there(name, value, made):
    function = made(name, 20)
    assert judge(function).rewards.tolist() == [value] * 3
    assert function._isolated is not None


def test_what_has_no_name_runs_in_a_thread_and_the_log_says_so_once(caplog, made):
    seen = []
    function = RewardFunction(lambda p, r, **c: seen.append(threading.get_ident()) or [1.0] * 3)
    with caplog.at_level(logging.WARNING):
        judge(function), judge(function)
    assert len(seen) == 2 and threading.get_ident() not in seen
    [line] = [r.getMessage() for r in caplog.records]
    assert "reward function <lambda> runs in a thread" in line and "path.py:name" in line
    caplog.clear()
    # On request, and hjax's own: nothing is said.
    from hjax.data.tasks import get_task

    on_request, own = made("good", 20, runs_in="thread"), RewardFunction(get_task("sorting").reward)
    with caplog.at_level(logging.WARNING):
        assert judge(on_request).row_outcomes == ("ok",) * 3
        own(["1>"], ["1"], {"answer": ["1"]}, [[1]], [[1]])
    assert not caplog.records and on_request._isolated is None and own._isolated is None
    # A call that cannot be written down, too.
    function = made("good", 20)
    with caplog.at_level(logging.WARNING):
        result = function(["p"], ["r"], {"lock": [threading.Lock()]}, [[1]], [[2]])
    assert result.row_outcomes == ("ok",)
    assert "cannot be serialized" in caplog.records[0].getMessage()


def test_a_reward_function_travels_without_its_process(made):
    function = made("good", 20)
    judge(function)
    from hjax.controller.messages import deserialize as read
    from hjax.controller.messages import serialize as write

    again = read(write(function))
    assert judge(again).rewards.tolist() == [1.0] * 3  # a process of its own
    again.close()
    with pytest.raises(Exception, match="hjax_user|pickle|local object"):
        pickle.dumps(RewardFunction(lambda p, r, **c: []))


def test_results_are_written_down_without_pickle():
    nan = np.nan
    for result in (
        RewardResult(np.float32([1, nan]), ("ok", "none"), "a problem"),
        RewardResult(np.float32([3, nan, 1]), ("ok", "nan", "ok"), None,
                     {"a": np.float32([1, nan, 1]), "b": np.float32([2, nan, nan])},
                     (np.float32([1, 2]), None, np.float32([])),
                     {"c": np.float32([4, nan, 5])}),
    ):  # fmt: skip
        again = from_bytes(to_bytes(result))
        assert again.row_outcomes == result.row_outcomes
        assert again.first_traceback == result.first_traceback
        np.testing.assert_array_equal(again.rewards, result.rewards)
        assert list(again.named) == list(result.named)
        for name, values in result.named.items():
            np.testing.assert_array_equal(again.named[name], values)
        assert list(again.metrics) == list(result.metrics)
        for name, values in result.metrics.items():
            np.testing.assert_array_equal(again.metrics[name], values)
        for one, other in zip(again.tokens, result.tokens, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                np.testing.assert_array_equal(one, other)


def test_it_ends_with_whoever_started_it(folder):
    """Also where that one is killed in the middle of a call that lets nobody run."""
    script = (
        "import sys, threading\n"
        "from hjax.rewards.function import RewardFunction, load_function\n"
        f"function = RewardFunction(load_function('{folder}/mine.py:holds_the_interpreter'), 60)\n"
        "function.start()\n"
        "print(function._isolated.pid(), flush=True)\n"
        "function(['p'], ['r'], {}, [[1]], [[2]])\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        keeper = int(started.stdout.readline())
        deadline = time.monotonic() + 30
        while not (below := descendants(keeper)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        started.kill()
    assert all(gone(pid) for pid in [keeper, *below])


def test_named_rewards_whose_sum_is_too_large_are_refused():
    result = parse_rewards({"a": [6e5, 1.0], "b": [6e5, None]}, [1, 1], "f")
    assert result.row_outcomes == ("wrong_type",) * 2 and np.isnan(result.rewards).all()
    assert "whose sum for a sequence is too large; allowed: numbers from" in result.first_traceback
    result = parse_rewards({"a": [1e6, 1.0], "b": [-1e6, None]}, [1, 1], "f")
    assert result.rewards.tolist() == [0.0, 1.0]


def test_masked_entries_of_an_array_have_no_reward():
    result = parse_rewards(np.ma.array([1.0, 7.0, 3], mask=[0, 1, 0]), [1, 1, 1], "f")
    assert result.row_outcomes == ("ok", "none", "ok")
    assert parse_rewards([np.ma.masked, 2], [1, 1], "f").row_outcomes == ("none", "ok")


def test_a_flood_of_output_is_cut_and_later_output_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(isolated_process, "_OUTPUT_BYTES", 1000)
    monkeypatch.setattr(isolated_process, "_OUTPUT_RATE", 2000)
    read, write = os.pipe()
    printer = threading.Thread(
        target=isolated_process._forward_output, args=(os.fdopen(read, "rb", buffering=0),)
    )
    printer.start()
    for _ in range(100):
        os.write(write, b"b" * 2000)
    time.sleep(0.5)
    os.write(write, b"later")
    os.close(write)
    printer.join(10)
    shown = capsys.readouterr().out
    assert shown.endswith("later")
    assert 1 <= shown.count("prints too much") < 5 and len(shown) < 10_000


def test_an_answer_of_more_bytes_than_it_may_have_is_not_read(monkeypatch):
    monkeypatch.setattr(isolated_process, "_ANSWER_BYTES", 100)
    process = isolated_process.IsolatedProcess("test_rewards_process:long_answers", b"")
    try:
        assert process.call(b"\x10", 20) == b"x" * 16
        with pytest.raises(isolated_process.ProcessDied, match="answered with 200 bytes"):
            process.call(b"\xc8", 20)
        assert process.call(b"\x20", 20) == b"x" * 32
    finally:
        process.close()


def long_answers(setup):
    return lambda request: b"x" * request[0]
