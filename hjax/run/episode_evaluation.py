"""Standalone evaluation of a model in an environment: plays an episode per task and sample."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hjax.data.response_text import ResponseText
from hjax.environments.episode import (
    DrawnTurn,
    Episode,
    EpisodeLimits,
    EpisodePlayer,
    TurnRequest,
    episode_seed,
)
from hjax.environments.episode_pool import EpisodePool
from hjax.environments.episode_text import ObservationEncoder
from hjax.errors import RunError
from hjax.rollout.prompt_encoding import StopConditions, StopWatcher
from hjax.rollout.requests import Request, RequestHandle, ResponseChunk
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.run.batched_generation import call_seed
from hjax.run.grading import GradedResponse

if TYPE_CHECKING:
    from hjax.data.dataset import Dataset
    from hjax.rollout.language_model import LanguageModel


class ServicePolicy:
    """Draws turns by a generation service: many at a time, each prefilled from its last turn on.

    What an episode's turn draws follows from the seed, the episode's number and the turn.

    Args:
      model: that plays.
      slots: turns that are drawn at a time.
      seed: of all draws.
      stop: token ids and strings that end a turn, besides the model's own and the environment's.
      options: of ``hjax.rollout.sampling_params.SamplingParams``.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        slots: int,
        seed: int,
        stop: Sequence[int | str] = (),
        options: dict[str, Any],
    ):
        self._model, self._seed, self._stop, self._options = model, seed, stop, options
        self._service = GenerationService(model, slots=slots, max_queue=1 << 20)

    def __call__(self, requests: Sequence[TurnRequest]) -> list[DrawnTurn]:
        """Draw a turn for each request."""
        arrived: queue.SimpleQueue[tuple[int, ResponseChunk]] = queue.SimpleQueue()
        turns = [self._submit(i, request, arrived) for i, request in enumerate(requests)]
        waiting = len(turns)
        while waiting:
            i, chunk = arrived.get()
            waiting -= turns[i].take(chunk)
        return [turn.drawn() for turn in turns]

    def close(self) -> None:
        """Stop generating."""
        self._service.close(seconds=0)

    def _submit(self, number: int, request: TurnRequest, arrived: Any) -> _TurnInProgress:
        tokenizer = self._model.tokenizer
        seen = (*request.prompt, *request.response)
        stops = StopConditions([*self._stop, *request.stop], tokenizer)
        sampling = SamplingParams(**self._options, stop=(*self._model.eos_ids, *stops.ids))
        seed = call_seed(self._seed, request.turn)
        asked = Request(seen, request.max_tokens, sampling, seed, choice=request.episode)
        assert tokenizer is not None  # environments are text
        watcher = StopWatcher(stops, ResponseText(tokenizer, seen))
        handle = self._service.submit(asked, lambda chunk: arrived.put((number, chunk)))
        return _TurnInProgress(handle, watcher)


class _TurnInProgress:
    """A turn of which chunks arrive."""

    def __init__(self, handle: RequestHandle, watcher: StopWatcher):
        self._handle, self._watcher = handle, watcher
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._finish = ""

    def take(self, chunk: ResponseChunk) -> bool:
        """Take a chunk; returns whether it was the last."""
        if self._finish != "stop":  # else a stop string has ended it
            tokens, finish = list(chunk.tokens), chunk.finish
            if (count := self._watcher.take(tokens)) is not None:
                tokens, finish = tokens[:count], "stop"
                self._handle.cancel()
            self._tokens += tokens
            self._logprobs += chunk.logprobs[: len(tokens)]
            self._finish = finish
        return bool(chunk.finish)

    def drawn(self) -> DrawnTurn:
        """The whole turn.

        Raises:
          RunError: the service could not draw it.
        """
        if self._finish not in ("stop", "length"):
            raise RunError(f"a turn could not be drawn: {self._finish}")
        return DrawnTurn(self._tokens, {"logprobs": self._logprobs}, self._finish == "stop")


def play_questions(
    policy: ServicePolicy,
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
        rows = questions.rows([i // samples for i in numbers])
        texts = rows["prompt_text"] or [""] * len(numbers)
        columns = rows["columns"]
        episodes = [
            Episode(
                number=number,
                group=number // samples,
                task={name: values[i] for name, values in columns.items()} | {"prompt": texts[i]},
                seed=episode_seed(seed, 0, number // samples),
            )
            for i, number in enumerate(numbers)
        ]

        def report_progress(ended: int, _: int, before: int = start) -> None:
            progress(before + ended, total, "")

        EpisodePlayer(pool, encoder, limits, policy, progress=report_progress).play(episodes)
        played += episodes
        write(episodes)
    if all(episode.fault for episode in played):
        raise RunError(f"the environment failed in all {total} episodes: {played[0].fault}")
    return played


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
