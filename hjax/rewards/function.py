"""Reward functions from users' files: found by `path.py:name`, called under a deadline, judged.

The contract is `reward(prompts, responses, **columns) -> list of float or None`, sync or async.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import itertools
import numbers
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.errors import ConfigError, RunError
from hjax.user_files import load_object

# Every way a sequence can come out of being judged. `killed` is for code run in a sandbox.
OUTCOMES = (
    "ok", "none", "nan", "exception", "timeout", "wrong_type", "wrong_length", "killed",
)  # fmt: skip

_thread_numbers = itertools.count(1)


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Rewards of a batch and how each came about.

    Attributes:
      rewards: float32 [N], NaN where a sequence is unscored.
      each: how each sequence came out, names of OUTCOMES.
      first_traceback: of the first thing that went wrong (a traceback, or a sentence); None if
        nothing did, or only None and NaN were returned.
    """

    rewards: np.ndarray
    each: tuple[str, ...]
    first_traceback: str | None = None

    @classmethod
    def joined(cls, some: Sequence[RewardResult]) -> RewardResult:
        """Of the sequences of several, in this order."""
        each = tuple(name for result in some for name in result.each)
        problems = (x.first_traceback for x in some if x.first_traceback is not None)
        rewards = [np.zeros(0, np.float32), *(result.rewards for result in some)]
        return cls(np.concatenate(rewards), each, next(problems, None))

    def row(self, number: int) -> RewardResult:
        """Of one sequence."""
        each, problem = self.each[number], self.first_traceback
        at = slice(number, number + 1)
        return RewardResult(self.rewards[at], (each,), None if each == "ok" else problem)

    @functools.cached_property
    def outcomes(self) -> dict[str, int]:
        """How many sequences came out how, all names of OUTCOMES."""
        return {name: self.each.count(name) for name in OUTCOMES}

    @property
    def unscored(self) -> float:
        """Share of sequences without a reward, 0 to 1."""
        total = sum(self.outcomes.values())
        return (total - self.outcomes["ok"]) / total if total else 0.0


def load_function(spec: str, key: str = "reward.function") -> Callable[..., Any]:
    """The function `name` of the file `path.py`, given as "path.py:name".

    A path that doesn't exist as given is looked up beside this file, where the examples are.
    `key` names the setting in messages. Raises ConfigError, one line, when there is no such file
    or name, the name can't be called, or the file fails on import (with the line that failed).
    """
    function = load_object(spec, key, beside=Path(__file__).parent)
    if not callable(function):
        name = spec.rpartition(":")[2]
        raise ConfigError(
            f"{key}={spec!r}: {name} is {function!r} ({type(function).__name__}), not a function"
        )
    return function


class RewardFunction:
    """Calls a reward function on a batch, and turns whatever happens into a RewardResult.

    Nothing that the function does raises: a whole call that fails (it raises, takes too long,
    returns no list or one of the wrong length) leaves every sequence unscored, a single odd entry
    that sequence alone. `check_unscored` decides when that is too much.
    """

    def __init__(self, function: Callable[..., Any], timeout_seconds: float = 60.0):
        """Raises ConfigError if `function` can't take (prompts, responses, **columns)."""
        self.function = function
        self.timeout_seconds = timeout_seconds
        self.name = getattr(function, "__name__", type(function).__name__)
        if timeout_seconds <= 0:
            raise ConfigError(f"reward.timeout_seconds={timeout_seconds}: it must be positive")
        _check_signature(function, self.name)

    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        prompt_tokens: Sequence[Sequence[int]],
        response_tokens: Sequence[Sequence[int]],
    ) -> RewardResult:
        """Judges N sequences.

        Args:
          prompts, responses: N strings each, or without a tokenizer N lists of token ids.
          columns: dataset columns, N entries each.
          prompt_tokens, response_tokens: N lists of ids, without padding; the function gets them
            as further columns.

        The function runs in a thread of its own (so async ones work in a notebook, too). One that
        misses the deadline can't be stopped: its thread is left behind, named in the message.
        """
        count = len(responses)
        arguments = {
            **columns,
            "prompt_tokens": list(prompt_tokens),
            "response_tokens": list(response_tokens),
        }
        if count == 0:
            return _whole("ok", 0, None)
        outcome, value = self._run(list(prompts), list(responses), arguments)
        if outcome != "ok":
            return _whole(outcome, count, value)
        return _judge(value, count, self.name)

    def _run(self, prompts: list, responses: list, arguments: dict) -> tuple[str, Any]:
        done: list[tuple[str, Any]] = []

        def work() -> None:
            try:
                returned = self.function(prompts, responses, **arguments)
                if inspect.isawaitable(returned):
                    returned = asyncio.run(_within(returned, self.timeout_seconds))
                done.append(("ok", returned))
            except _DeadlineMissed:
                done.append(("timeout", late + "; it was cancelled"))
            # A sys.exit in user code must end neither the run nor this thread unheard.
            except BaseException as error:
                # The first frame is this one; the user's begin behind it.
                frames = error.__traceback__ and error.__traceback__.tb_next
                text = "".join(traceback.format_exception(error.with_traceback(frames)))
                done.append(("exception", text.rstrip()))

        label = f"hjax-reward-{next(_thread_numbers)}"
        late = f"reward function {self.name} took longer than {self.timeout_seconds:g} s"
        thread = threading.Thread(target=work, name=label, daemon=True)
        thread.start()
        thread.join(self.timeout_seconds)
        if done:
            return done[0]
        return "timeout", f"{late}; its thread {label} was left behind"


