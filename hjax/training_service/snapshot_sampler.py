"""Sampling from snapshots of trained models, which take turns on one generation service."""

import collections
import contextlib
import dataclasses
import math
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hjax.data.response_text import ResponseText
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.models.compute import Compute
from hjax.models.parameters import Network, Params
from hjax.rollout.engine import Engine
from hjax.rollout.generator import Generator
from hjax.rollout.prompt_encoding import StopConditions, StopWatcher
from hjax.rollout.prompt_log_probs import PromptLogProbs, Top
from hjax.rollout.requests import Request, RequestHandle, ResponseChunk
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import Layout

# Sequences that are with the service at a time, for each of its slots.
_QUEUED_PER_SLOT = 4
# The service's own queue never fills up.
_MAX_QUEUE = 2**30


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """A request for several responses to one prompt.

    Attributes:
      prompt: token ids, at least one.
      num_samples: responses.
      max_tokens: of a response; None: as many as the model has positions for. With
        ``prompt_logprobs`` it may be 0, and is where the prompt fills all positions.
      temperature: divides the logits; 0 is greedy.
      top_k, top_p: as of ``SamplingParams``; 0: all tokens.
      stop: token ids and strings that end a response, which keeps them; None: the model's
        end-of-sequence tokens; empty: nothing ends it.
      seed: any whole number; equal requests with equal seeds draw the same. None: from chance.
      prompt_logprobs: whether the prompt's own tokens are scored.
      top: most probable tokens reported of each response position, at most 20.
    """

    prompt: tuple[int, ...]
    num_samples: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[int | str, ...] | None = None
    seed: int | None = None
    prompt_logprobs: bool = False
    top: int = 0


@dataclasses.dataclass(frozen=True)
class SampledSequence:
    """One response.

    Attributes:
      tokens: a stop token, or the tokens of a stop string, included.
      logprobs: natural logs at the request's temperature, without top-k and top-p.
      stop_reason: "stop" or "length".
      top: for each token the most probable ones of its position, if they were asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    top: tuple[Top, ...] = ()


@dataclasses.dataclass(frozen=True)
class SampleResult:
    """Responses to one prompt.

    Attributes:
      sequences: the responses.
      prompt: untempered log-probs of the prompt's tokens but the first, if they were asked for.
    """

    sequences: tuple[SampledSequence, ...]
    prompt: PromptLogProbs | None = None


class _ServedNetwork:
    """A network whose weights a ``GenerationService`` answers with."""

    def __init__(
        self,
        network: Network,
        layout: Layout,
        compute: Compute,
        tokenizer: Tokenizer | None,
        params: Params,
    ):
        self.config, self.tokenizer, self._layout = network.config, tokenizer, layout
        self._read = network.with_shapes(network.compute_shapes(compute.dtype))
        self._generator = Generator(network, layout, compute)
        self.params = self.place_params(params)

    def engine_for(self, lookup: int) -> Engine:
        return self._generator.engine_for(lookup)

    def place_params(self, params: Any) -> Any:
        return self._generator.decoding_params(self._read.place(params, self._layout))


class _Job:
    """A request, and what has arrived of it."""

    def __init__(
        self,
        number: int,
        snapshot: "SampledWeights",
        request: SampleRequest,
        requests: list[Request],
        stops: StopConditions,
        on_done: Callable[[SampleResult | Exception], None],
        wanted: Callable[[], bool],
    ):
        self.number, self.snapshot, self.request = number, snapshot, request
        self.requests, self.stops, self.on_done, self.wanted = requests, stops, on_done, wanted
        self.left, self.submitted = len(requests), 0
        self.sequences: list[SampledSequence | None] = [None] * len(requests)
        self.prompt: PromptLogProbs | None = None
        self.error: Exception | None = None


class _Collector:
    """The chunks of one response, until it ends; called by the service's thread."""

    def __init__(self, job: _Job, index: int, tokenizer: Any, ended: Callable[[_Job], None]):
        self._job, self._index, self._ended = job, index, ended
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[Top] = []
        self._done = False
        self._handle: RequestHandle | None = None
        self._watch = None
        if job.stops.strings and tokenizer is not None:
            # A stop string may be of special tokens, as renderers' are.
            text = ResponseText(tokenizer, job.request.prompt, skip_special=False)
            self._watch = StopWatcher(job.stops, text)

    def cancel_with(self, handle: RequestHandle) -> None:
        """The handle by which the response is ended at a stop string, perhaps at once."""
        self._handle = handle
        if self._done:
            handle.cancel()

    def take(self, chunk: ResponseChunk) -> None:
        """Add a chunk."""
        if self._done:
            return
        finish, count = chunk.finish, len(chunk.tokens)
        if chunk.prompt is not None:
            self._job.prompt = chunk.prompt
        if self._watch is not None and (cut := self._watch.take(chunk.tokens)) is not None:
            count, finish = cut, "stop"
            if self._handle is not None:
                self._handle.cancel()
        self._tokens += chunk.tokens[:count]
        self._logprobs += (chunk.policy_logprobs or chunk.logprobs)[:count]
        self._top += chunk.top[:count]
        if finish:
            self._finish(finish)

    def _finish(self, finish: str) -> None:
        self._done = True
        if finish in ("stop", "length"):
            self._job.sequences[self._index] = SampledSequence(
                tuple(self._tokens), tuple(self._logprobs), finish, tuple(self._top)
            )
        else:
            self._job.error = RunError(f"sampling ended early: {finish}")
        self._ended(self._job)


