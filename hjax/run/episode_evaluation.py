"""Standalone evaluation of a model in an environment: plays an episode per task and sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hjax.environments.episode import Episode, episode_seed, episode_tasks
from hjax.errors import RunError
from hjax.rewards.graders import Grader, grade
from hjax.run.grading import GradedResponse

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset


class Player(Protocol):
    """Plays episodes to their ends, as ``EpisodePlayer`` and ``AgentPlayer`` do."""

    def play(self, episodes: Sequence[Episode]) -> None: ...


def play_questions(
    player: Callable[..., Player],
    questions: Dataset,
    *,
    samples: int,
    seed: int,
    at_a_time: int,
    progress: Callable[[int, int, str], None],
    write: Callable[[Sequence[Episode]], None],
    grader: Grader | None = None,
    who: str = "environment",
) -> tuple[list[Episode], list[GradedResponse]]:
    """Play ``samples`` episodes of every row of a dataset; returns them, and their grades.

    Args:
      player: makes one; its ``progress`` is called with (ended, all).
      at_a_time: episodes that are open together.
      progress: called with (episodes played, all, text).
      write: called with each part of the episodes that was played.
      grader: rewards the last turn of each; None: the environment has rewarded them.
      who: what plays, for messages: `environment`, or `agent` with its name.

    Raises:
      RunError: it failed in every episode.
    """
    played: list[Episode] = []
    graded: list[GradedResponse] = []
    total = len(questions) * samples
    for start in range(0, total, at_a_time):
        numbers = range(start, min(start + at_a_time, total))
        episodes = question_episodes(questions, numbers, samples=samples, seed=seed)

        def report_progress(ended: int, _: int, before: int = start) -> None:
            progress(before + ended, total, "")

        player(progress=report_progress).play(episodes)
        played += episodes
        graded += _graded(episodes, samples, questions, grader)
        write(episodes)
    if all(episode.fault for episode in played):
        raise RunError(f"the {who} failed in all {total} episodes: {played[0].fault}")
    return played, graded


def _graded(
    episodes: Sequence[Episode], samples: int, questions: Dataset, grader: Grader | None
) -> list[GradedResponse]:
    """The episodes' grades; those of a grader become the rewards of their last turns."""
    if grader is None:
        return [graded_episode(episode, samples) for episode in episodes]
    ended = [each for each in episodes if each.turns and not each.fault]
    asked = questions.rows([each.number // samples for each in ended])
    texts, prompts = [each.turns[-1].text for each in ended], asked["prompt_tokens"]
    tokens = [each.turns[-1].tokens for each in ended]
    found = grade(grader, asked["prompt_text"] or prompts, texts, asked["columns"], prompts, tokens)
    rows = {}
    for i, episode in enumerate(ended):
        episode.turns[-1].reward = float(found.rewards[i])
        rows[episode.number] = dataclasses.replace(
            graded_episode(episode, samples),
            response=texts[i],
            reward=None if np.isnan(found.rewards[i]) else float(found.rewards[i]),
            right=None if found.right is None else found.right[i],
            answer=None if found.answers is None else found.answers[i],
        )
    return [rows.get(each.number) or graded_episode(each, samples) for each in episodes]


def question_episodes(
    questions: Dataset, numbers: Sequence[int], *, samples: int, seed: int
) -> list[Episode]:
    """The episodes of these numbers, ``samples`` of each row of a dataset, to be played."""
    rows = questions.rows([i // samples for i in numbers])
    tasks = episode_tasks(rows["columns"], rows["prompt_text"] or [""] * len(numbers))
    return [
        Episode(
            number=number,
            group=number // samples,
            task=task,
            seed=episode_seed(seed, 0, number // samples),
        )
        for number, task in zip(numbers, tasks, strict=True)
    ]


def graded_episode(episode: Episode, samples: int) -> GradedResponse:
    """An episode as a graded response: its return, and its text from the first turn on."""
    turns = episode.turns
    return GradedResponse(
        question=episode.number // samples,
        sample=episode.number % samples,
        prompt=episode.rows[0].text if episode.rows else "",
        response="".join(turn.text + turn.observed for turn in turns),
        reward=None if episode.fault else episode.total_reward,
        right=None,
        answer=None,
        tokens=sum(len(turn.tokens) for turn in turns),
        truncated=episode.stop_reason not in ("done", "") and not episode.fault,
    )
