"""What a reward function returned, entry by entry: numbers, or sequences of them by token."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hjax.errors import short_repr

# Every way a sequence can come out of being judged. `killed`: the process that ran it ended.
OUTCOMES = (
    "ok", "none", "nan", "exception", "timeout", "wrong_type", "wrong_length", "killed",
)  # fmt: skip
# Other figures of a step's rewards, which a reward of a name cannot be called like.
TAKEN = ("mean", "std", "unscored", "drawn_mean", *OUTCOMES)


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Rewards of a batch and how each came about.

    Attributes:
      rewards: float32 [N], NaN where a sequence is unscored; of several named ones their sum.
      each: how each sequence came out, names of OUTCOMES.
      first_traceback: of the first thing that went wrong (a traceback, or a sentence); None if
        nothing did, or only None and NaN were returned.
      named: by name float32 [N], NaN where that reward says nothing of a sequence.
      tokens: of each sequence None, or float32 [tokens of its response]: their sum is its reward.
    """

    rewards: np.ndarray
    each: tuple[str, ...]
    first_traceback: str | None = None
    named: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tokens: tuple[np.ndarray | None, ...] = ()

    @classmethod
    def joined(cls, some: Sequence[RewardResult]) -> RewardResult:
        """Of the sequences of several, in this order."""
        each = tuple(name for result in some for name in result.each)
        problems = (x.first_traceback for x in some if x.first_traceback is not None)
        rewards = [np.zeros(0, np.float32), *(result.rewards for result in some)]
        names = dict.fromkeys(name for result in some for name in result.named)
        named = {
            name: np.concatenate([x.named.get(name, np.full_like(x.rewards, np.nan)) for x in some])
            for name in names
        }
        tokens = tuple(t for x in some for t in x.tokens or (None,) * len(x.each))
        dense = any(x.tokens for x in some)
        problem = next(problems, None)
        return cls(np.concatenate(rewards), each, problem, named, tokens if dense else ())

    def row(self, number: int) -> RewardResult:
        """Of one sequence."""
        each, problem = self.each[number], self.first_traceback
        at = slice(number, number + 1)
        named = {name: values[at] for name, values in self.named.items()}
        problem = None if each == "ok" else problem
        return RewardResult(self.rewards[at], (each,), problem, named, self.tokens[at])

    @functools.cached_property
    def outcomes(self) -> dict[str, int]:
        """How many sequences came out how, all names of OUTCOMES."""
        return {name: self.each.count(name) for name in OUTCOMES}

    @property
    def unscored(self) -> float:
        """Share of sequences without a reward, 0 to 1."""
        total = sum(self.outcomes.values())
        return (total - self.outcomes["ok"]) / total if total else 0.0

    def by_token(self, lengths: Sequence[int], width: int) -> np.ndarray | None:
        """float32 [N, width], a number's at its response's last token; None: all are numbers.

        Args:
          lengths: tokens of each response.
          width: of the responses' arrays, at least the longest of them.
        """
        if not self.tokens:
            return None
        made = np.zeros((len(self.each), width), np.float32)
        for row, length in enumerate(lengths):
            made[row, :length] = _spread(self, row, length)
        return made


def whole(outcome: str, count: int, problem: str | None) -> RewardResult:
    """Of a call that failed as a whole: all sequences are unscored."""
    return RewardResult(np.full(count, np.nan, np.float32), (outcome,) * count, problem)


def judged(returned: Any, lengths: Sequence[int], name: str) -> RewardResult:
    """What a function returned, for sequences of responses of so many tokens.

    Args:
      returned: a list (or array) with an entry for each sequence, or such lists by name.
      lengths: tokens of each response.
      name: of the function, for what is said of it.
    """
    if not isinstance(returned, Mapping):
        return _list(returned, lengths, f"reward function {name} returned")
    count, results = len(lengths), {}
    for key, values in returned.items():
        if not isinstance(key, str) or not key or key in TAKEN:
            problem = f"reward function {name} returned a reward named {short_repr(key)}"
            allowed = f"a name is text, and none of {', '.join(TAKEN)}"
            return whole("wrong_type", count, f"{problem}; {allowed}")
        results[key] = _list(values, lengths, f"reward function {name} returned for {key!r}")
    if not results:
        problem = f"reward function {name} returned an empty dict; it must name a list at least"
        return whole("wrong_type", count, problem)
    return _summed(results, lengths)


