"""Config keys (default, meaning) and validators of their values."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on one value; ``text`` completes the sentence 'must be ...'."""

    text: str
    holds: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Key:
    """One config key.

    Attributes:
      default: its value if nobody sets it; determines the key's type.
      doc: meaning and unit; printed in docs/config.md.
      rule: allowed values; None: all of the type.
    """

    default: Any
    doc: str = ""
    rule: Rule | None = None


def at_least(low: float) -> Rule:
    """A finite number of ``low`` or more."""
    return Rule(f"{low:g} or more", lambda x: math.isfinite(x) and x >= low)


def above(low: float) -> Rule:
    """A finite number larger than ``low``."""
    return Rule(f"larger than {low:g}", lambda x: math.isfinite(x) and x > low)


def between(low: float, high: float) -> Rule:
    """A number from ``low`` to ``high``, both allowed."""
    return Rule(f"from {low} to {high}", lambda x: low <= x <= high)


def finite() -> Rule:
    """Any finite number."""
    return Rule("a finite number", math.isfinite)


def below_one() -> Rule:
    """A decay rate: from 0 to just below 1, also as float32."""
    return Rule("from 0 to below 1, at most 0.9999999", lambda x: bool(0 <= np.float32(x) < 1))


def number_or_auto() -> Rule:
    """A whole number of 0 or more, as text, or the word ``auto``."""
    return Rule("auto, or 0 or more", lambda x: x == "auto" or x.isdecimal())


def one_of(*allowed: str) -> Rule:
    """One of these words."""
    return Rule("one of " + ", ".join(allowed), lambda x: x in allowed)
