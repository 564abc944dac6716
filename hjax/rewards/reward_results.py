"""Validated results of reward functions: a reward per sequence, per token, or several by name."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hjax.errors import short_repr

# Outcomes of scoring a sequence. `killed`: the process that ran the function died.
OUTCOMES = (
    "ok", "none", "nan", "exception", "timeout", "wrong_type", "wrong_length", "killed",
)  # fmt: skip
# The largest reward: float32 tells numbers up to it apart where they differ by 0.1, and groups of
# rewards are told apart where they differ by a millionth of them.
LARGEST_REWARD = 1e6
_BOUND = f"numbers from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}, None; scale the rewards"
# Names of other metrics `reward/...`, which named rewards cannot have.
RESERVED_NAMES = ("mean", "std", "unscored", "drawn_mean", *OUTCOMES)


class RewardsWithMetrics(list[float | None]):
    """What a reward function may return: a list of rewards, and numbers that are no rewards.

    Args:
      rewards: one per sequence.
      metrics: by name, a number per sequence; their means are the run's metrics ``reward/<name>``.
    """

    def __init__(
        self, rewards: Iterable[float | None], metrics: Mapping[str, Sequence[float]]
    ) -> None:
        super().__init__(rewards)
        self.metrics = metrics


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Rewards of a batch, and the outcome of each sequence.

    Attributes:
      rewards: float32 [N], NaN where unscored; the sum where there are several named rewards.
      row_outcomes: the outcome of each sequence, one of OUTCOMES; empty: it does not count.
      first_traceback: the first failure (a traceback, or a sentence); None without a failure.
        Returning None or NaN is not a failure.
      named: named rewards, float32 [N] each, NaN where unscored.
      metrics: numbers that are no rewards, float32 [N] each, by name.
      tokens: of each sequence None, or float32 [response tokens], whose sum is its reward.
    """

    rewards: np.ndarray
    row_outcomes: tuple[str, ...]
    first_traceback: str | None = None
    named: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    tokens: tuple[np.ndarray | None, ...] = ()
    metrics: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def without(self, rows: np.ndarray) -> RewardResult:
        """The result with some sequences unscored; ``rows``: bool [N]."""

        def unscored(values: np.ndarray) -> np.ndarray:
            return np.where(rows, np.float32(np.nan), values)

        return dataclasses.replace(
            self,
            rewards=unscored(self.rewards),
            row_outcomes=tuple(
                "none" if gone else outcome
                for gone, outcome in zip(rows, self.row_outcomes, strict=True)
            ),
            named={name: unscored(values) for name, values in self.named.items()},
        )

    def counted_at(self, rows: np.ndarray) -> RewardResult:
        """The result with the outcomes of these sequences alone; ``rows``: int, their numbers."""
        counted = set(rows.tolist())
        outcomes = (x if i in counted else "" for i, x in enumerate(self.row_outcomes))
        return dataclasses.replace(self, row_outcomes=tuple(outcomes))

    @classmethod
    def concatenated(cls, parts: Sequence[RewardResult]) -> RewardResult:
        """Concatenate the sequences of several results."""
        each = tuple(name for result in parts for name in result.row_outcomes)
        problems = (x.first_traceback for x in parts if x.first_traceback is not None)
        rewards = [np.zeros(0, np.float32), *(result.rewards for result in parts)]

        def joined(values: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
            blank = [np.full_like(x.rewards, np.nan) for x in parts]
            names = dict.fromkeys(name for each in values for name in each)
            pairs = list(zip(values, blank, strict=True))
            return {n: np.concatenate([each.get(n, nan) for each, nan in pairs]) for n in names}

        named, metrics = joined([x.named for x in parts]), joined([x.metrics for x in parts])
        tokens = tuple(t for x in parts for t in x.tokens or (None,) * len(x.row_outcomes))
        dense = any(x.tokens for x in parts)
        problem = next(problems, None)
        tokens = tokens if dense else ()
        return cls(np.concatenate(rewards), each, problem, named, tokens, metrics)

    def row(self, number: int) -> RewardResult:
        """The result of one sequence."""
        each, problem = self.row_outcomes[number], self.first_traceback
        at = slice(number, number + 1)
        named, metrics = (
            {name: values[at] for name, values in every.items()}
            for every in (self.named, self.metrics)
        )
        problem = None if each == "ok" else problem
        return RewardResult(self.rewards[at], (each,), problem, named, self.tokens[at], metrics)

    @functools.cached_property
    def outcomes(self) -> dict[str, int]:
        """Number of sequences by outcome, for all OUTCOMES."""
        return {name: self.row_outcomes.count(name) for name in OUTCOMES}

    @property
    def unscored(self) -> float:
        """Share of sequences without a reward, 0 to 1."""
        total = sum(self.outcomes.values())
        return (total - self.outcomes["ok"]) / total if total else 0.0

    def by_token(self, lengths: Sequence[int], width: int) -> np.ndarray | None:
        """Per-token rewards, float32 [N, width]; single ones at the last token, None if all are.

        Args:
          lengths: tokens of each response.
          width: of the response arrays, at least the longest length.
        """
        if not self.tokens:
            return None
        made = np.zeros((len(self.row_outcomes), width), np.float32)
        for row, length in enumerate(lengths):
            made[row, :length] = _token_values(self, row, length)
        return made


def uniform_result(outcome: str, count: int, problem: str | None) -> RewardResult:
    """A result with one outcome and no reward for all sequences, for a call that failed."""
    return RewardResult(np.full(count, np.nan, np.float32), (outcome,) * count, problem)


def parse_rewards(returned: Any, lengths: Sequence[int], name: str) -> RewardResult:
    """Validate the return value of a reward function.

    Args:
      returned: a list (or array) with an entry for each sequence, or a dict of such lists by name.
      lengths: tokens of each response.
      name: of the function, for messages.
    """
    if not isinstance(returned, Mapping):
        result = _parse_list(returned, lengths, f"reward function {name} returned")
        if not isinstance(returned, RewardsWithMetrics):
            return result
        return dataclasses.replace(result, metrics=_parse_metrics(returned.metrics, len(lengths)))
    count, results = len(lengths), {}
    for key, values in returned.items():
        if not isinstance(key, str) or not key or key in RESERVED_NAMES:
            problem = f"reward function {name} returned a reward named {short_repr(key)}"
            allowed = f"a name must be text, and none of {', '.join(RESERVED_NAMES)}"
            return uniform_result("wrong_type", count, f"{problem}; {allowed}")
        results[key] = _parse_list(values, lengths, f"reward function {name} returned for {key!r}")
    if not results:
        problem = f"reward function {name} returned an empty dict; at least one list is needed"
        return uniform_result("wrong_type", count, problem)
    summed = _summed(results, lengths)
    if np.any(np.abs(summed.rewards) > LARGEST_REWARD):
        problem = f"reward function {name} returned rewards whose sum for a sequence is too large"
        return uniform_result("wrong_type", count, f"{problem}; allowed: {_BOUND}")
    return summed


def _parse_metrics(metrics: Mapping[str, Sequence[float]], count: int) -> dict[str, np.ndarray]:
    found = {name: np.asarray(values, np.float32) for name, values in metrics.items()}
    for name, values in found.items():
        if name in RESERVED_NAMES or values.shape != (count,):
            raise ValueError(
                f"metric {name!r} of shape {values.shape}: it must have a number for each of "
                f"{count} sequences, and a name that is none of {', '.join(RESERVED_NAMES)}"
            )
    return found


def _summed(results: Mapping[str, RewardResult], lengths: Sequence[int]) -> RewardResult:
    """Sum named rewards: a sequence's reward is the sum of those that scored it."""
    each = []
    for outcomes in zip(*(result.row_outcomes for result in results.values()), strict=True):
        each.append("ok" if "ok" in outcomes else outcomes[0])
    table = np.stack([result.rewards for result in results.values()])
    scored = ~np.isnan(table).all(axis=0)
    rewards = np.where(scored, np.nansum(table, axis=0), np.nan).astype(np.float32)
    problems = (x.first_traceback for x in results.values() if x.first_traceback is not None)
    named = {key: result.rewards for key, result in results.items()}
    tokens: tuple[np.ndarray | None, ...] = ()
    if any(result.tokens for result in results.values()):
        tokens = tuple(
            np.sum([_token_values(result, row, length) for result in results.values()], axis=0)
            for row, length in enumerate(lengths)
        )
    return RewardResult(rewards, tuple(each), next(problems, None), named, tokens)


def _token_values(result: RewardResult, row: int, length: int) -> np.ndarray:
    """Per-token rewards of a sequence; a single number is put at the last token."""
    values = result.tokens[row] if result.tokens else None
    if values is not None:
        return values
    made = np.zeros(length, np.float32)
    if length:
        made[-1] = np.nan_to_num(result.rewards[row])
    return made


def _parse_list(returned: Any, lengths: Sequence[int], prefix: str) -> RewardResult:
    count = len(lengths)
    try:
        if hasattr(returned, "__array__") and np.ndim(returned) > 0:  # numpy, jax, torch
            returned = np.asanyarray(returned)  # a masked one says what has no reward
        elif not isinstance(returned, list | tuple):
            kind = type(returned).__name__
            problem = (
                f"{prefix} {short_repr(returned)} ({kind}); it must return a list of float or None"
            )
            return uniform_result("wrong_type", count, problem)
        returned = list(returned)
    except Exception as error:  # jax reports a failed computation only here
        problem = f"{prefix} an unreadable array: {short_repr(error)}"
        return uniform_result("exception", count, problem)
    if len(returned) != count:
        problem = f"{prefix} {len(returned)} rewards for {count} sequences; it must return one each"
        return uniform_result("wrong_length", count, problem)
    entries = [
        _parse_entry(value, length, f"for sequence {i}")
        for i, (value, length) in enumerate(zip(returned, lengths, strict=True))
    ]
    rewards = np.array([entry.reward for entry in entries], np.float32)
    tokens = tuple(entry.tokens for entry in entries)
    dense = any(x is not None for x in tokens)
    return RewardResult(
        rewards,
        tuple(entry.outcome for entry in entries),
        next((f"{prefix} {entry.problem}" for entry in entries if entry.problem), None),
        tokens=tokens if dense else (),
    )


class _Entry(NamedTuple):
    """Outcome of a sequence, its reward (NaN unless ok), per-token rewards, and the problem."""

    outcome: str
    reward: np.float32 = np.float32(np.nan)
    tokens: np.ndarray | None = None
    problem: str = ""


def _parse_entry(value: Any, length: int, which: str) -> _Entry:
    try:
        values = _as_token_rewards(value)
        found = _parse_number(value) if values is None else _parse_token_rewards(values, length)
    except Exception as error:  # raised by the value's own methods
        problem = f"{short_repr(value)} {which}, which raises {short_repr(error)}"
        return _Entry("wrong_type", problem=problem)
    if found.outcome == "wrong_type":
        allowed = found.problem or "a number, None"
        problem = f"{short_repr(value)} ({type(value).__name__}) {which}; allowed: {allowed}"
        return found._replace(problem=problem)
    if found.outcome == "wrong_length" and values is not None:
        problem = (
            f"{len(values)} rewards by token {which}, whose response has {length} tokens; it must "
            "return one each (response_tokens has them)"
        )
        return found._replace(problem=problem)
    return found


def _as_token_rewards(value: Any) -> list[Any] | None:
    """Per-token rewards as a list; None: the value is not a sequence."""
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "__array__") and np.ndim(value) == 1:
        return list(np.asanyarray(value))
    return None


def _parse_token_rewards(values: Sequence[Any], length: int) -> _Entry:
    """Per-token rewards; the sequence's reward is their sum."""
    each = [_parse_number(x) for x in values]
    for entry in each:
        if entry.outcome != "ok":
            return entry if entry.outcome == "nan" else entry._replace(outcome="wrong_type")
    if len(values) != length:
        return _Entry("wrong_length")
    tokens = np.array([entry.reward for entry in each], np.float32)
    total = _parse_number(sum(map(float, tokens)))
    return total._replace(tokens=tokens) if total.outcome == "ok" else total


def _parse_number(value: Any) -> _Entry:
    """A number; infinity counts as NaN, and one above ``LARGEST_REWARD`` is of the wrong type."""
    if value is None or value is np.ma.masked:
        return _Entry("none")
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy, jax or torch scalar
    if not isinstance(value, numbers.Real | np.bool_):
        return _Entry("wrong_type")
    try:
        number = float(value)
    except OverflowError:  # a whole number that no float has
        number = 1e300
    if not math.isfinite(number):
        return _Entry("nan")
    if abs(number) > LARGEST_REWARD:
        return _Entry("wrong_type", problem=_BOUND)
    return _Entry("ok", np.float32(number))