def _summed(results: Mapping[str, RewardResult], lengths: Sequence[int]) -> RewardResult:
    """Several rewards as one: a sequence's is the sum of those that say something of it."""
    each = []
    for outcomes in zip(*(result.each for result in results.values()), strict=True):
        each.append("ok" if "ok" in outcomes else outcomes[0])
    table = np.stack([result.rewards for result in results.values()])
    said = ~np.isnan(table).all(axis=0)
    rewards = np.where(said, np.nansum(table, axis=0), np.nan).astype(np.float32)
    problems = (x.first_traceback for x in results.values() if x.first_traceback is not None)
    named = {key: result.rewards for key, result in results.items()}
    tokens: tuple[np.ndarray | None, ...] = ()
    if any(result.tokens for result in results.values()):
        tokens = tuple(
            np.sum([_spread(result, row, length) for result in results.values()], axis=0)
            for row, length in enumerate(lengths)
        )
    return RewardResult(rewards, tuple(each), next(problems, None), named, tokens)


def _spread(result: RewardResult, row: int, length: int) -> np.ndarray:
    """A sequence's reward by token: a number stands at the last one."""
    values = result.tokens[row] if result.tokens else None
    if values is not None:
        return values
    made = np.zeros(length, np.float32)
    if length:
        made[-1] = np.nan_to_num(result.rewards[row])
    return made


def _list(returned: Any, lengths: Sequence[int], said: str) -> RewardResult:
    count = len(lengths)
    try:
        if hasattr(returned, "__array__") and np.ndim(returned) > 0:  # numpy, jax, torch
            returned = np.asarray(returned)
        elif not isinstance(returned, list | tuple):
            kind = type(returned).__name__
            problem = (
                f"{said} {short_repr(returned)} ({kind}); it must return a list of float or None"
            )
            return whole("wrong_type", count, problem)
        returned = list(returned)
    except Exception as error:  # jax reports a failed computation only here
        return whole("exception", count, f"{said} an unreadable array: {short_repr(error)}")
    if len(returned) != count:
        problem = f"{said} {len(returned)} rewards for {count} sequences; it must return one each"
        return whole("wrong_length", count, problem)
    entries = [
        _entry(value, length, f"for sequence {i}")
        for i, (value, length) in enumerate(zip(returned, lengths, strict=True))
    ]
    rewards = np.array([entry.reward for entry in entries], np.float32)
    tokens = tuple(entry.tokens for entry in entries)
    dense = any(x is not None for x in tokens)
    return RewardResult(
        rewards,
        tuple(entry.outcome for entry in entries),
        next((f"{said} {entry.problem}" for entry in entries if entry.problem), None),
        tokens=tokens if dense else (),
    )


class _Entry(NamedTuple):
    """How a sequence came out, its reward (NaN unless ok), that by token, and what is wrong."""

    outcome: str
    reward: np.float32 = np.float32(np.nan)
    tokens: np.ndarray | None = None
    problem: str = ""


def _entry(value: Any, length: int, of: str) -> _Entry:
    try:
        values = _sequence(value)
        found = _one(value) if values is None else _dense(values, length)
    except Exception as error:  # of the value's own methods
        problem = f"{short_repr(value)} {of}, which raises {short_repr(error)}"
        return _Entry("wrong_type", problem=problem)
    if found.outcome == "wrong_type":
        problem = f"{short_repr(value)} ({type(value).__name__}) {of}; allowed: a number, None"
        return found._replace(problem=problem)
    if found.outcome == "wrong_length" and values is not None:
        problem = (
            f"{len(values)} rewards by token {of}, whose response has {length} tokens; it must "
            "return one each (response_tokens has them)"
        )
        return found._replace(problem=problem)
    return found


def _sequence(value: Any) -> list[Any] | None:
    """The entries of a reward by token; None: it is none."""
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "__array__") and np.ndim(value) == 1:
        return list(np.asarray(value))
    return None


def _dense(values: Sequence[Any], length: int) -> _Entry:
    """A reward by token; its sum counts."""
    each = [_one(x) for x in values]
    for entry in each:
        if entry.outcome != "ok":
            return _Entry("nan" if entry.outcome == "nan" else "wrong_type")
    if len(values) != length:
        return _Entry("wrong_length")
    tokens = np.array([entry.reward for entry in each], np.float32)
    with np.errstate(over="ignore"):
        total = np.float32(sum(map(float, tokens)))
    return _Entry("ok", total, tokens) if np.isfinite(total) else _Entry("nan")


def _one(value: Any) -> _Entry:
    """A number; infinite or beyond float32 counts as NaN."""
    if value is None:
        return _Entry("none")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy, jax or torch scalar
    if not isinstance(value, numbers.Real | np.bool_):
        return _Entry("wrong_type")
    try:
        with np.errstate(over="ignore"):
            reward = np.float32(float(value))
    except OverflowError:
        return _Entry("nan")
    return _Entry("ok", reward) if np.isfinite(reward) else _Entry("nan")
