"""Evaluation estimators: pass@k, majority voting (maj@k), standard errors over questions.

A measure has one value per question, computed from that question's samples alone. Mean and standard
error are over questions, because the samples of one question are not independent.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean and standard error of a measure over questions.

    Attributes:
      mean: of the questions' values; NaN without questions.
      stderr: standard deviation of the values (n - 1 below) / sqrt(n); NaN with fewer than two.
    """

    mean: float
    stderr: float


def mean_over_questions(values: Sequence[float]) -> Estimate:
    """Mean and standard error of one value per question; NaN ones are left out."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    mean = float(known.mean()) if known.size else math.nan
    spread = float(known.std(ddof=1) / math.sqrt(known.size)) if known.size > 1 else math.nan
    return Estimate(mean, spread)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to ``limit``."""
    return [2**i for i in range(limit.bit_length())]


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """pass@k: the probability that at least one of ``k`` samples of a question is correct.

    Unbiased, 1 - C(n - c, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), section 2.1.

    Args:
      correct: number of correct samples, c.
      samples: number of samples, n; the result is NaN where it is below ``k``.
      k: number of samples drawn, without replacement.
    """
    if samples < k:
        return math.nan
    return float(1 - Fraction(math.comb(samples - correct, k), math.comb(samples, k)))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """maj@k: the probability that the most common answer of ``k`` samples is correct.

    The exact mean over all subsets of ``k`` samples (with k = n the vote of all, "maj@n" of Wang et
    al. 2023, arXiv:2203.11171). Ties in a subset are broken at random, in expectation. None casts
    no vote, and a subset without votes is wrong. An answer is correct to the degree of the share of
    its samples that are.

    Args:
      answers: one per sample.
      correct: whether each sample is correct.
      k: number of samples drawn, without replacement; the result is NaN with fewer samples.
    """
    if len(answers) < k:
        return math.nan
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_correct in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(is_correct))
    abstentions = sum(answer is None for answer in answers)
    total = Fraction(0)
    for answer, outcomes in votes.items():
        accuracy = Fraction(sum(outcomes), len(outcomes))
        if not accuracy:
            continue
        others = [len(v) for other, v in votes.items() if other != answer]
        for drawn in range(1, min(len(outcomes), k) + 1):
            subsets = _count_other_draws(others, abstentions, drawn, k - drawn)
            total += math.comb(len(outcomes), drawn) * accuracy * subsets
    return float(total / math.comb(len(answers), k))


def _count_other_draws(others: Sequence[int], abstentions: int, drawn: int, rest: int) -> Fraction:
    """Number of ways to draw ``rest`` further samples with no answer more than ``drawn`` times.

    A way with j ties (other answers that occur ``drawn`` times) counts 1 / (j + 1).
    """
    ways = {(0, 0): 1}  # (samples, ties) -> number of ways
    for size in others:
        extended: dict[tuple[int, int], int] = {}
        for (used, ties), count in ways.items():
            for more in range(min(size, drawn, rest - used) + 1):
                key = used + more, ties + (more == drawn)
                extended[key] = extended.get(key, 0) + count * math.comb(size, more)
        ways = extended
    terms = (
        Fraction(count * math.comb(abstentions, rest - used), ties + 1)
        for (used, ties), count in ways.items()
    )
    return sum(terms, Fraction(0))
