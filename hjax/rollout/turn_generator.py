"""Generation of turns: what a policy says next in many episodes at once.

A turn continues the ids that its row has already. Rows stay in their slots between turns where
memory holds all of them, and a turn appends what is new. Else they leave, and the next turn
prefills what the prefix cache does not have: so under pipeline stages, with the TPU's decode kernel
(which takes one token a step), with rotary positions that depend on a sequence's length, and with
fewer slots than episodes.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.environments.episode import DrawnTurn, TurnRequest
from hjax.errors import ConfigError, RunError
from hjax.models.append_attention import BLOCK
from hjax.models.parameters import Layered, unstack_layers
from hjax.rollout.batcher import ContinuousBatcher
from hjax.rollout.bucketing import TurnBuckets
from hjax.rollout.constrained_decoding import FAILED, ConstraintCompiler, ConstraintMatcher
from hjax.rollout.engine import Engine
from hjax.rollout.lasting_batcher import LastingBatcher
from hjax.rollout.prefix_cache import PrefixCache, affordable_tokens, why_no_blocks
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
      rows: rows whose keys and values are kept between turns; None: twice the slots. Where a share
        of the free memory holds so many, at most twice the slots, they stay in slots; else the
        prefix cache has what it has room for.

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
        held = 2 * slots if rows is None else rows
        slots = -(-slots // parts) * parts
        wanted = -(-held // parts) * row_tokens // BLOCK * BLOCK
        room = 0 if why_no_blocks(engine) else affordable_tokens(engine, wanted)
        stay = bool(room) and room == wanted and held <= 2 * slots
        stay = stay and not (engine.uses_kernel or engine.draft_tokens)
        self._engine = engine = engine.of_lasting_rows if stay else engine
        room = room // 2 if stay else room
        params = self._by_layer(params)
        prefixes = PrefixCache(engine, room) if room else None
        # Those that draw together have slots of their own: none of a batch's rows is idle.
        self._batchers = [
            (LastingBatcher if stay else ContinuousBatcher)(
                engine, params,
                slots=slots, max_tokens=row_tokens, prefixes=prefixes,
                prefill_batches=(-(-slots // 8), slots), bucketing=TurnBuckets,
            )
            for _ in range(-(-held // slots) if stay else 1)
        ]  # fmt: skip
        vocab = self._batchers[0].sampling_sizes.vocab
        self._constraints = ConstraintCompiler(tokenizer, vocab)

    @property
    def totals(self) -> dict[str, int]:
        """Tokens so far, as ``ContinuousBatcher.totals``."""
        totals = collections.Counter[str]()
        for batcher in self._batchers:
            totals.update(batcher.totals)
        return dict(totals)

    def precompile(self) -> None:
        """Compile every program that turns may need."""
        self._batchers[0].precompile(scores=False)  # the others call the same

    def replace_params(self, params: Any) -> None:
        """Draw with other weights, or with none (None) until there are some again."""
        for batcher in self._batchers:
            batcher.replace_params(self._by_layer(params))

    def _by_layer(self, params: Any) -> Any:
        """The weights with an array per layer if layers are unrolled: programs of a turn are short,
        and each would cut the stacked arrays anew."""
        unrolled = self._engine.compute.unroll_layers and self._engine.row_columns
        if params is None or isinstance(params, Layered) or not unrolled:
            return params
        return unstack_layers(params, self._engine.network.shardings(self._engine.layout))

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
        for batcher in self._batchers:
            while batcher.busy:
                batcher.advance()
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
        try:
            matcher = self._matcher(request, sampling, seen)
        except ConfigError as error:  # of the one who asks: the others go on
            return _TurnInProgress.that_failed(asked, f"{FAILED}{error}")
        turn = _TurnInProgress(watcher)
        turn.handle = RequestHandle(asked, matcher, turn.take)
        batcher = self._batchers[request.cohort % len(self._batchers)]
        batcher.waiting.requests.append(turn.handle)
        return turn

    def _matcher(
        self, request: TurnRequest, sampling: SamplingParams, seen: Sequence[int]
    ) -> ConstraintMatcher | None:
        if request.constraint is None:
            return None
        return self._constraints.matcher(request.constraint, sampling, seen)


class _TurnInProgress:
    """A turn of which chunks arrive; ``watcher``: of its stop strings, None without any."""

    handle: RequestHandle

    def __init__(self, watcher: StopWatcher | None):
        self._watcher = watcher
        self._tokens: list[int] = []
        self._logprobs: dict[str, list[float]] = {"logprobs": [], "policy_logprobs": []}
        self._finish = ""

    @classmethod
    def that_failed(cls, asked: Request, finish: str) -> _TurnInProgress:
        """One of which nothing is drawn."""
        turn = cls(None)
        turn.handle = RequestHandle(asked, None, turn.take)
        turn.take(ResponseChunk(finish=finish))
        return turn

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
        finish, matcher = self._finish, self.handle.matcher
        failed = finish if finish.startswith(FAILED) else ""
        if finish not in ("stop", "length") and not failed:
            raise RunError(f"a turn could not be drawn: {finish or 'it has no end'}")
        forced = [] if matcher is None else matcher.forced[: len(self._tokens)]
        return DrawnTurn(self._tokens, self._logprobs, finish == "stop", forced, failed)
