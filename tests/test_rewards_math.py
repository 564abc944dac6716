"""The grader of mathematical answers: what is found, what is equal, what is refused."""

import importlib.util
import os
from fractions import Fraction

import pytest

from hjax.errors import DataError
from hjax.isolated_process import IsolatedProcess
from hjax.machine import descendants
from hjax.rewards import math_answers
from hjax.rewards.function import RewardFunction, load_function
from hjax.rewards.math_answers import extract_answer, parse_number, reward

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify (hjax[math]) is missing"
)


@pytest.mark.parametrize(
    "text, answer",
    [
        ("9 * 2 = $18.\n#### 18", "18"),
        ("#### 18\nand more", "18"),
        ("#### 1\n#### 2", "2"),
        (r"so \boxed{7} it is", "7"),
        (r"\boxed{1} or rather \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"#### 3, that is \boxed{4}", "4"),
        (r"\boxed{4}" + "\n#### 3", "3"),
        (r"\boxed{5} and then \boxed{6", "5"),  # the last was cut off
        ("it is 18", None),
        ("####", None),
        (r"\boxed{}", None),
        ("", None),
    ],
)
def test_what_is_found(text, answer):
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    "text, value",
    [
        ("18", 18), ("-3", -3), ("+4", 4), ("18.0", 18), (".5", Fraction(1, 2)), ("18.", 18),
        ("70,000", 70000), ("1{,}234.5", Fraction(2469, 2)), ("1,23", None), (r"1\,000", 1000),
        ("$18", 18), (r"\$18", 18), ("-$5", -5), ("£1,000", 1000), ("50%", 50), (r"50\%", 50),
        ("3/4", Fraction(3, 4)), (r"\frac{3}{4}", Fraction(3, 4)), (r"-\dfrac34", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)), ("1/0", None), ("2e3", 2000), ("x = 18", 18),
        (r"18\text{ cm}", 18), ("18 eggs a day", 18), ("**18**", 18), (r"$18$", 18),
        (r"90^\circ", 90), (r"\(18\)", 18),
        # Not numbers: products, lists, mixed numbers, words.
        ("2x", None), ("2 pi", None), (r"2\pi", None), ("3 4", None), ("3 1/2", None),
        ("1, 2", None), ("(1,2)", None), (r"\sqrt{4}", None), ("eighteen", None), ("", None),
    ],
)  # fmt: skip
def test_what_is_a_number(text, value):
    assert parse_number(text) == value


def test_gsm8k_math_and_verls_columns():
    said = ["#### 18", r"\boxed{0.5}", "18", "#### 19"]
    assert reward([""] * 4, said, answer=["6 * 3 = 18\n#### 18", "1/2", "18", 18]) == [1, 1, 0, 0]
    solutions = [r"Thus \boxed{18}.", r"\boxed{\frac12}", r"\boxed{18}", r"\boxed{19}"]
    assert reward([""] * 4, said, solution=solutions) == [1, 1, 0, 1]
    truths = [{"ground_truth": "18", "style": "rule"}] * 4
    assert reward([""] * 4, said, reward_model=truths) == [1, 0, 0, 0]


def test_answers_to_vote_with():
    texts = ["#### 18.0", r"\boxed{18}", r"\boxed{2 x}", "none", r"\boxed{\frac{2}{4}}"]
    assert reward.answers(texts) == ["18", "18", "2x", None, "1/2"]


@pytest.mark.parametrize(
    "columns, line",
    [
        ({"level": [1]}, "no column with right answers, one of answer, solution, reward_model"),
        ({"answer": ["1", None]}, "math: answer of row 2 is None; it must be text or a number"),
        ({"answer": [" "]}, "math: answer of row 1 is empty"),
        ({"reward_model": [{"style": "rule"}]}, "math: reward_model of row 1 is None"),
    ],
)
def test_data_without_answers_is_refused(columns, line):
    with pytest.raises(DataError, match=line) as caught:
        math_answers.targets(columns)
    assert "\n" not in str(caught.value)


def test_expressions_need_math_verify(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert math_answers.targets({"answer": ["1/2"]}) == ["1/2"]
    with pytest.raises(DataError, match=r"row 1: 'x\^2' is not a plain number.*hjax\[math\]"):
        math_answers.targets({"answer": ["x^2"]})


def test_a_run_finds_it_as_a_reward_function():
    judge = RewardFunction(load_function("math_answers.py:reward"))
    result = judge(["q"] * 2, ["#### 4", "4"], {"answer": ["#### 4"] * 2}, [[1]] * 2, [[2]] * 2)
    assert result.rewards.tolist() == [1.0, 0.0] and result.outcomes["ok"] == 2


@needs_math_verify
def test_expressions_have_the_same_value_or_not():
    right = [r"\boxed{x^2+2x+1}", r"\frac{\sqrt{2}}{2}", r"\{1,2\}", "[0,1)", r"\pi"]
    said = ["(x+1)^2", r"\frac{1}{\sqrt{2}}", r"\{2,1\}", "[0,1]", "3.14159"]
    judge = RewardFunction(reward)  # in a thread, as in a run
    boxed, tokens = [rf"\boxed{{{s}}}" for s in said], [[1]] * 5
    result = judge([""] * 5, boxed, {"answer": right}, tokens, tokens)
    assert result.rewards.tolist() == [1, 1, 1, 0, 0], result.first_traceback


# Stands in for the library, and hangs as very large numbers make it hang.
STAND_IN = """
import os, time
def parse(text):
    if "slow" in text:
        if os.fork() == 0:  # what it has started hangs as well
            time.sleep(600)
        time.sleep(600)
    if "ends" in text: os._exit(3)
    if "fails" in text: raise ValueError(text)
    return text
def verify(right, answer): return right == answer
"""


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """`same` with a stand-in for the library, and the process that it runs in."""
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(math_answers, "COMPARISON_SECONDS", 0.5)
    apart = IsolatedProcess("hjax.rewards.math_answers:make_comparer", b"")
    monkeypatch.setattr(math_answers, "_comparisons", apart)
    yield math_answers.is_equivalent, apart
    apart.close()


def test_what_takes_for_ever_is_ended_and_counts_as_different(compared):
    same, apart = compared
    assert same("x", "x") and not same("x", "y") and not same("x", "fails")
    first, below = apart.pid(), descendants(apart.pid())
    assert below and same("x", "x") and apart.pid() == first  # one that fails ends nothing
    assert not same("x", "slow") and not set(descendants(os.getpid())) & {first, *below}
    assert same("x", "x") and apart.pid() != first
    assert not same("x", "ends") and same("x", "x")


def test_a_library_that_does_not_start_is_said(compared, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no sympy here')")
    with pytest.raises(RuntimeError, match="math-verify does not start: ImportError: no sympy"):
        compared[0]("x", "y")
