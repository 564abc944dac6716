"""Evaluation of a model outside a run: questions, samples of answers, and what a grader says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hjax.data.dataset import Dataset
from hjax.errors import RunError
from hjax.rewards.estimators import (
    Estimate,
    majority_at_k,
    mean_over_questions,
    pass_at_k,
    powers_of_two,
)
from hjax.rewards.graders import Grader, grade
from hjax.run.batched_generation import complete

if TYPE_CHECKING:
    from hjax.rollout.language_model import Completion, LanguageModel


@dataclasses.dataclass(frozen=True)
class GradedResponse:
    """One response, judged.

    Attributes:
      question, sample: counted from 0.
      prompt, response: text, or token ids where there is no tokenizer.
      reward: None: unscored.
      right: None: not known.
      answer: what a majority is taken over; None: no answer, or the grader gives none.
      tokens: of the response.
      truncated: whether it ran into the length limit.
    """

    question: int
    sample: int
    prompt: Any
    response: Any
    reward: float | None
    right: bool | None
    answer: Hashable | None
    tokens: int
    truncated: bool


def ask(
    model: LanguageModel,
    questions: Dataset,
    grader: Grader,
    samples: int,
    batch: int,
    seed: int,
    progress: Callable[[int, int, str], None],
    write: Callable[[Sequence[GradedResponse]], None],
    **options: Any,
) -> list[GradedResponse]:
    """Answer every question ``samples`` times and judge the answers.

    The grader gets whole questions, as soon as they are answered, a call of theirs each.

    Args:
      batch: sequences at a time; the samples of a question stand side by side.
      progress: see ``complete``.
      write: gets the rows of each call of the grader, before the next are generated.
      **options: of ``model.generate``.

    Raises:
      RunError: the grader failed, or scored nothing at all.
    """
    rows = [i for i in range(len(questions)) for _ in range(samples)]
    prompts = [questions.prompt_tokens[i] for i in rows]
    at_a_time = batch // samples * samples or batch
    waiting: list[Completion] = []
    judged: list[GradedResponse] = []
    for found in complete(model, prompts, at_a_time, seed, progress, **options):
        waiting += found
        whole = len(waiting) // samples * samples
        if whole:
            first = len(judged) // samples
            judged += _judge(waiting[:whole], first, samples, questions, grader)
            write(judged[-whole:])
            del waiting[:whole]
    if all(row.reward is None for row in judged):
        raise RunError(
            f"the reward function {grader.reward_function.name} scored none of {len(judged)} "
            "responses: it returned None or NaN for each"
        )
    return judged


def _judge(
    found: Sequence[Completion], first: int, samples: int, questions: Dataset, grader: Grader
) -> list[GradedResponse]:
    """The samples of whole questions, from the ``first`` on."""
    numbers = [first + i // samples for i in range(len(found))]
    asked = questions.rows(numbers)
    prompts = asked["prompt_text"] or asked["prompt_tokens"]
    tokens = [completion.tokens for completion in found]
    with_text = questions.prompt_text is not None
    responses = [completion.text if with_text else completion.tokens for completion in found]
    grades = grade(grader, prompts, responses, asked["columns"], asked["prompt_tokens"], tokens)
    return [
        GradedResponse(
            number,
            i % samples,
            prompts[i],
            responses[i],
            None if np.isnan(grades.rewards[i]) else float(grades.rewards[i]),
            None if grades.right is None else grades.right[i],
            None if grades.answers is None else grades.answers[i],
            len(tokens[i]),
            found[i].finish_reason == "length",
        )
        for i, number in enumerate(numbers)
    ]


def measures(judged: Sequence[GradedResponse], samples: int, grader: Grader) -> dict[str, Estimate]:
    """What the judged samples say, each over questions (`hjax.rewards.estimators`).

    Returns:
      ``reward``; where there is right and wrong ``accuracy`` and, for k = 1, 2, 4, ... up to
      ``samples``, ``pass@k``; where the grader gives answers too ``maj@k``. Samples without a
      reward, or without a verdict, are left out, and so is a question with fewer than k others.
    """
    verdicts = _verdicts(judged, grader)
    questions: dict[int, list[int]] = {}
    for i, row in enumerate(judged):
        questions.setdefault(row.question, []).append(i)
    rewards = [[judged[i].reward for i in rows] for rows in questions.values()]
    found = {
        "reward": mean_over_questions([_mean([r for r in rs if r is not None]) for rs in rewards])
    }
    if verdicts is None:
        return found
    known = [[i for i in rows if verdicts[i] is not None] for rows in questions.values()]
    right = [[bool(verdicts[i]) for i in rows] for rows in known]
    found["accuracy"] = mean_over_questions([_mean(of_one) for of_one in right])
    for k in powers_of_two(samples):
        passed = [pass_at_k(sum(of_one), len(of_one), k) for of_one in right]
        found[f"pass@{k}"] = mean_over_questions(passed)
    if grader.answers is not None:
        answers = [[judged[i].answer for i in rows] for rows in known]
        for k in powers_of_two(samples):
            votes = [majority_at_k(said, of_one, k) for said, of_one in zip(answers, right)]
            found[f"maj@{k}"] = mean_over_questions(votes)
    return found


def _verdicts(judged: Sequence[GradedResponse], grader: Grader) -> list[bool | None] | None:
    """Which samples are right; None where there is no right and wrong."""
    if grader.correct is not None:
        right = [row.right for row in judged]
        return None if all(verdict is None for verdict in right) else right
    if any(row.reward not in (None, 0.0, 1.0) for row in judged):
        return None
    return [None if row.reward is None else row.reward == 1.0 for row in judged]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def describe(found: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Measures as JSON has them: ``mean`` and ``stderr`` (NaN, and so null, of one question)."""
    return {name: dataclasses.asdict(estimate) for name, estimate in found.items()}
