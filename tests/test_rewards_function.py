"""Reward functions: found in files, called under a deadline, every outcome under its own name."""

import asyncio
import functools
import threading
import time

import numpy as np
import pytest

from hjax.errors import ConfigError, RunError
from hjax.rewards.function import RewardFunction, check_unscored, load_function
from hjax.rewards.reward_results import OUTCOMES, RewardResult, parse_rewards


def judge(function, count=2, timeout_seconds=5.0, **columns):
    """Runs a function over `count` sequences "r0", "r1", ... of prompts "p0", "p1", ..."""
    return RewardFunction(function, timeout_seconds)(
        [f"p{i}" for i in range(count)],
        [f"r{i}" for i in range(count)],
        columns,
        [[i] for i in range(count)],
        [[10 + i] for i in range(count)],
    )


def nonzero(result):
    assert tuple(result.outcomes) == OUTCOMES
    return {name: n for name, n in result.outcomes.items() if n}


def test_what_a_function_is_given():
    seen = {}

    def reward(prompts, responses, **columns):
        seen.update(prompts=prompts, responses=responses, **columns)
        return [0.5, 1]

    result = judge(reward, answer=["x", "y"])
    assert seen == {
        "prompts": ["p0", "p1"], "responses": ["r0", "r1"], "answer": ["x", "y"],
        "prompt_tokens": [[0], [1]], "response_tokens": [[10], [11]],
    }
    np.testing.assert_array_equal(result.rewards, np.float32([0.5, 1.0]))
    assert result.rewards.dtype == np.float32
    assert nonzero(result) == {"ok": 2} and result.unscored == 0 and result.first_traceback is None


def test_numbers_of_every_kind_count():
    import jax.numpy as jnp

    values = [True, 2, np.float64(0.25), np.bool_(False), np.array(3), jnp.float32(1.5)]
    result = judge(lambda p, r, **c: values, count=6)
    np.testing.assert_array_equal(result.rewards, np.float32([1, 2, 0.25, 0, 3, 1.5]))
    for array in (np.arange(3), jnp.arange(3.0), (0, 1, 2)):
        np.testing.assert_array_equal(judge(lambda p, r, a=array, **c: a, 3).rewards, [0, 1, 2])


def test_odd_entries_leave_only_their_sequence_unscored():
    values = [1.0, None, float("nan"), "good", float("inf"), 1e39, {1.0}, 10**400]
    result = judge(lambda p, r, **c: values, count=8)
    assert nonzero(result) == {"ok": 1, "none": 1, "nan": 2, "wrong_type": 4}
    np.testing.assert_array_equal(np.isnan(result.rewards), [False] + [True] * 7)
    assert "returned 'good' (str) for sequence 3; allowed: a number, None" in result.first_traceback
    assert result.unscored == 7 / 8


@pytest.mark.parametrize("large", [1e38, -1e38, 1e8 + 1, 10**400, [1e6, 1e6], [0.0, -1e7]])
def test_rewards_too_large_to_be_told_apart_are_refused_by_their_bound(large):
    result = parse_rewards([large, 1e6, [-5e5, -5e5]], [2, 1, 2], "f")
    assert result.row_outcomes == ("wrong_type", "ok", "ok")
    assert result.rewards[1:].tolist() == [1e6, -1e6]
    assert "for sequence 0; allowed: numbers from -1e+06 to 1e+06" in result.first_traceback


