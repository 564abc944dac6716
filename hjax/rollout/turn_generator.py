"""Generation of turns: what a policy says next in many episodes at once.

A turn continues the ids that its row has already; of these only what no earlier turn left in the
prefix cache is prefilled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode import DrawnTurn, TurnRequest
from hjax.errors import RunError
from hjax.rollout.batcher import ContinuousBatcher
from hjax.rollout.bucketing import TurnBuckets
from hjax.rollout.engine import Engine
from hjax.rollout.prefix_cache import affordable_tokens, why_no_blocks
from hjax.rollout.prompt_encoding import StopConditions, StopWatcher
from hjax.rollout.requests import Request, RequestHandle, ResponseChunk
from hjax.rollout.sampling_params import SamplingParams


class TurnGenerator:
    """Draws turns by an engine, as many at a time as it has slots.

    What a turn draws follows from the seed, the step, the episode's number and how many tokens the
    episode has had.

    Args:
      engine: of the model.
      params: its weights, as decoding reads them.
      tokenizer: of the model.
      slots: turns that are drawn at a time; rounded up to the engine's data-parallel parts.
      row_tokens: most tokens of a row.
      rows: rows that the prefix cache is to hold, as far as a share of the free memory does; None:
        twice the slots.

    Attributes:
      sizes: ``slots``, ``row_tokens`` and ``rows`` as given.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        tokenizer: Tokenizer,
        *,
        slots: int,
        row_tokens: int,
        rows: int | None = None,
    ):
        self.sizes = slots, row_tokens, rows
        parts = engine.parts
        self._tokenizer = tokenizer
        held = -(-(2 * slots if rows is None else rows) // parts) * row_tokens
        room = 0 if why_no_blocks(engine) else affordable_tokens(engine, held)
        slots = -(-slots // parts) * parts
        self._batcher = ContinuousBatcher(
            engine, params,
            slots=slots, max_tokens=row_tokens, prefix_tokens=room,
            prefill_batches=(-(-slots // 8), slots), bucketing=TurnBuckets,
        )  # fmt: skip

    @property
    def totals(self) -> dict[str, int]:
        """Tokens so far, as ``ContinuousBatcher.totals``."""
        return self._batcher.totals

    def precompile(self) -> None:
        """Compile every program that turns may need."""
        self._batcher.precompile(scores=False)

    def replace_params(self, params: Any) -> None:
        """Draw with other weights, or with none (None) until there are some again."""
        self._batcher.replace_params(params)

    def draw(
        self,
        requests: Sequence[TurnRequest],
        *,
        seed: int,
        step: int = 0,
        sampling: SamplingParams,
        stop: StopConditions | None = None,
    ) -> list[DrawnTurn]:
        """Draw a turn for each request.

        Args:
          requests: of different episodes.
          seed: of the run.
          step: of the run, folded into the seed.
          sampling: of all of them, with the tokens that end a turn.
          stop: strings that end a turn beside those of the request; None: no others.

        Returns:
          the turns, with ``logprobs`` of the distribution sampled and ``policy_logprobs``, of the
          model's own at the temperature.

        Raises:
          RunError: the engine could not draw one.
        """
        turns = [
            self._submit(request, seed=seed, step=step, sampling=sampling, stop=stop)
            for request in requests
        ]
        while self._batcher.busy:
            self._batcher.advance()
        return [turn.drawn() for turn in turns]

    def _submit(
        self,
        request: TurnRequest,
        *,
        seed: int,
        step: int,
        sampling: SamplingParams,
        stop: StopConditions | None,
    ) -> _TurnInProgress:
        strings = () if stop is None else stop.strings
        stops = StopConditions([*strings, *request.stop], self._tokenizer, sampling.min_tokens)
        seen = (*request.prompt, *request.response)
        if stops.ids:
            sampling = dataclasses.replace(sampling, stop=(*sampling.stop, *stops.ids))
        asked = Request(
            prompt=seen,
            max_tokens=request.max_tokens,
            options=sampling,
            seed=seed,
            choice=request.episode,
            step=step,
            first_draw=request.first_draw,
        )
        watcher = None
        if stops.strings:
            watcher = StopWatcher(stops, ResponseText(self._tokenizer, seen))
        turn = _TurnInProgress(watcher)
        turn.handle = RequestHandle(asked, None, turn.take)
        self._batcher.waiting.requests.append(turn.handle)
        return turn


class _TurnInProgress:
    """A turn of which chunks arrive; ``watcher``: of its stop strings, None without any."""

    handle: RequestHandle

    def __init__(self, watcher: StopWatcher | None):
        self._watcher = watcher
        self._tokens: list[int] = []
        self._logprobs: dict[str, list[float]] = {"logprobs": [], "policy_logprobs": []}
        self._finish = ""

    def take(self, chunk: ResponseChunk) -> None:
        """Take a chunk."""
        if self._finish == "stop":  # a stop string has ended it
            return
        tokens, finish = list(chunk.tokens), chunk.finish
        count = None if self._watcher is None else self._watcher.take(tokens)
        if count is not None:
            tokens, finish = tokens[:count], "stop"
            self.handle.cancel()
        self._tokens += tokens
        for name, values in self._logprobs.items():
            values += getattr(chunk, name)[: len(tokens)]
        self._finish = finish

    def drawn(self) -> DrawnTurn:
        """The whole turn."""
        if self._finish not in ("stop", "length"):
            raise RunError(f"a turn could not be drawn: {self._finish or 'it has no end'}")
        return DrawnTurn(self._tokens, self._logprobs, self._finish == "stop")