def check_unscored(result: RewardResult, max_share: float) -> None:
    """Raises RunError, with the outcomes and first traceback, above a share of unscored ones."""
    if result.unscored <= max_share:
        return
    total = sum(result.outcomes.values())
    missing = total - result.outcomes["ok"]
    causes = ", ".join(f"{k} {v}" for k, v in result.outcomes.items() if v and k != "ok")
    message = (
        f"{missing} of {total} sequences have no reward ({causes}); the share "
        f"{result.unscored:.3g} is above reward.max_unscored={max_share:g}: mend the reward "
        "function, or raise that key"
    )
    if result.first_traceback:
        message += f". The first failure: {result.first_traceback}"
    raise RunError(message)


class _DeadlineMissed(Exception):
    pass


async def _within(awaitable: Any, seconds: float) -> Any:
    """Awaits at most so long, then cancels; the function's own TimeoutError stays its own."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.wait({task}, timeout=seconds)
    if not task.done():
        task.cancel()
        raise _DeadlineMissed
    return task.result()


def _whole(outcome: str, count: int, problem: str | None) -> RewardResult:
    return RewardResult(np.full(count, np.nan, np.float32), (outcome,) * count, problem)


def _judge(returned: Any, count: int, name: str) -> RewardResult:
    said = f"reward function {name} returned"
    if hasattr(returned, "__array__") and np.ndim(returned) > 0:  # numpy, jax, torch
        try:
            returned = list(np.asarray(returned))
        except Exception as error:  # jax reports a failed computation only here
            return _whole("exception", count, f"{said} an unreadable array: {error}")
    if not isinstance(returned, list | tuple):
        kind = type(returned).__name__
        problem = f"{said} {_short(returned)} ({kind}); it must return a list of float or None"
        return _whole("wrong_type", count, problem)
    if len(returned) != count:
        problem = f"{said} {len(returned)} rewards for {count} sequences; it must return one each"
        return _whole("wrong_length", count, problem)
    rewards = np.full(count, np.nan, np.float32)
    outcomes: list[str] = []
    first: str | None = None
    for i, value in enumerate(returned):
        outcome, number = _one(value)
        outcomes.append(outcome)
        if outcome == "ok":
            rewards[i] = number
        elif outcome == "wrong_type" and first is None:
            kind = type(value).__name__
            first = f"{said} {_short(value)} ({kind}) for sequence {i}; allowed: a number, None"
    return RewardResult(rewards, tuple(outcomes), first)


def _one(value: Any) -> tuple[str, np.float32]:
    """Outcome and reward of one entry; infinite or beyond float32 counts as NaN."""
    nan = np.float32(np.nan)
    if value is None:
        return "none", nan
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a numpy, jax or torch scalar
    if not isinstance(value, numbers.Real | np.bool_):
        return "wrong_type", nan
    try:
        with np.errstate(over="ignore"):
            reward = np.float32(float(value))
    except OverflowError:
        return "nan", nan
    return ("ok", reward) if np.isfinite(reward) else ("nan", nan)


def _check_signature(function: Callable[..., Any], name: str) -> None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins have none
        return
    kinds = [p.kind for p in parameters]
    by_position = [k for k in kinds if k in (k.POSITIONAL_ONLY, k.POSITIONAL_OR_KEYWORD)]
    takes_two = len(by_position) >= 2 or inspect.Parameter.VAR_POSITIONAL in kinds
    if not takes_two or inspect.Parameter.VAR_KEYWORD not in kinds:
        shown = ", ".join(map(str, parameters))
        raise ConfigError(
            f"reward function {name}({shown}) cannot be called: it must take "
            "(prompts, responses, **columns)"
        )


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
