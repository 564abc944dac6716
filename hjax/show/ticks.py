"""Ticks of an axis: round values, and texts that are exact and so never twice the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import NamedTuple

# Steps between ticks, times a power of ten.
_ROUND = (Decimal("1"), Decimal("2"), Decimal("2.5"), Decimal("5"), Decimal("10"))
# Plain figures are taken up to so many characters and below this size; else the shortest way.
_PLAIN_LENGTH = 6
_PLAIN_BELOW = 10_000
_UNITS = {"T": Decimal("1e12"), "G": Decimal("1e9"), "M": Decimal("1e6"), "k": Decimal(1000)}


class Tick(NamedTuple):
    """A place on an axis and how it is written."""

    value: float
    text: str


def ticks(low: float, high: float, wanted: int, whole: bool = False) -> list[Tick]:
    """Round numbers from ``low`` to ``high``, about ``wanted`` of them and two at least.

    Args:
      low, high: the axis' ends; finite, ``low`` below ``high``.
      wanted: how many parts the axis should have, about.
      whole: only whole numbers, however few.
    """
    bottom, top = Decimal(low), Decimal(high)
    step = _step((top - bottom) / wanted, whole)
    # An end that float arithmetic has moved by a hair still has its tick.
    hair = Decimal("1e-9")
    first = math.ceil(bottom / step - hair)
    last = math.floor(top / step + hair)
    values = [step * number for number in range(first, last + 1)]
    return [Tick(float(v), text) for v, text in zip(values, _texts(values), strict=True)]


def _step(rough: Decimal, whole: bool) -> Decimal:
    """The least round step that is not (much) below ``rough``."""
    if whole and rough < 1:
        return Decimal(1)
    power = Decimal(1).scaleb(rough.adjusted())
    steps = [factor * power for factor in _ROUND]
    if whole:
        steps = [step for step in steps if step == step.to_integral_value()]
    return next(step for step in steps if step >= rough * Decimal("0.999"))


def _texts(values: Sequence[Decimal]) -> list[str]:
    """Exact texts of ticks: plain, in thousands, millions, ..., or with an exponent."""
    plain = _plain(values)
    if _longest(plain) <= _PLAIN_LENGTH and all(abs(value) < _PLAIN_BELOW for value in values):
        return plain
    ways = (plain, [_with_unit(value) for value in values], [_scientific(v) for v in values])
    return min(ways, key=_longest)


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts), default=0)


def _plain(values: Sequence[Decimal]) -> list[str]:
    """All with as many decimals as the one that needs most."""
    decimals = max((len(_exact(value).partition(".")[2]) for value in values), default=0)
    return [f"{value:.{decimals}f}" for value in values]


def _exact(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _with_unit(value: Decimal) -> str:
    for unit, least in _UNITS.items():
        if abs(value) >= least:
            return f"{_exact(value / least)}{unit}"
    return _exact(value)


def _scientific(value: Decimal) -> str:
    if value == 0:
        return "0"
    exponent = value.adjusted()
    return f"{_exact(value.scaleb(-exponent))}e{exponent}"
