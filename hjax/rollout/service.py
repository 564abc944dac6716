"""The generation service: concurrent requests answered by one engine (continuous batching).

Servers and chats run on it. One thread owns the engine. Between dispatches it admits waiting
requests, delivers what was drawn, and drops cancelled requests. The prefix cache keeps keys and
values of prompts and answers for prompts that begin alike; long prompts are prefilled in chunks,
between which others decode. A request's tokens follow from the request and its seed alone, not from
its slot or from other requests (up to float32's rounding, docs/design.md section 9). Weights can be
replaced between two requests.
"""

import atexit
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.models.append_attention import BLOCK
from hjax.rollout import vocab_parallel
from hjax.rollout.bucketing import PREFILL_CHUNK, ServiceBuckets
from hjax.rollout.constrained_decoding import ConstraintCompiler, ConstraintMatcher
from hjax.rollout.engine import Engine
from hjax.rollout.precompile import Precompilation
from hjax.rollout.prefix_cache import (
    CachedPrefix,
    PrefixCache,
    affordable_tokens,
    cached_columns,
    text_table,
    uncached_tokens,
    why_no_prefix_cache,
)
from hjax.rollout.prompt_log_probs import PromptScorer, Top, top_tokens
from hjax.rollout.requests import QueueFull, Request, RequestHandle, ResponseChunk
from hjax.rollout.row_sampling import RowSampling, SamplingSizes
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import Admission, DecodedTokens
from hjax.rollout.slot_table import SlotTable
from hjax.sharding.global_arrays import place, to_numpy

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
    ):
        if min(slots, max_queue, prefix_tokens or 0, lookup) < 0:
            raise ConfigError(
                f"slots={slots}, max_queue={max_queue}, prefix_tokens={prefix_tokens}, "
                f"lookup={lookup}: 0 or more"
            )
        most = model.config.max_length
        if not 0 <= context <= most or context == 1:
            raise ConfigError(f"context={context}: 2 to {most}, or 0 for {most}")
        self._model, self._engine = model, model.engine_for(lookup)
        self.slots = slots or SLOTS
        parts = self._engine.parts
        self.slots = -(-self.slots // parts) * parts
        self.max_queue, self.max_tokens = max_queue, context or most
        reason = why_no_prefix_cache(self._engine)
        if prefix_tokens is None:
            most = max(PREFIX_TOKENS, self.max_tokens)
            prefix_tokens = 0 if reason else affordable_tokens(self._engine, most)
        if prefix_tokens and reason:
            raise ConfigError(f"prefix_tokens={prefix_tokens}: {reason}; give 0")
        self._prefixes = PrefixCache(self._engine, prefix_tokens) if prefix_tokens else None
        self._scorer = PromptScorer(self._engine)
        sizes = self._sampling_sizes = SamplingSizes(model.config.vocab_size, penalties=True)
        self._buckets = ServiceBuckets(self._engine, self.slots, self.max_tokens, sizes)
        self._constraints = ConstraintCompiler(model.tokenizer, model.config.vocab_size)
        self._waiting: list[RequestHandle] = []  # in order of arrival; also those being chunked
        self._running: dict[int, RequestHandle] = {}  # by number in the slot table
        self._last_id = 0
        self._table = SlotTable(self._engine, self._buckets)
        self._replacement: tuple[Any, concurrent.futures.Future[None]] | None = None
        self._changed = threading.Condition()
        self._had_request = False
        self._closing, self._ends_at = False, 0.0
        self._error: BaseException | None = None
        kinds = ("generated", "prompt", "cached", "guessed", "right")
        self._totals = {f"{kind}_tokens": 0 for kind in kinds}  # for ``stats``
        self._keys = jax.jit(jax.vmap(_key))
        self._allow_all = functools.cache(self._make_allow_all)
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
        self._check(request)
        handle = RequestHandle(request, matcher or self.prepare(request), on_chunk)
        with self._changed:
            self._check_open("requests")
            waiting = sum(not handle.chunking for handle in self._waiting)
            if waiting >= self.max_queue:
                raise QueueFull(f"{waiting} requests wait, as many as may; try later")
            self._had_request = True
            self._waiting.append(handle)
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
            Precompilation(
                self._buckets, self._model.params, self._prefixes, self._scorer,
                admission=self._admission, every=self._allow_all,
            ).run(on_progress)  # fmt: skip

    def stats(self) -> dict[str, float]:
        """``running``, ``waiting``, ``slots``, ``generated_tokens``, ``prompt_tokens``, of which
        the prefix cache had ``cached_tokens``; ``kept_tokens`` it holds, of ``kept_room``;
        ``guessed_tokens`` are draft tokens, of which ``right_tokens`` were accepted."""
        prefixes = self._prefixes
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "slots": self.slots,
                "kept_tokens": 0 if prefixes is None else prefixes.used,
                "kept_room": 0 if prefixes is None else prefixes.capacity,
                **self._totals,
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

    def _check(self, request: Request) -> None:
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
        RowSampling.of([request.options], self._sampling_sizes)

    # The engine's thread

    def _serve(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                if self._replacement is None:  # else running requests finish first
                    self._score_prompt()
                    self._prefill_chunk()
                    self._admit()
                if self._running:
                    self._decode()
        except BaseException as error:  # every pending request gets it
            with self._changed:
                self._error = error
                self._end_replacement(f"the engine failed: {error}")
            self._finish_all(f"error: {error}")
            if not isinstance(error, Exception):
                raise

    def _wait(self) -> bool:
        """Wait for something to do; False: closed, and nothing is left."""
        with self._changed:
            while True:
                if self._replacement is not None and not self._running:
                    self._swap_weights(self._replacement[0])
                busy = self._waiting or self._running
                if self._closing and (not busy or time.monotonic() > self._ends_at):
                    break
                if busy:
                    return True
                # Idle: drop the state, so that the next one is as small as it can be.
                self._table.state = None
                self._changed.wait()
        self._finish_all("cancelled")
        return False

    def _swap_weights(self, params: Any) -> None:
        """Use other weights: the prefix cache and all scores are invalid."""
        self._scorer.clear()
        for handle in self._waiting:
            self._release_prefix(handle)
            handle.prefilled_tokens, handle.scores = 0, None
            handle.unchunked = handle.chunking = False
        if self._prefixes is not None:
            self._prefixes.clear()
        self._table.state, self._model.params = None, params
        self._end_replacement()

    def _finish_all(self, finish: str) -> None:
        with self._changed:
            left = [*self._running.values(), *self._waiting]
            self._release(set(left))
            self._waiting.clear()
        for handle in left:
            handle.deliver(ResponseChunk(finish=finish))

    def _release(self, handles: set[RequestHandle]) -> np.ndarray:
        """Free the rows of these requests; returns bool [parts, rows], which they were."""
        numbers = [number for number, handle in self._running.items() if handle in handles]
        rows = np.isin(self._table.sequence_ids, numbers)
        self._table.release_rows(rows)
        for number in numbers:
            del self._running[number]
        return rows

    def _drop_cancelled(self) -> None:
        with self._changed:
            # Read only once, as clients cancel at any moment.
            there = *self._running.values(), *self._waiting
            gone = [handle for handle in there if handle.cancelled]
            for handle in gone:
                self._release_prefix(handle)
            self._waiting = [handle for handle in self._waiting if handle not in gone]
            rows = self._release(set(gone))
        self._table.stop_rows(rows)
        for handle in gone:
            handle.deliver(ResponseChunk(finish="cancelled"))

    def _first_waiting(self, of: Callable[[RequestHandle], bool]) -> RequestHandle | None:
        """The first waiting request that satisfies a condition."""
        with self._changed:
            return next(filter(of, self._waiting), None)

    def _score_prompt(self) -> None:
        """Score the prompt of a waiting request; a request for scores only then ends."""
        handle = self._first_waiting(lambda handle: handle.needs_scores)
        if handle is None:
            return
        prompt = handle.request.prompt
        columns = self._buckets.prompt_columns(len(prompt))
        handle.scores = self._scorer(self._model.params, prompt, columns)
        if not handle.request.max_tokens:
            with self._changed:
                self._waiting.remove(handle)
                handle.cached_tokens = 0
                self._totals["prompt_tokens"] += len(prompt)
            handle.deliver(ResponseChunk(finish="length", prompt=handle.scores))

    def _prefill_chunk(self) -> None:
        """Prefill a chunk of a long prompt."""
        handle = self._first_waiting(lambda handle: handle.chunking)
        if handle is None:
            return
        assert self._prefixes is not None
        if self._uncached(handle) > PREFILL_CHUNK:  # unless another request cached it meanwhile
            prompts, params, limit = [handle.request.prompt], self._model.params, self.max_tokens
            there = self._prefixes.prefill_chunk(params, prompts, PREFILL_CHUNK, limit)
            handle.unchunked = not there
            handle.prefilled_tokens += 0 if handle.unchunked else PREFILL_CHUNK
        handle.chunking = self._uncached(handle) > PREFILL_CHUNK and not handle.unchunked

    def _uncached(self, handle: RequestHandle) -> int:
        """Number of uncached tokens of its prompt; the cached prefix is acquired."""
        prompt = handle.request.prompt
        if self._prefixes is not None:
            self._release_prefix(handle)
            handle.cached_prefix = self._prefixes.match(prompt)
        return len(prompt) - handle.cached_prefix.tokens

    def _release_prefix(self, handle: RequestHandle) -> None:
        """Release its cached prefix."""
        if self._prefixes is not None:
            self._prefixes.release(handle.cached_prefix)
            handle.cached_prefix = CachedPrefix()

    def _next_waiting(self, count: int) -> list[RequestHandle]:
        """Up to ``count`` waiting requests, in order of arrival, their cached prefixes acquired.

        Of several whose prompts continue alike, one enters now and the others once that is cached.
        """
        entering: list[RequestHandle] = []
        goes_on: set[tuple] = set()
        for handle in self._waiting:
            if len(entering) == count:
                break
            if handle.chunking or handle.needs_scores:
                continue
            if self._prefixes is not None:
                rest, known = self._uncached(handle), handle.cached_prefix.tokens
                handle.chunking = rest > PREFILL_CHUNK and not handle.unchunked
                ahead = handle.cached_prefix, handle.request.prompt[known : known + BLOCK]
                later = rest > BLOCK and ahead in goes_on
                if handle.chunking or later:
                    continue
                goes_on.add(ahead)
            entering.append(handle)
        self._waiting = [handle for handle in self._waiting if handle not in entering]
        return entering

    def _admit(self) -> None:
        """Admit waiting requests."""
        table, buckets, prefixes = self._table, self._buckets, self._prefixes
        taken, rows = table.live.sum(axis=1), buckets.rows

        def room(rows: int, each: int) -> int:
            """How many may enter a state of ``rows`` rows, at most ``each`` per part."""
            return int(np.clip(rows - taken, 0, each).sum())

        with self._changed:
            entering = self._next_waiting(room(rows[-1], buckets.prefill_batches[-1]))
        if not entering:
            return
        count = len(entering)
        each = next(n for n in buckets.prefill_batches if room(rows[-1], n) >= count)
        longest = max(len(handle.request.prompt) for handle in entering)
        self._ensure_size(longest, next(n for n in rows if room(n, each) >= count))
        with self._changed:
            entries, where = self._assign_rows(entering, each)
        columns = 0 if prefixes is None else cached_columns(longest, self.max_tokens)
        tokens = [
            [len(t.request.prompt) - t.cached_prefix.tokens for t in entries[at : at + each] if t]
            for at in range(0, len(entries), each)
        ]
        new = self._admission(entries, where, buckets.prefill_size(tokens, each, columns), columns)
        blocks = None if prefixes is None else prefixes.blocks
        drawn = table.admit(SamplingParams(), self._model.params, new, blocks)
        with self._changed:
            for handle in entering:
                handle.cached_tokens = max(handle.cached_prefix.tokens - handle.prefilled_tokens, 0)
                self._totals["prompt_tokens"] += len(handle.request.prompt)
                self._totals["cached_tokens"] += handle.cached_tokens
        there = [(row, t.request.prompt) for row, t in self._rows() if t and t in entering]
        self._store_prefixes(there)
        for handle in entering:
            self._release_prefix(handle)
        self._deliver(entries, drawn)

    def _rows(self) -> Iterator[tuple[int, RequestHandle | None]]:
        """Each row of the state, with its request."""
        yield from enumerate(map(self._running.get, self._table.sequence_ids.ravel().tolist()))

    def _store_prefixes(self, sequences: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Store what rows have computed in the prefix cache."""
        if self._prefixes is not None and sequences:
            self._prefixes.store(self._table.state, sequences)

    def _ensure_size(self, tokens: int, rows: int) -> None:
        """Have a state with at least ``rows`` rows per part, in which prompts of ``tokens`` tokens
        can end at the next column, or begin at column 0."""
        engine, table, buckets = self._engine, self._table, self._buckets
        if table.state is None:
            # For the kernel as many columns as a row may ever need.
            most = self.max_tokens if engine.uses_kernel else tokens
            table.open(rows, buckets.length_for(most, rows), tokens)
            return
        if rows > table.sequence_ids.shape[1]:
            table.grow_rows(rows)
        if engine.uses_kernel or tokens <= table.column and not engine.row_columns:
            return
        length = max(table.length, buckets.length_for(tokens, table.sequence_ids.shape[1]))
        first = 0
        if not engine.row_columns:
            # Further than needed, as the next prompt is likely to be longer still.
            further = min(2 * buckets.steps, length - buckets.spare_columns - tokens)
            first = table.column - tokens - further
        table.move_columns(first, length)

    def _assign_rows(
        self, entering: list[RequestHandle], each: int
    ) -> tuple[list[RequestHandle | None], np.ndarray]:
        """Assign rows to requests that enter, taking the parts in turn. Returns the request of each
        entry, and its row within its part; a padding entry has a row beyond the last."""
        table, free = self._table, self._table.free_groups()
        seats = [(part, f[i]) for i in range(each) for part, f in enumerate(free) if i < len(f)]
        entries: list[RequestHandle | None] = [None] * (len(free) * each)
        where = np.full(len(entries), table.sequence_ids.shape[1], np.int32)
        used = [part * each for part in range(len(free))]
        for handle, (part, row) in zip(entering, seats):
            self._last_id += 1
            self._running[self._last_id] = handle
            table.assign(part, row, np.array([self._last_id]), len(handle.request.prompt))
            entries[used[part]], where[used[part]] = handle, row
            used[part] += 1
        return entries, where

    def _admission(
        self,
        entries: list[RequestHandle | None],
        where: np.ndarray,
        room: tuple[int, int],
        known: int,
    ) -> Admission:
        """The ``Admission`` of these entries. ``room``: columns of each and size of the packed
        form, as in ``ServiceBuckets``; ``known``: as in ``uncached_tokens``."""
        columns, flat = room
        asked = [None if t is None else t.request for t in entries]
        prompts = [() if r is None else r.prompt for r in asked]
        found = [CachedPrefix() if t is None else t.cached_prefix for t in entries]
        tokens, mask, cached = uncached_tokens(prompts, found, columns, known)
        seeds = np.array([0 if r is None else r.seed for r in asked], np.uint32)
        choices = np.array([0 if r is None else r.choice for r in asked], np.int32)
        return Admission(
            tokens,
            mask,
            where,
            where,
            np.asarray(self._keys(seeds, choices)),
            np.array([1 if r is None else r.max_tokens for r in asked], np.int32),
            RowSampling.of([None if r is None else r.options for r in asked], self._sampling_sizes),
            cached,
            text_table(prompts, self.max_tokens if self._engine.draft_tokens else 0),
            self._bitmasks(entries),
            packed_size=flat,
        )

    def _decode(self) -> None:
        table, buckets, running = self._table, self._buckets, self._running.values()
        waits = self._first_waiting(lambda handle: not handle.chunking and not handle.needs_scores)
        if waits is None and not self._engine.uses_kernel:
            rows = next(n for n in buckets.rows if n >= table.max_live_rows)
            if rows < table.sequence_ids.shape[1]:
                length = next(n for n in buckets.lengths_for(rows) if n >= table.length)
                table.move_columns(0, length)
                table.shrink_rows(rows)
        table.ensure_columns(max(len(row.request.prompt) + len(row.tokens) for row in running))
        # A matcher's bitmask is known for one token ahead.
        steps = 1 if any(row.matcher for row in running) else buckets.steps
        entries = [handle for _, handle in self._rows()]
        bitmasks = self._bitmasks(entries)
        drawn = table.decode(SamplingParams(), self._model.params, steps, bitmasks)
        with self._changed:
            if drawn.guessed is not None and drawn.right is not None:
                self._totals["guessed_tokens"] += int(drawn.guessed.sum())
                self._totals["right_tokens"] += int(drawn.right.sum())
        self._deliver(entries, drawn)

    def _bitmasks(self, entries: Sequence[RequestHandle | None]) -> np.ndarray | jax.Array:
        """uint32 [entries, words], the tokens that each may draw; always given, so that one program
        serves requests with and without a constraint."""
        matchers = [None if handle is None else handle.matcher for handle in entries]
        if not any(matchers):
            return self._allow_all(len(entries))
        everything = vocab_parallel.full_bitmask(1, self._sampling_sizes.vocab)[0]
        return np.stack([everything if m is None else m.bitmask for m in matchers])

    def _make_allow_all(self, rows: int) -> jax.Array:
        """Bitmasks of rows that allow every token, on the devices."""
        whole = vocab_parallel.full_bitmask(rows, self._sampling_sizes.vocab)
        return place(whole, self._engine.layout.sharding("batch"))

    def _deliver(self, entries: list[RequestHandle | None], drawn: DecodedTokens) -> None:
        """Deliver what was drawn for each entry."""
        chunks: dict[RequestHandle, ResponseChunk] = {}
        top = None
        if drawn.top is not None and any(t is not None and t.request.options.top for t in entries):
            top = [to_numpy(table) for table in drawn.top]
        for at, handle in enumerate(entries):
            if handle is None:
                continue
            mask = drawn.mask[at]
            tokens = tuple(drawn.tokens[at][mask].tolist())
            finish = ""
            if drawn.done[at]:
                stopped = bool(tokens) and tokens[-1] in handle.request.options.stop
                finish = "stop" if stopped else "length"
            if handle.matcher is not None:
                finish = handle.matcher.advance(tokens, finish)
            handle.tokens += tokens
            sampled, policy = (
                tuple(drawn.logprobs[name][at][mask].tolist())
                for name in ("logprobs", "policy_logprobs")
            )
            most: tuple[Top, ...] = ()
            if top is not None and (count := handle.request.options.top):
                ids, values = (table[at][mask][:, :count] for table in top)
                most = top_tokens(ids, values)
            scores, handle.scores = handle.scores, None
            chunks[handle] = ResponseChunk(tokens, sampled, policy, finish, most, scores)
        ended = {handle for handle, piece in chunks.items() if piece.finish}
        rows = [(row, handle) for row, handle in self._rows() if handle in ended and handle]
        # Rows that only their matcher has ended are still running in the engine.
        halted = np.zeros(self._table.sequence_ids.shape, bool)
        halted.flat[[row for row, handle in rows if handle.matcher]] = True
        self._table.stop_rows(halted)
        # The last token drawn is not in the cache yet.
        self._store_prefixes([(row, (*t.request.prompt, *t.tokens[:-1])) for row, t in rows])
        with self._changed:
            count = sum(len(piece.tokens) for piece in chunks.values())
            self._totals["generated_tokens"] += count
            self._release(ended)
        for handle, piece in chunks.items():
            handle.deliver(piece)


def _key(seed: jax.Array, choice: jax.Array) -> jax.Array:
    """As ``hjax.rollout.sampling.sequence_keys`` of a run's step 0."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.random.key_data(jax.random.fold_in(key, choice))
