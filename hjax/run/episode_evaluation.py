"""Standalone evaluation of a model in an environment: plays an episode per task and sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hjax.environments.episode import (
    DrawTurns,
    Episode,
    EpisodeLimits,
    EpisodePlayer,
    episode_seed,
    episode_tasks,
)
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import RunError
from hjax.run.grading import GradedResponse

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset


def play_questions(
    policy: DrawTurns,
    pool: EpisodePool,
    encoder: ObservationEncoder,
    limits: EpisodeLimits,
    questions: Dataset,
    *,
    samples: int,
    seed: int,
    at_a_time: int,
    progress: Callable[[int, int, str], None],
    write: Callable[[Sequence[Episode]], None],
) -> list[Episode]:
    """Play ``samples`` episodes of every row of a dataset.

    Args:
      at_a_time: episodes that are open together.
      progress: called with (episodes played, all, text).
      write: called with each part of the episodes that was played.

    Raises:
      RunError: the environment failed in every episode.
    """
    played: list[Episode] = []
    total = len(questions) * samples
    for start in range(0, total, at_a_time):
        numbers = range(start, min(start + at_a_time, total))
        episodes = question_episodes(questions, numbers, samples=samples, seed=seed)

        def report_progress(ended: int, _: int, before: int = start) -> None:
            progress(before + ended, total, "")

        EpisodePlayer(pool, encoder, limits, policy, progress=report_progress).play(episodes)
        played += episodes
        write(episodes)
    if all(episode.fault for episode in played):
        raise RunError(f"the environment failed in all {total} episodes: {played[0].fault}")
    return played


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
