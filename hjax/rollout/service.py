"""The generation service: concurrent requests answered by one engine (continuous batching).

Servers and chats run on it. One thread owns the engine and its ``ContinuousBatcher``; others submit
requests, cancel them and read what arrives. Weights can be replaced between two requests.
"""

import atexit
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.rollout.batcher import ContinuousBatcher
from hjax.rollout.constrained_decoding import ConstraintCompiler, ConstraintMatcher
from hjax.rollout.engine import Engine
from hjax.rollout.prefix_cache import PrefixCache, affordable_tokens, why_no_blocks
from hjax.rollout.requests import QueueFull, Request, RequestHandle, ResponseChunk
from hjax.rollout.row_sampling import RowSampling

SLOTS = 16
# Default capacity of the prefix cache.
PREFIX_TOKENS = 16 * 1024


class ServableModel(Protocol):
    """What a service needs of a model: a ``LanguageModel``."""

    config: Any
    params: Any
    tokenizer: Tokenizer | None

    def engine_for(self, lookup: int) -> Engine: ...

    def place_params(self, params: Any) -> Any: ...


class GenerationService:
    """An engine for concurrent requests.

    Args:
      model: whose weights answer.
      slots: requests that run at a time; 0: 16.
      max_queue: most requests that wait.
      prefix_tokens: capacity of the prefix cache; 0: none, and long prompts are prefilled whole.
        None: the tokens of the longest prompt, at least 16384, as far as a quarter of the free
        memory holds them, if the model allows it; see ``stats``.
      lookup: draft tokens per pass (speculative decoding), see ``hjax.rollout.prompt_lookup``;
        answers are the same.
      context: most tokens of a prompt and its response; 0: the model's positions.
      turn: makes a context manager within which the devices are this service's; None: nothing else
        runs programs of several devices.

    Raises:
      ConfigError: a number out of its range, or a prefix cache that the engine cannot have.

    Attributes:
      max_tokens: of a prompt and its response together.
      slots: as given, rounded up to the data-parallel parts.
    """

    def __init__(
        self,
        model: ServableModel,
        slots: int = 0,
        max_queue: int = 1024,
        prefix_tokens: int | None = None,
        lookup: int = 0,
        context: int = 0,
        turn: Callable[[], contextlib.AbstractContextManager[None]] | None = None,
    ):
        if min(slots, max_queue, prefix_tokens or 0, lookup) < 0:
            raise ConfigError(
                f"slots={slots}, max_queue={max_queue}, prefix_tokens={prefix_tokens}, "
                f"lookup={lookup}: 0 or more"
            )
        most = model.config.max_length
        if not 0 <= context <= most or context == 1:
            raise ConfigError(f"context={context}: 2 to {most}, or 0 for {most}")
        self._turn = turn or contextlib.nullcontext
        self._model, self._engine = model, model.engine_for(lookup)
        self.slots = slots or SLOTS
        parts = self._engine.parts
        self.slots = -(-self.slots // parts) * parts
        self.max_queue, self.max_tokens = max_queue, context or most
        reason = why_no_blocks(self._engine)
        if prefix_tokens is None:
            most = max(PREFIX_TOKENS, self.max_tokens)
            prefix_tokens = 0 if reason else affordable_tokens(self._engine, most)
        if prefix_tokens and reason:
            raise ConfigError(f"prefix_tokens={prefix_tokens}: {reason}; give 0")
        self._batcher = ContinuousBatcher(
            self._engine, model.params, slots=self.slots, max_tokens=self.max_tokens,
            prefixes=PrefixCache(self._engine, prefix_tokens) if prefix_tokens else None,
        )  # fmt: skip
        self._constraints = ConstraintCompiler(model.tokenizer, model.config.vocab_size)
        self._inbox: list[RequestHandle] = []  # submitted, and not yet the batcher's
        self._replacement: tuple[Any, concurrent.futures.Future[None]] | None = None
        self._changed = threading.Condition()
        self._had_request = False
        self._closing, self._ends_at = False, 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="rollout service", daemon=True)
        self._thread.start()
        # A thread that frees arrays while the interpreter exits aborts the process.
        atexit.register(self.close, seconds=0.0)

    # Called from any thread

    def submit(
        self,
        request: Request,
        on_chunk: Callable[[ResponseChunk], None],
        matcher: ConstraintMatcher | None = None,
    ) -> RequestHandle:
        """Submit a request; returns at once.

        Args:
          request: the request.
          on_chunk: called with each chunk, from the engine's thread: it must not wait.
          matcher: that ``prepare`` made of this request, for nothing else; None: it is made here.

        Raises:
          ConfigError: a request that can never be answered.
          QueueFull: too many wait.
          RunError: the service is closed, or its engine failed.
        """
        self.check(request)
        handle = RequestHandle(request, matcher or self.prepare(request), on_chunk)
        with self._changed:
            self._check_open("requests")
            there = *self._batcher.waiting.requests, *self._inbox
            waiting = sum(not handle.chunking for handle in there)
            if waiting >= self.max_queue:
                raise QueueFull(f"{waiting} requests wait, as many as may; try later")
            self._had_request = True
            self._inbox.append(handle)
            self._changed.notify()
        return handle

    def prepare(self, request: Request) -> ConstraintMatcher | None:
        """Compile a request's constraint, which takes a moment; ConfigError if it is invalid."""
        if request.constraint is None:
            return None
        return self._constraints.matcher(request.constraint, request.options, request.prompt)

    def replace(self, params: Any, seconds: float | None = None) -> None:
        """Update the weights: answer with others of the same model; returns once they are in use.

        Admission stops; running requests finish on the old weights, all others get the new ones
        alone. Nothing is compiled again. Both are in memory meanwhile. Other services of this model
        would not notice: there must be none.

        Args:
          params: float32 parameters; those that lie as the model's do are not copied.
          seconds: that running requests have to finish; None: no limit.

        Raises:
          ConfigError: other names, shapes or dtypes.
          RunError: running requests did not finish in time, another call is replacing the weights,
            or the service closes. The old weights stay, as after a ConfigError.
        """
        if threading.current_thread() is self._thread:
            raise RunError("a request's listener cannot replace the weights; do it elsewhere")
        taken: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._turn():
            replacement = self._model.place_params(params), taken
        with self._changed:
            self._check_open("weights")
            if self._replacement is not None:
                raise RunError("others are replacing the weights; try when that has ended")
            self._replacement = replacement
            self._changed.notify()
        try:
            concurrent.futures.wait([taken], seconds)
        finally:
            with self._changed:
                if self._replacement is replacement:
                    late = f"running requests did not end within {seconds} s"
                    self._end_replacement(f"{late}; the old weights go on")
        taken.result()

    def warm_up(self, on_progress: Callable[[str], None] = lambda line: None) -> None:
        """Compile every program that requests may need, of any lengths, before the first request.

        Args:
          on_progress: called with what is compiled next, in a few words.

        Raises:
          RunError: a request came before.
        """
        with self._changed:
            self._check_open("requests")
            if self._had_request:
                raise RunError("warm_up comes before the first request")
            self._batcher.precompile(on_progress)

    def stats(self) -> dict[str, float]:
        """``running``, ``waiting``, ``slots``, ``generated_tokens``, ``prompt_tokens``, of which
        the prefix cache had ``cached_tokens``; ``kept_tokens`` it holds, of ``kept_room``;
        ``guessed_tokens`` are draft tokens, of which ``right_tokens`` were accepted."""
        batcher, prefixes = self._batcher, self._batcher.prefixes
        with self._changed:
            return {
                "running": len(batcher.running),
                "waiting": len(batcher.waiting.requests) + len(self._inbox),
                "slots": self.slots,
                "kept_tokens": 0 if prefixes is None else prefixes.used,
                "kept_room": 0 if prefixes is None else prefixes.capacity,
                **batcher.totals,
            }

    def close(self, seconds: float = 10.0) -> None:
        """Accept no more; pending requests have this long to finish, then they are cancelled."""
        with self._changed:
            self._closing, self._ends_at = True, time.monotonic() + seconds
            self._end_replacement("the service is closing and takes no weights")
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def _check_open(self, what: str) -> None:
        if self._error is not None:
            raise RunError(f"the engine failed: {self._error}")
        if self._closing:
            raise RunError(f"the service is closing and takes no {what}")

    def _end_replacement(self, refused: str = "") -> None:
        if self._replacement is not None:
            (_, taken), self._replacement = self._replacement, None
            if refused:
                taken.set_exception(RunError(refused))
            else:
                taken.set_result(None)

    def check(self, request: Request) -> None:
        """Raise ConfigError for a request that can never be answered."""
        vocab = self._model.config.vocab_size
        if not request.prompt:
            raise ConfigError("the prompt is empty; give at least one token")
        wrong = [t for t in request.prompt if not 0 <= t < vocab]
        if wrong:
            raise ConfigError(f"token {wrong[0]} is outside the vocabulary, 0 to {vocab - 1}")
        if request.max_tokens < (0 if request.scored else 1):
            raise ConfigError(f"max_tokens={request.max_tokens}: 1 or more")
        total = len(request.prompt) + request.max_tokens
        if total > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} and max_tokens={request.max_tokens} exceed "
                f"the {self.max_tokens} tokens that there is room for"
            )
        if not (0 <= request.seed < 2**32 and 0 <= request.choice < 2**31):
            raise ConfigError(
                f"seed={request.seed}, choice={request.choice}: seeds are 0 to {2**32 - 1}"
            )
        RowSampling.of([request.options], self._batcher.sampling_sizes)

    # The engine's thread

    def _serve(self) -> None:
        try:
            while self._wait():
                # While others replace the weights, running requests finish first.
                with self._turn():
                    self._batcher.advance(admits=self._replacement is None)
        except BaseException as error:  # every pending request gets it
            with self._changed:
                self._error = error
                self._end_replacement(f"the engine failed: {error}")
            self._end_all(f"error: {error}")
            if not isinstance(error, Exception):
                raise

    def _wait(self) -> bool:
        """Wait for something to do, and take what was submitted; False: closed, and nothing is
        left."""
        batcher = self._batcher
        with self._changed:
            while True:
                self._take_submitted()
                if self._replacement is not None and not batcher.running:
                    self._model.params = self._replacement[0]
                    batcher.replace_params(self._model.params)
                    self._end_replacement()
                if self._closing and (not batcher.busy or time.monotonic() > self._ends_at):
                    break
                if batcher.busy:
                    return True
                batcher.release_slots()
                self._changed.wait()
        self._end_all("cancelled")
        return False

    def _take_submitted(self) -> None:
        self._batcher.waiting.requests += self._inbox
        self._inbox = []

    def _end_all(self, finish: str) -> None:
        with self._changed:
            self._take_submitted()
        self._batcher.end_all(finish)
