"""What the samples of some questions say: pass@k, majority votes, standard errors over questions.

A measure has one value per question, which follows from that question's samples alone; the mean
and its standard error are over questions. So the samples of one question, which are alike, do not
count as so many independent ones.
"""

import dataclasses
import math
from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A measure over questions.

    Attributes:
      mean: of the questions' values; NaN without any.
      stderr: standard deviation of the values (n - 1 below) / sqrt(n); NaN with fewer than two.
    """

    mean: float
    stderr: float


def over_questions(values: Sequence[float]) -> Estimate:
    """Mean and standard error of one value per question; NaN ones are left out."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    mean = float(known.mean()) if known.size else math.nan
    spread = float(known.std(ddof=1) / math.sqrt(known.size)) if known.size > 1 else math.nan
    return Estimate(mean, spread)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to ``limit``."""
    return [2**i for i in range(limit.bit_length())]


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The probability that of ``k`` of a question's samples at least one is right.

    Unbiased, 1 - C(n - c, k) / C(n, k): Chen et al. 2021 (arXiv:2107.03374), section 2.1.

    Args:
      right: how many of the samples are right, c.
      samples: n; NaN is returned where it is below ``k``.
      k: how many are drawn, without putting back.
    """
    if samples < k:
        return math.nan
    return float(1 - Fraction(math.comb(samples - right, k), math.comb(samples, k)))


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """The probability that the commonest answer of ``k`` of a question's samples is right.

    The mean over all subsets of ``k`` samples, counted and not drawn (with k = n the vote of all,
    "maj@n" of Wang et al. 2023, arXiv:2203.11171). Of answers that are equally common in a subset
    one is taken at random: their expected value counts. None casts no vote, and a subset of such
    samples alone is wrong. An answer counts as right by the share of its samples that are.

    Args:
      answers: of the samples, one each.
      right: whether each is right.
      k: how many are drawn, without putting back; NaN is returned with fewer samples.
    """
    if len(answers) < k:
        return math.nan
    votes: dict[Hashable, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(bool(is_right))
    silent = sum(answer is None for answer in answers)
    total = Fraction(0)
    for answer, verdicts in votes.items():
        worth = Fraction(sum(verdicts), len(verdicts))
        if not worth:
            continue
        others = [len(v) for other, v in votes.items() if other != answer]
        for drawn in range(1, min(len(verdicts), k) + 1):
            ways = _ways_beside(others, silent, drawn, k - drawn)
            total += math.comb(len(verdicts), drawn) * worth * ways
    return float(total / math.comb(len(answers), k))


def _ways_beside(others: Sequence[int], silent: int, drawn: int, rest: int) -> Fraction:
    """Ways to draw ``rest`` more samples of which no answer comes more than ``drawn`` times.

    A way in which j others come as often counts 1 / (j + 1).
    """
    ways = {(0, 0): 1}  # (samples, answers that come as often): ways
    for size in others:
        after: dict[tuple[int, int], int] = {}
        for (taken, ties), count in ways.items():
            for more in range(min(size, drawn, rest - taken) + 1):
                key = taken + more, ties + (more == drawn)
                after[key] = after.get(key, 0) + count * math.comb(size, more)
        ways = after
    return sum(
        (
            Fraction(count * math.comb(silent, rest - taken), ties + 1)
            for (taken, ties), count in ways.items()
        ),
        Fraction(0),
    )
