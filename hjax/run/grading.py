"""Standalone evaluation of a model: sample responses to questions, grade them, estimate metrics."""

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
from hjax.run.batched_generation import generate_in_batches

if TYPE_CHECKING:
    from hjax.rollout.language_model import Completion, LanguageModel


@dataclasses.dataclass(frozen=True)
class GradedResponse:
    """One graded response.

    Attributes:
      question, sample: indices from 0.
      prompt, response: text, or token ids without a tokenizer.
      reward: None if unscored.
      right: None if unknown.
      answer: the extracted answer, for majority votes; None if there is none.
      tokens: of the response.
      truncated: whether it reached the length limit.
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


def sample_and_grade(
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
    """Sample ``samples`` responses to every question and grade them.

    The grader is called on all samples of a question together, as soon as they are generated.

    Args:
      batch: sequences per generation call; the samples of a question are adjacent rows.
      progress: see ``generate_in_batches``.
      write: called with the rows of each grading call, before more are generated.
      **options: of ``model.generate``.

    Raises:
      RunError: the grader failed, or scored no response at all.
    """
    rows = [i for i in range(len(questions)) for _ in range(samples)]
    prompts = [questions.prompt_tokens[i] for i in rows]
    at_a_time = batch // samples * samples or batch
    ungraded: list[Completion] = []
    graded: list[GradedResponse] = []
    for found in generate_in_batches(model, prompts, at_a_time, seed, progress, **options):
        ungraded += found
        whole = len(ungraded) // samples * samples
        if whole:
            graded += _grade(ungraded[:whole], len(graded) // samples, samples, questions, grader)
            write(graded[-whole:])
            del ungraded[:whole]
    if all(row.reward is None for row in graded):
        raise RunError(
            f"the reward function {grader.reward_function.name} scored none of {len(graded)} "
            "responses: it returned None or NaN for each"
        )
    return graded


def _grade(
    found: Sequence[Completion], first: int, samples: int, questions: Dataset, grader: Grader
) -> list[GradedResponse]:
    """Grade all samples of consecutive questions; ``first`` is the first question's index."""
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


def estimate_metrics(
    graded: Sequence[GradedResponse], samples: int, grader: Grader | None
) -> dict[str, Estimate]:
    """Metrics of the graded samples, averaged over questions (`hjax.rewards.estimators`).

    Args:
      grader: None: an environment has rewarded them.

    Returns:
      ``reward``; if correctness is known, ``accuracy`` and ``pass@k`` for k = 1, 2, 4, ... up to
      ``samples``; if the grader extracts answers, also ``maj@k``. Samples without a reward or
      without known correctness are left out, and so are questions with fewer than k of the rest.
    """
    correctness = _correctness(graded, grader)
    questions: dict[int, list[int]] = {}
    for i, row in enumerate(graded):
        questions.setdefault(row.question, []).append(i)
    rewards = [[graded[i].reward for i in rows] for rows in questions.values()]
    found = {
        "reward": mean_over_questions([_mean([r for r in rs if r is not None]) for rs in rewards])
    }
    if correctness is None:
        return found
    known = [[i for i in rows if correctness[i] is not None] for rows in questions.values()]
    right = [[bool(correctness[i]) for i in rows] for rows in known]
    found["accuracy"] = mean_over_questions([_mean(of_one) for of_one in right])
    for k in powers_of_two(samples):
        passed = [pass_at_k(sum(of_one), len(of_one), k) for of_one in right]
        found[f"pass@{k}"] = mean_over_questions(passed)
    if grader is not None and grader.answers is not None:
        answers = [[graded[i].answer for i in rows] for rows in known]
        for k in powers_of_two(samples):
            votes = [majority_at_k(said, of_one, k) for said, of_one in zip(answers, right)]
            found[f"maj@{k}"] = mean_over_questions(votes)
    return found


def _correctness(
    graded: Sequence[GradedResponse], grader: Grader | None
) -> list[bool | None] | None:
    """Which samples are right; None if correctness is not known for any."""
    if grader is not None and grader.correct is not None:
        right = [row.right for row in graded]
        return None if all(verdict is None for verdict in right) else right
    if any(row.reward not in (None, 0.0, 1.0) for row in graded):
        return None
    return [None if row.reward is None else row.reward == 1.0 for row in graded]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def estimates_json(found: Mapping[str, Estimate]) -> dict[str, dict[str, float]]:
    """Estimates for JSON: ``mean`` and ``stderr`` (NaN, so null, for a single question)."""
    return {name: dataclasses.asdict(estimate) for name, estimate in found.items()}
