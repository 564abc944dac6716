"""Config keys (default, meaning) and validators of their values."""

import dataclasses
import math
import re
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


def deadline(least: float = 0) -> Rule:
    """A time to wait, in seconds; the system's calls take no more than some hundred years."""
    said = f"from {least:g}" if least else "above 0"
    return Rule(f"{said} to 1e8 seconds", lambda x: (x >= least if least else x > 0) and x <= 1e8)


def finite() -> Rule:
    """Any finite number."""
    return Rule("a finite number", math.isfinite)


def below_one() -> Rule:
    """A decay rate: from 0 to just below 1, also as float32."""
    return Rule("from 0 to below 1, at most 0.9999999", lambda x: bool(0 <= np.float32(x) < 1))


# A number that ``int`` takes, in a regular expression; ``\d`` is other alphabets' digits too.
DIGITS = "[0-9]{1,18}"


def whole_number(text: str) -> int | None:
    """The number of a text of 1 to 18 digits 0 to 9; None: it is something else.

    ``isdecimal`` is true of other alphabets' digits too, and ``int`` refuses 5,000 digits.
    """
    return int(text) if re.fullmatch(DIGITS, text) else None


def number_or_auto() -> Rule:
    """A whole number of 0 or more, as text, or the word ``auto``."""
    return Rule("auto, or 0 or more", lambda x: x == "auto" or whole_number(x) is not None)


def one_of(*allowed: str) -> Rule:
    """One of these words."""
    return Rule("one of " + ", ".join(allowed), lambda x: x in allowed)
