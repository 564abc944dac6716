"""Graders of evaluation: a reward function, and optionally correctness and extracted answers.

A reward function may have an attribute `answers(responses) -> list`: the answer of each response (a
string or a number; None: no answer), for majority voting.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.data.tasks import Task
from hjax.errors import ConfigError, RunError
from hjax.rewards import math_answers
from hjax.rewards.function import RewardFunction, load_function

# Graders that are selected by name.
BUILT_IN = ("math",)
# Outcomes that are not failures.
_UNSCORED_OUTCOMES = ("ok", "none", "nan")


@dataclasses.dataclass(frozen=True)
class Grader:
    """How responses are graded.

    Attributes:
      reward_function: called with its timeout.
      answers: maps responses to their answers; None: not available.
      correct: maps prompts, responses and columns to correctness, or to None where responses are
        neither right nor wrong. Without it, rewards that are all 0 or 1 are correctness.
      check: raises for columns that cannot be graded, before anything is generated.
    """

    reward_function: RewardFunction
    answers: Callable[[Sequence[Any]], Sequence[Hashable | None]] | None = None
    correct: Callable[..., Sequence[bool] | None] | None = None
    check: Callable[[Mapping[str, Sequence[Any]]], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Grades:
    """Grades of N responses.

    Attributes:
      rewards: float32 [N], NaN where unscored.
      right: correctness of each, or None where `Grader.correct` does not give it.
      answers: each response's answer or None; or None without `Grader.answers`.
    """

    rewards: np.ndarray
    right: list[bool] | None
    answers: list[Hashable | None] | None


def load_grader(spec: str, timeout_seconds: float, setting: str) -> Grader:
    """Load a grader by its name, or from a reward function `path.py:name`.

    Args:
      spec: one of BUILT_IN, or a function in a file.
      timeout_seconds: for one call.
      setting: the flag that messages name, `--reward`.

    Raises:
      ConfigError: no such grader, or it is not callable.
    """
    if spec == "math":
        judge = RewardFunction(math_answers.reward, timeout_seconds)
        return Grader(judge, math_answers.answers, check=math_answers.targets)
    if ":" not in spec:
        allowed = ", ".join(BUILT_IN)
        raise ConfigError(f"{setting}={spec}: it must be path.py:name, or one of {allowed}")
    function = load_function(spec, setting)
    answers = getattr(function, "answers", None)
    if answers is not None and not callable(answers):
        raise ConfigError(f"{setting}={spec}: its attribute answers is {answers!r}, not a function")
    return Grader(RewardFunction(function, timeout_seconds), answers)


def task_grader(task: Task, timeout_seconds: float, judge: Grader | None = None) -> Grader:
    """The verifier of a built-in task as a grader; answers are the stripped responses.

    Args:
      judge: a grader whose rewards replace the verifier's; correctness stays the task's.
    """
    reward = judge.reward_function if judge else RewardFunction(task.reward, timeout_seconds)

    def correct(prompts: Any, responses: Any, **columns: Any) -> list[bool] | None:
        return task.correct(prompts, responses, **columns)

    return Grader(reward, _stripped, correct, None if judge is None else judge.check)


def _stripped(responses: Sequence[str]) -> list[str | None]:
    return [response.strip() or None for response in responses]


def grade(
    grader: Grader,
    prompts: Sequence[Any],
    responses: Sequence[Any],
    columns: Mapping[str, Sequence[Any]],
    prompt_tokens: Sequence[Sequence[int]],
    response_tokens: Sequence[Sequence[int]],
) -> Grades:
    """Grade N responses; the arguments are those of `RewardFunction`.

    Raises:
      RunError: the function failed, as a whole or for one response. Returning None or NaN for a
        response is not a failure.
    """
    result = grader.reward_function(prompts, responses, columns, prompt_tokens, response_tokens)
    failed = {k: n for k, n in result.outcomes.items() if n and k not in _UNSCORED_OUTCOMES}
    if failed:
        causes = ", ".join(f"{kind} {count}" for kind, count in failed.items())
        raise RunError(
            f"the reward function {grader.reward_function.name} failed for "
            f"{sum(failed.values())} of {len(responses)} responses ({causes}); fix it. The first "
            f"failure: {result.first_traceback}"
        )
    right = None
    if grader.correct is not None:
        found = grader.correct(prompts, responses, **columns)
        right = None if found is None else [bool(correct) for correct in found]
    answers = None if grader.answers is None else _answers(grader, responses)
    return Grades(result.rewards, right, answers)


def _answers(grader: Grader, responses: Sequence[Any]) -> list[Hashable | None]:
    assert grader.answers is not None
    name = f"answers of the reward function {grader.reward_function.name}"
    try:
        answers = list(grader.answers(responses))
    except Exception as error:
        raise RunError(f"{name} failed: {type(error).__name__}: {error}") from error
    if len(answers) != (count := len(responses)):
        raise RunError(f"{name} returned {len(answers)} for {count} responses; one each is needed")
    invalid = next((a for a in answers if not isinstance(a, str | int | float | None)), None)
    if invalid is not None:
        raise RunError(f"{name} returned {invalid!r}; allowed: a string, a number, None")
    return answers
