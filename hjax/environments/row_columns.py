"""Columns of a task's row that say how an environment plays; a row may lack them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hjax.errors import DataError, short_repr


def number_column(task: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """A row's number; ``default`` where it has none.

    Raises:
      DataError: it is no finite number.
    """
    value = task.get(name)
    if value is None:
        return default
    try:
        number = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{name} is {short_repr(value)}; it must be a finite number")
    return number


def one_of_column(task: Mapping[str, Any], name: str, choices: Sequence[Any]) -> Any:
    """A row's value; the first of ``choices`` where it has none.

    Raises:
      DataError: it is none of them.
    """
    value = task.get(name)
    if value is not None and value not in choices:
        allowed = " or ".join(map(repr, choices))
        raise DataError(f"{name} is {short_repr(value)}; it must be {allowed}")
    return choices[0] if value is None else value