@dataclasses.dataclass(frozen=True)
class SampledWeights:
    """A snapshot as a sampler needs it.

    Attributes:
      learned: its trained parameters, by which it is told from others; they must not be donated to
        a program.
      whole: makes the parameters that the network is to have, on the devices.
    """

    learned: Params
    whole: Callable[[], Params]


class SnapshotSampler:
    """Samples from snapshots whose networks have the same shapes, by one generation service.

    One snapshot answers at a time. Requests of another wait until those that run have ended; then
    all requests of the next one's snapshot that had arrived go first.

    Args:
      network: of the models.
      layout, compute: of generation.
      tokenizer: for stop strings; None: there are none.
      eos_ids: tokens that end a response by default.
      first: the first snapshot.
      slots: sequences that run at a time; 0: 16.
      turn: as of ``GenerationService``; the caller has it here.
    """

    def __init__(
        self,
        network: Network,
        layout: Layout,
        compute: Compute,
        *,
        tokenizer: Tokenizer | None,
        eos_ids: tuple[int, ...],
        first: SampledWeights,
        slots: int = 0,
        turn: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ):
        self._tokenizer, self._eos, self._vocab = tokenizer, eos_ids, network.config.vocab_size
        self._current = first.learned
        model = _ServedNetwork(network, layout, compute, tokenizer, first.whole())
        self._service = GenerationService(model, slots=slots, max_queue=_MAX_QUEUE, turn=turn)
        self._room = self._service.slots * _QUEUED_PER_SLOT
        self._waiting: collections.deque[_Job] = collections.deque()
        self._running, self._numbers, self._turn_limit = 0, 0, 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="snapshot sampler", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Responses that wait or run."""
        with self._changed:
            return self._running + sum(job.left for job in self._waiting)

    def submit(
        self,
        snapshot: SampledWeights,
        request: SampleRequest,
        on_done: Callable[[SampleResult | Exception], None],
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Submit a request; returns at once.

        Args:
          snapshot: that is to answer.
          request: the request.
          on_done: called once, from another thread, with the result or what went wrong; it must
            not wait.
          wanted: whether somebody still waits for it; asked before it starts.

        Raises:
          ConfigError: a request that can never be answered.
          RunError: the sampler is closed.
        """
        stops, requests = self._requests(request)
        with self._changed:
            if self._closed:
                raise RunError("the sampler is closed")
            self._numbers += 1
            job = _Job(self._numbers, snapshot, request, requests, stops, on_done, wanted)
            self._waiting.append(job)
            self._changed.notify_all()

    def close(self) -> None:
        """Accept no more; requests that have not finished fail."""
        with self._changed:
            self._closed = True
            left, self._waiting = list(self._waiting), collections.deque()
            self._changed.notify_all()
        for job in left:
            job.on_done(RunError("the sampler is closed"))
        self._service.close(seconds=0)
        self._thread.join()

    def _requests(self, request: SampleRequest) -> tuple[StopConditions, list[Request]]:
        if request.num_samples < 1:
            raise ConfigError(f"num_samples={request.num_samples}: 1 or more")
        stops = StopConditions(self._eos if request.stop is None else request.stop, self._tokenizer)
        options = SamplingParams(
            temperature=request.temperature, top_k=request.top_k, top_p=request.top_p,
            stop=stops.ids, top=request.top,
        )  # fmt: skip
        options.check_vocabulary(self._vocab)
        room = max(self._service.max_tokens - len(request.prompt), 0)
        tokens = room if request.max_tokens is None else request.max_tokens
        if request.prompt_logprobs:
            tokens = min(tokens, room)
        seed = secrets.randbelow(2**32) if request.seed is None else request.seed % 2**32
        made = [
            Request(
                request.prompt, tokens, options, seed=seed, choice=i,
                scored=request.prompt_logprobs and (i == 0 or not tokens),
            )
            for i in range(request.num_samples)
        ]  # fmt: skip
        self._service.check(made[0])
        return stops, made

    # The sampler's thread

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                if not job.wanted():
                    raise RunError("nobody waits for this sample any more")
                if job.snapshot.learned is not self._current:
                    self._service.replace(job.snapshot.whole())
                    self._current = job.snapshot.learned
                self._start(job)
            except Exception as error:
                job.error = error
                self._ended(job, len(job.requests) - job.submitted)

    def _next(self) -> _Job | None:
        """The next request that may start, once there is one; None: the sampler is closed."""
        with self._changed:
            while not self._closed:
                job = next(filter(self._has_turn, self._waiting), None)
                if job is None and self._waiting and not self._running:
                    job, self._turn_limit = self._waiting[0], self._numbers
                if job is not None and (
                    not self._running or self._running + job.left <= self._room
                ):
                    self._waiting.remove(job)
                    self._running += job.left
                    return job
                self._changed.wait()
        return None

    def _has_turn(self, job: _Job) -> bool:
        """Whether a request may start beside those that run; the first waiting one only if its
        snapshot is in use."""
        first = job is self._waiting[0] or job.number <= self._turn_limit
        return job.snapshot.learned is self._current and first

    def _start(self, job: _Job) -> None:
        for index, request in enumerate(job.requests):
            collector = _Collector(job, index, self._tokenizer, self._ended)
            handle = self._service.submit(request, collector.take)
            job.submitted += 1
            collector.cancel_with(handle)

    def _ended(self, job: _Job, count: int = 1) -> None:
        """So many responses of a request have ended."""
        with self._changed:
            self._running -= count
            job.left -= count
            last = job.left == 0
            self._changed.notify_all()
        if not last:
            return
        done = [sequence for sequence in job.sequences if sequence is not None]
        if job.error is not None or len(done) < len(job.sequences):
            job.on_done(job.error or RunError("sampling failed"))
        else:
            job.on_done(SampleResult(tuple(done), job.prompt))


def prompt_log_probs(prompt: Sequence[int], found: PromptLogProbs) -> list[float]:
    """The log-probs of all of a prompt's tokens: NaN for the first, which follows nothing."""
    return [math.nan, *found.logprobs][: len(prompt)]
