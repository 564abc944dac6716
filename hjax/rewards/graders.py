"""Graders: a reward function, and what it knows beyond the reward.

A reward function may bring `answers(responses) -> list`, as an attribute: what each response
answers (a string or a number; None: nothing), so that majority votes can be taken.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.data.tasks import Task
from hjax.errors import ConfigError, RunError
from hjax.rewards import math_answers
from hjax.rewards.function import RewardFunction, load_function

# Graders with a name of their own.
BUILT_IN = ("math",)
# Outcomes that leave a sequence unscored although nothing failed.
_UNSCORED = ("ok", "none", "nan")


@dataclasses.dataclass(frozen=True)
class Grader:
    """How responses are judged.

    Attributes:
      judge: the reward function under its deadline.
      answers: of a list of responses what each answers; None: not known.
      correct: of prompts, responses and columns which responses are right, or None where there is
        no right and wrong. Without it rewards say so, where all of them are 0 or 1.
      check: refuses columns that cannot be graded, before anything is generated.
    """

    judge: RewardFunction
    answers: Callable[[Sequence[Any]], Sequence[Hashable | None]] | None = None
    correct: Callable[..., Sequence[bool] | None] | None = None
    check: Callable[[Mapping[str, Sequence[Any]]], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Grades:
    """What a grader says of N responses.

    Attributes:
      rewards: float32 [N], NaN where unscored.
      right: bools, or None where `Grader.correct` does not know them.
      answers: hashable, None where there is none; or None where a grader gives none.
    """

    rewards: np.ndarray
    right: list[bool] | None
    answers: list[Hashable | None] | None


def load_grader(spec: str, timeout_seconds: float, setting: str) -> Grader:
    """A grader by its name, or a reward function as `path.py:name`.

    Args:
      spec: one of BUILT_IN, or a function of a file.
      timeout_seconds: for one call.
      setting: names it in messages: `--reward`.

    Raises:
      ConfigError: there is none of that name, or it cannot be called.
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
        raise ConfigError(f"{setting}={spec}: its attribute answers is {answers!r}, no function")
    return Grader(RewardFunction(function, timeout_seconds), answers)


def task_grader(task: Task, timeout_seconds: float, judge: Grader | None = None) -> Grader:
    """The verifier of a built-in task; its answers are the responses without blanks around.

    Args:
      judge: whose rewards replace the verifier's; right and wrong stay the task's.
    """
    reward = RewardFunction(task.reward, timeout_seconds) if judge is None else judge.judge

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
    """Judge N responses; the arguments are those of `RewardFunction`.

    Raises:
      RunError: the function failed, by itself or for one response; it said nothing of a response
        is no failure.
    """
    result = grader.judge(prompts, responses, columns, prompt_tokens, response_tokens)
    failed = {k: n for k, n in result.outcomes.items() if n and k not in _UNSCORED}
    if failed:
        causes = ", ".join(f"{kind} {count}" for kind, count in failed.items())
        raise RunError(
            f"the reward function {grader.judge.name} failed for {sum(failed.values())} of "
            f"{len(responses)} responses ({causes}); mend it. The first failure: "
            f"{result.first_traceback}"
        )
    right = None
    if grader.correct is not None:
        found = grader.correct(prompts, responses, **columns)
        right = None if found is None else [bool(verdict) for verdict in found]
    said = None if grader.answers is None else _answers(grader, responses)
    return Grades(result.rewards, right, said)


def _answers(grader: Grader, responses: Sequence[Any]) -> list[Hashable | None]:
    assert grader.answers is not None
    name = f"answers of the reward function {grader.judge.name}"
    try:
        said = list(grader.answers(responses))
    except Exception as error:
        raise RunError(f"{name} failed: {type(error).__name__}: {error}") from error
    if len(said) != len(responses):
        raise RunError(f"{name} gave {len(said)} for {len(responses)} responses; it must give each")
    odd = next((a for a in said if not isinstance(a, str | int | float | None)), None)
    if odd is not None:
        raise RunError(f"{name} gave {odd!r}; allowed: a string, a number, None")
    return said