# What a function returns for responses of 2, 1 and 3 tokens: the rewards, how they came out, those
# of each name, and by token.
NAN = float("nan")
SEVERAL = {
    "by token": (
        [[0.5, 1.0], (2.0,), np.ones(3)],
        ([1.5, 2, 3], ["ok"] * 3, {}, [[0.5, 1, 0], [2, 0, 0], [1, 1, 1]]),
    ),
    "some by token": (
        [[0.5, 1.0], 2.0, None],
        ([1.5, 2, NAN], ["ok", "ok", "none"], {}, [[0.5, 1, 0], [2, 0, 0], [0, 0, 0]]),
    ),
    "too few, no number, no reward": (
        [[0.5], ["x"], [1.0, None, 1.0]],
        ([NAN] * 3, ["wrong_length", "wrong_type", "wrong_type"], {}, None),
    ),
    "not finite": ([[1.0, NAN], 1.0, 1.0], ([NAN, 1, 1], ["nan", "ok", "ok"], {}, None)),
    "named": (
        {"a": [1.0, 2.0, None], "b": [0.5, None, None]},
        ([1.5, 2, NAN], ["ok", "ok", "none"], {"a": [1, 2, NAN], "b": [0.5, NAN, NAN]}, None),
    ),
    "named by token": (
        {"a": [[1.0, 1.0], 2.0, 3.0], "b": [1.0, None, 1.0]},
        (
            [3, 2, 4], ["ok"] * 3, {"a": [2, 2, 3], "b": [1, NAN, 1]},
            [[1, 2, 0], [2, 0, 0], [0, 0, 4]],
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SEVERAL)
def test_rewards_by_name_and_by_token(case):
    returned, (rewards, each, named, by_token) = SEVERAL[case]
    function = RewardFunction(lambda prompts, responses, **columns: returned)
    tokens = [[1, 2], [3], [4, 5, 6]]
    result = function(["p"] * 3, ["r"] * 3, {}, [[0]] * 3, tokens)
    halves = RewardResult.concatenated([RewardResult.concatenated([result.row(0)]), result.row(1)])
    for made, count in ((result, 3), (halves, 2)):
        np.testing.assert_array_equal(made.rewards, np.float32(rewards[:count]))
        assert list(made.row_outcomes) == each[:count]
        assert set(made.named) == set(named)
        for name, values in named.items():
            np.testing.assert_array_equal(made.named[name], np.float32(values[:count]))
    table = result.by_token([2, 1, 3], 3)
    assert (table is None) == (by_token is None)
    if by_token is not None:
        np.testing.assert_array_equal(table, np.float32(by_token))


def raises(prompts, responses, **columns):
    raise KeyError("ground_truth")


@pytest.mark.parametrize("function, outcome, says", [
    (raises, "exception", "KeyError: 'ground_truth'"),
    (lambda p, r, **c: [1.0], "wrong_length", "returned 1 rewards for 2 sequences"),
    (lambda p, r, **c: "good", "wrong_type", "returned 'good' (str); it must return a list"),
    (lambda p, r, **c: None, "wrong_type", "returned None (NoneType)"),
    (lambda p, r, **c: {0: 1.0, 1: 2.0}, "wrong_type", "a reward named 0; a name must be text"),
    (lambda p, r, **c: {"mean": [1.0, 2.0]}, "wrong_type", "named 'mean'; a name must be text"),
    (lambda p, r, **c: {}, "wrong_type", "returned an empty dict"),
    (lambda p, r, **c: {"a": [1.0]}, "wrong_length", "returned for 'a' 1 rewards for 2"),
    (lambda p, r, **c: np.float32(1), "wrong_type", "it must return a list"),
    (lambda p, r, **c: (x for x in (1, 2)), "wrong_type", "(generator)"),
    (lambda p, r, **c: exit(3), "exception", "SystemExit: 3"),
])
def test_failures_of_the_whole_call(function, outcome, says):
    result = judge(function)
    assert nonzero(result) == {outcome: 2} and np.isnan(result.rewards).all()
    assert says in result.first_traceback


def test_traceback_shows_the_users_line_only():
    text = judge(raises).first_traceback
    assert 'raise KeyError("ground_truth")' in text and "rewards/function.py" not in text


async def slow_but_sure(prompts, responses, **columns):
    await asyncio.sleep(0.01)
    return [float(len(r)) for r in responses]


class Callable:
    async def __call__(self, prompts, responses, **columns):
        return await slow_but_sure(prompts, responses)


@pytest.mark.parametrize("function", [
    slow_but_sure, functools.partial(slow_but_sure, level=1), Callable(),
])
def test_async_functions(function):
    np.testing.assert_array_equal(judge(function).rewards, [2.0, 2.0])


def test_async_function_inside_a_running_loop():
    # As in a notebook, whose cells run inside an event loop.
    async def cell():
        return judge(slow_but_sure)

    assert nonzero(asyncio.run(cell())) == {"ok": 2}


def test_deadline_of_a_sync_function():
    stop = threading.Event()

    def stuck(prompts, responses, **columns):
        stop.wait(10)
        return [1.0, 1.0]

    start = time.monotonic()
    result = judge(stuck, timeout_seconds=0.1)
    stop.set()
    assert time.monotonic() - start < 2
    assert nonzero(result) == {"timeout": 2}
    assert "stuck took longer than 0.1 s; its thread hjax-reward-" in result.first_traceback


def test_deadline_cancels_an_async_function():
    cancelled = threading.Event()

    async def stuck(prompts, responses, **columns):
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    assert nonzero(judge(stuck, timeout_seconds=0.1)) == {"timeout": 2}
    assert cancelled.wait(2)


def test_a_functions_own_timeout_error_is_an_exception():
    async def own(prompts, responses, **columns):
        raise TimeoutError("the grader's server")

    assert nonzero(judge(own)) == {"exception": 2}


def test_no_sequences():
    result = judge(raises, count=0)
    assert result.rewards.shape == (0,) and result.unscored == 0


def test_too_many_unscored_stop_the_run_with_the_first_traceback():
    result = judge(lambda p, r, **c: [1.0, 2.0, None, "x"], count=4)
    check_unscored(result, 0.5)
    with pytest.raises(RunError, match=r"2 of 4 sequences have no reward \(none 1, wrong_type 1\)"):
        check_unscored(result, 0.49)
    with pytest.raises(RunError, match=r"(?s)exception 2.*KeyError: 'ground_truth'"):
        check_unscored(judge(raises), 0.1)


@pytest.mark.parametrize("function", [
    lambda prompts, responses: [], lambda prompts, **columns: [], lambda: [],
])
def test_signature_that_cannot_work(function):
    with pytest.raises(ConfigError, match=r"must take \(prompts, responses, \*\*columns\)"):
        RewardFunction(function)


def test_signature_with_named_columns():
    result = judge(lambda p, r, answer, **c: [a == s for a, s in zip(answer, r)], answer=["r0", ""])
    np.testing.assert_array_equal(result.rewards, [1.0, 0.0])


def test_deadline_must_be_positive():
    with pytest.raises(ConfigError, match="reward.timeout_seconds=0: it must be positive"):
        RewardFunction(raises, timeout_seconds=0)


def test_function_from_a_file_with_a_neighbour(tmp_path):
    (tmp_path / "neighbour_of_reward.py").write_text("BONUS = 2.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_reward import BONUS\n"
        "def reward(prompts, responses, **columns):\n    return [BONUS for _ in responses]\n"
    )
    function = load_function(f"{tmp_path}/mine.py:reward")
    np.testing.assert_array_equal(judge(function).rewards, [2.0, 2.0])


def test_files_of_the_same_name_do_not_hide_each_other(tmp_path):
    for n in (1, 2):
        (tmp_path / str(n)).mkdir()
        (tmp_path / str(n) / "mine.py").write_text(f"def reward(): return {n}\n")
    one, two = (load_function(f"{tmp_path}/{n}/mine.py:reward") for n in (1, 2))
    assert (one(), two()) == (1, 2)


@pytest.mark.parametrize("content, name, message", [
    (None, "reward", "there is no file .*mine.py"),
    ("def rewards(): pass\n", "reward", "mine.py has no reward; did you mean rewards. it has rew"),
    ("x = 1\n", "y", "has no y; it has none"),
    ("reward = 3\n", "reward", r"reward is 3 \(int\), not a function"),
    ("x = 1\nimport no_such_module\n", "reward", "mine.py:2: ModuleNotFoundError"),
    ("x = 1\n\ndef f(:\n", "reward", "mine.py:3: SyntaxError"),
    ("def f():\n  return 1 / 0\n\nf()\n", "reward", "mine.py:2: ZeroDivisionError"),
])
def test_files_that_do_not_work(tmp_path, content, name, message):
    if content is not None:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_function(f"{tmp_path}/mine.py:{name}")
    assert "\n" not in str(caught.value) and "reward.function=" in str(caught.value)


@pytest.mark.parametrize("spec", ["mine.py", "mine:reward", ":reward", "mine.py:", ""])
def test_spec_that_is_none(spec):
    with pytest.raises(ConfigError, match="cost.function=.* must look like path.py:name"):
        load_function(spec, key="cost.function")
