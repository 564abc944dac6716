"""pass@k, majority votes and standard errors: by hand, and by listing every subset."""

import itertools
import math
import random

import pytest

from hjax.rewards.estimators import majority_at_k, mean_over_questions, pass_at_k, powers_of_two


def listed(value, samples, k):
    """The mean of a value over all subsets of k samples."""
    subsets = list(itertools.combinations(samples, k))
    return sum(map(value, subsets)) / len(subsets)


def vote(subset):
    """Whether the commonest answer is right: its expected value where several are."""
    said = [answer for answer, _ in subset if answer is not None]
    if not said:
        return 0.0
    most = max(map(said.count, said))
    tied = {answer for answer in said if said.count(answer) == most}
    return sum(RIGHT[answer] for answer in tied) / len(tied)


RIGHT = {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0, "e": 0.0}


@pytest.mark.parametrize("samples, right", [(1, 0), (1, 1), (5, 0), (5, 2), (6, 5), (8, 8)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(samples, right):
    verdicts = [i < right for i in range(samples)]
    for k in range(1, samples + 1):
        expected = listed(any, verdicts, k)
        assert pass_at_k(right, samples, k) == pytest.approx(expected, abs=1e-12)
    assert math.isnan(pass_at_k(right, samples, samples + 1))


def test_pass_at_k_by_hand():
    # 2 of 4 right: of the 6 pairs, one has none that is.
    assert pass_at_k(2, 4, 1) == 0.5 and pass_at_k(2, 4, 2) == 5 / 6 and pass_at_k(2, 4, 4) == 1
    # Of 200 with one right, 100 drawn: it is among them in half of the cases.
    assert pass_at_k(1, 200, 100) == 0.5


@pytest.mark.parametrize("seed", range(20))
def test_majority_is_the_mean_over_all_subsets(seed):
    rng = random.Random(seed)
    answers = rng.choices(["a", "b", "c", "d", "e", None], [3, 3, 2, 1, 1, 2], k=8)
    right = [answer is not None and RIGHT[answer] == 1 for answer in answers]
    for k in range(1, 9):
        expected = listed(vote, list(zip(answers, right)), k)
        assert majority_at_k(answers, right, k) == pytest.approx(expected, abs=1e-12)


def test_majority_by_hand():
    right = {"a": True, "b": False, "c": False, None: False}

    def at(k, *answers):
        return majority_at_k(answers, [right[a] for a in answers], k)

    assert at(3, "a", "a", "b") == 1 and at(3, "a", "b", "b") == 0
    assert at(2, "a", "b") == 0.5 and at(3, "a", "b", "c") == pytest.approx(1 / 3)  # ties
    assert at(3, None, None, "a") == 1 and at(2, None, None) == 0  # no vote
    # Pairs of a, a, b: one is both a's, two are ties.
    assert at(2, "a", "a", "b") == pytest.approx((1 + 2 * 0.5) / 3)
    assert math.isnan(at(2, "a"))
    # One answer judged both ways counts by its share.
    assert majority_at_k(["a", "a", "a"], [True, False, False], 3) == pytest.approx(1 / 3)


def test_standard_errors_are_over_questions():
    # Values 0, 1, 1, 0: their variance with n - 1 is 1/3, over 4 questions.
    estimate = mean_over_questions([0.0, 1.0, math.nan, 1.0, 0.0])
    assert estimate.mean == 0.5 and estimate.stderr == pytest.approx(math.sqrt(1 / 3 / 4))
    assert mean_over_questions([0.25]).mean == 0.25 and math.isnan(
        mean_over_questions([0.25]).stderr
    )
    assert math.isnan(mean_over_questions([]).mean)


def test_standard_error_is_the_spread_of_repeated_evaluations():
    rng = random.Random(0)
    draws = [mean_over_questions([rng.random() < 0.3 for _ in range(50)]) for _ in range(2000)]
    mean = sum(d.mean for d in draws) / len(draws)
    spread = math.sqrt(sum((d.mean - mean) ** 2 for d in draws) / (len(draws) - 1))
    claimed = sum(d.stderr for d in draws) / len(draws)
    assert spread == pytest.approx(math.sqrt(0.3 * 0.7 / 50), rel=0.05)
    assert claimed == pytest.approx(spread, rel=0.05)


def test_powers_of_two():
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
