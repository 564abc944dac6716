"""Requests from anywhere, answered by one engine: what servers and chats stand on.

A thread owns the engine. Between its dispatches it lets in who waits, hands on what was drawn, and
drops what was cancelled. What prompts and answers computed is kept and found again by prompts that
begin like them; long prompts are read in chunks, between which others go on. A request's tokens
follow from it and its seed alone: not from its slot, nor from who else is there or was (up to
float32's rounding, docs/design.md section 9). Weights can be replaced between two requests.
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
from hjax.rollout.bucketing import CHUNK, ServiceBuckets
from hjax.rollout.constrained_decoding import ConstraintCompiler, ConstraintMatcher
from hjax.rollout.engine import Engine
from hjax.rollout.precompile import Precompilation
from hjax.rollout.prefix_cache import (
    CachedPrefix,
    PrefixCache,
    known_columns_for,
    room_for,
    texts,
    unread,
    why_not,
)
from hjax.rollout.prompt_log_probs import PromptScorer, Top, tops
from hjax.rollout.requests import QueueFull, Request, RequestHandle, ResponseChunk
from hjax.rollout.row_sampling import RowSampling, SamplingSizes
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import Admission, DecodedTokens
from hjax.rollout.slot_table import SlotTable
from hjax.sharding.global_arrays import place, to_numpy

SLOTS = 16
# Tokens that are kept for prompts to come, if nobody says how many.
PREFIX_TOKENS = 16 * 1024


class ServableModel(Protocol):
    """What answers: a ``LanguageModel``, of which this is used."""

    config: Any
    params: Any
    tokenizer: Tokenizer | None

    def engine_for(self, lookup: int) -> Engine: ...

    def held(self, params: Any) -> Any: ...


class GenerationService:
    """An engine for requests that come at any time.

    Args:
      model: whose weights answer.
      slots: requests that are answered at a time; 0: 16.
      max_queue: requests that may wait beside.
      prefix_tokens: whose keys and values are kept for prompts that begin with them; 0: none, and
        long prompts are read in one piece. None: those of the longest prompt, at least 16384, as
        far as a quarter of the free memory holds them, where the model allows it; see ``stats``.
      lookup: tokens that are guessed at a time from what a text said before, see
        ``hjax.rollout.prompt_lookup``; answers are the same.
      context: tokens of a prompt and its response at most; 0: the model's positions.

    Raises:
      ConfigError: a number out of its range, or tokens to keep where none can be kept.

    Attributes:
      max_tokens: of a prompt and its response together.
      slots: as given.
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
        if prefix_tokens is None:
            most = max(PREFIX_TOKENS, self.max_tokens)
            prefix_tokens = 0 if why_not(self._engine) else room_for(self._engine, most)
        if prefix_tokens and (reason := why_not(self._engine)):
            raise ConfigError(f"prefix_tokens={prefix_tokens}: {reason}; give 0")
        self._prefixes = PrefixCache(self._engine, prefix_tokens) if prefix_tokens else None
        self._scorer = PromptScorer(self._engine)
        self._own = SamplingSizes(model.config.vocab_size, penalties=True)
        self._shapes = ServiceBuckets(self._engine, self.slots, self.max_tokens, self._own)
        self._matchers = ConstraintCompiler(model.tokenizer, model.config.vocab_size)
        self._waiting: list[RequestHandle] = []  # in order of arrival, prefilling ones too
        self._running: dict[int, RequestHandle] = {}  # by number in the slot table
        self._count = 0
        self._table = SlotTable(self._engine, self._shapes)
        self._replacement: tuple[Any, concurrent.futures.Future[None]] | None = None
        self._changed = threading.Condition()
        self._asked = False
        self._closing, self._ends_at = False, 0.0
        self._error: BaseException | None = None
        kinds = ("generated", "prompt", "cached", "guessed", "right")
        self._told = {f"{kind}_tokens": 0 for kind in kinds}  # of ``stats``
        self._keys = jax.jit(jax.vmap(_key))
        self._every = functools.cache(self._every_token)
        self._thread = threading.Thread(target=self._serve, name="rollout service", daemon=True)
        self._thread.start()
        # A thread that frees arrays while the interpreter ends aborts the process.
        atexit.register(self.close, seconds=0.0)

    # Called from anywhere

    def submit(
        self,
        request: Request,
        on_piece: Callable[[ResponseChunk], None],
        matcher: ConstraintMatcher | None = None,
    ) -> RequestHandle:
        """Ask; returns at once.

        Args:
          request: what.
          on_piece: called with each piece, from the engine's thread: it must not wait.
          matcher: that ``prepare`` made of this request, for nothing else; None: it is made here.

        Raises:
          ConfigError: what can never be answered, in a line.
          QueueFull: too many wait.
          RunError: the service is closed, or its engine failed.
        """
        self._check(request)
        ticket = RequestHandle(request, matcher or self.prepare(request), on_piece)
        with self._changed:
            self._check_open("requests")
            waiting = sum(not ticket.reading for ticket in self._waiting)
            if waiting >= self.max_queue:
                raise QueueFull(f"{waiting} requests wait, as many as may; try later")
            self._asked = True
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def prepare(self, request: Request) -> ConstraintMatcher | None:
        """Compile its constraint, which takes a moment; ConfigError where it does not do."""
        if request.constraint is None:
            return None
        return self._matchers.begin(request.constraint, request.options, request.prompt)

    def replace(self, params: Any, seconds: float | None = None) -> None:
        """Answer with other weights of the same model; returns when it is so.

        Requests that run end with the old ones, all others are answered with the new ones alone.
        Nothing is compiled anew. Both are in memory meanwhile. Other services of this model would
        not hear of it: there must be none.

        Args:
          params: float32 parameters; those are not copied that lie as the model's do.
          seconds: that running requests have to end; None: as long as they take.

        Raises:
          ConfigError: other names, shapes or dtypes.
          RunError: running requests did not end in time, others are replacing the weights, or the
            service closes. The old weights go on, as after a ConfigError.
        """
        if threading.current_thread() is self._thread:
            raise RunError("a request's listener cannot replace the weights; do it elsewhere")
        taken: concurrent.futures.Future[None] = concurrent.futures.Future()
        replacement = self._model.held(params), taken
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

    def warm_up(self, told: Callable[[str], None] = lambda line: None) -> None:
        """Compile every program that requests may need, whatever their lengths, before the first.

        Args:
          told: called with what is compiled next, in a few words.

        Raises:
          RunError: a request came before.
        """
        with self._changed:
            self._check_open("requests")
            if self._asked:
                raise RunError("warm_up comes before the first request")
            Precompilation(
                self._shapes, self._model.params, self._prefixes, self._scorer,
                admission=self._admission, every=self._every,
            ).run(told)  # fmt: skip

    def stats(self) -> dict[str, float]:
        """``running``, ``waiting``, ``slots``, ``generated_tokens``, ``prompt_tokens``, of these
        ``cached_tokens`` that were known; ``kept_tokens`` of ``kept_room`` are kept;
        ``guessed_tokens``, of which ``right_tokens`` were drawn."""
        prefixes = self._prefixes
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "slots": self.slots,
                "kept_tokens": 0 if prefixes is None else prefixes.held,
                "kept_room": 0 if prefixes is None else prefixes.room,
                **self._told,
            }

    def close(self, seconds: float = 10.0) -> None:
        """Take no more; what is there may end within so many seconds, then it is cancelled."""
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
        RowSampling.of([request.options], self._own)

    # The engine's thread

    def _serve(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                if self._replacement is None:  # else those that run end first
                    self._score()
                    self._read()
                    self._admit()
                if self._running:
                    self._decode()
        except BaseException as error:  # told to everybody who waits
            with self._changed:
                self._error = error
                self._end_replacement(f"the engine failed: {error}")
            self._end_all(f"error: {error}")
            if not isinstance(error, Exception):
                raise

    def _wait(self) -> bool:
        """Wait for something to do; False: closed, and nothing is left."""
        with self._changed:
            while True:
                if self._replacement is not None and not self._running:
                    self._take(self._replacement[0])
                busy = self._waiting or self._running
                if self._closing and (not busy or time.monotonic() > self._ends_at):
                    break
                if busy:
                    return True
                # Nobody is there: the cache begins anew, as small as it may be.
                self._table.state = None
                self._changed.wait()
        self._end_all("cancelled")
        return False

    def _take(self, params: Any) -> None:
        """Other weights, of which nothing is known yet."""
        self._scorer.clear()
        for ticket in self._waiting:
            self._forget(ticket)
            ticket.read, ticket.whole, ticket.reading, ticket.scores = 0, False, False, None
        if self._prefixes is not None:
            self._prefixes.clear()
        self._table.state, self._model.params = None, params
        self._end_replacement()

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [*self._running.values(), *self._waiting]
            self._leave(set(left))
            self._waiting.clear()
        for ticket in left:
            ticket.tell(ResponseChunk(finish=finish))

    def _leave(self, tickets: set[RequestHandle]) -> np.ndarray:
        """Their rows are free: bool [parts, rows], which these are."""
        numbers = [number for number, ticket in self._running.items() if ticket in tickets]
        rows = np.isin(self._table.who, numbers)
        self._table.leave(rows)
        for number in numbers:
            del self._running[number]
        return rows

    def _drop_cancelled(self) -> None:
        with self._changed:
            # Looked at once: clients cancel at any moment.
            there = *self._running.values(), *self._waiting
            gone = [ticket for ticket in there if ticket.cancelled]
            for ticket in gone:
                self._forget(ticket)
            self._waiting = [ticket for ticket in self._waiting if ticket not in gone]
            rows = self._leave(set(gone))
        self._table.halt(rows)
        for ticket in gone:
            ticket.tell(ResponseChunk(finish="cancelled"))

    def _first(self, of: Callable[[RequestHandle], bool]) -> RequestHandle | None:
        """Of those who wait the first that is so."""
        with self._changed:
            return next(filter(of, self._waiting), None)

    def _score(self) -> None:
        """A prompt that is to be scored; who asks for nothing else has ended."""
        ticket = self._first(lambda ticket: ticket.unscored)
        if ticket is None:
            return
        prompt = ticket.request.prompt
        ticket.scores = self._scorer(self._model.params, prompt, self._shapes.new(len(prompt)))
        if not ticket.request.max_tokens:
            with self._changed:
                self._waiting.remove(ticket)
                ticket.cached = 0
                self._told["prompt_tokens"] += len(prompt)
            ticket.tell(ResponseChunk(finish="length", prompt=ticket.scores))

    def _read(self) -> None:
        """A chunk of a long prompt."""
        ticket = self._first(lambda ticket: ticket.reading)
        if ticket is None:
            return
        assert self._prefixes is not None
        if self._rest(ticket) > CHUNK:  # unless others have read it meanwhile
            prompt, params = ticket.request.prompt, self._model.params
            ticket.whole = not self._prefixes.read(params, [prompt], CHUNK, self.max_tokens)
            ticket.read += 0 if ticket.whole else CHUNK
        ticket.reading = self._rest(ticket) > CHUNK and not ticket.whole

    def _rest(self, ticket: RequestHandle) -> int:
        """Tokens of its prompt that are not known; those that are stay held."""
        prompt = ticket.request.prompt
        if self._prefixes is not None:
            self._forget(ticket)
            ticket.begun = self._prefixes.find(prompt)
        return len(prompt) - ticket.begun.tokens

    def _forget(self, ticket: RequestHandle) -> None:
        """Nothing is held for it."""
        if self._prefixes is not None:
            self._prefixes.release(ticket.begun)
            ticket.begun = CachedPrefix()

    def _next(self, count: int) -> list[RequestHandle]:
        """Up to so many of those who wait, first come first; what is known of each is held.

        Of several whose prompts go on alike one comes now, the others when that is known.
        """
        entering: list[RequestHandle] = []
        goes_on: set[tuple] = set()
        for ticket in self._waiting:
            if len(entering) == count:
                break
            if ticket.reading or ticket.unscored:
                continue
            if self._prefixes is not None:
                rest, known = self._rest(ticket), ticket.begun.tokens
                ticket.reading = rest > CHUNK and not ticket.whole
                ahead = ticket.begun, ticket.request.prompt[known : known + BLOCK]
                later = rest > BLOCK and ahead in goes_on
                if ticket.reading or later:
                    continue
                goes_on.add(ahead)
            entering.append(ticket)
        self._waiting = [ticket for ticket in self._waiting if ticket not in entering]
        return entering

    def _admit(self) -> None:
        """Let in some of those who wait."""
        table, shapes, prefixes = self._table, self._shapes, self._prefixes
        taken, rows = table.live.sum(axis=1), shapes.rows

        def room(rows: int, each: int) -> int:
            """How many may enter a state of so many rows, so many in each part."""
            return int(np.clip(rows - taken, 0, each).sum())

        with self._changed:
            entering = self._next(room(rows[-1], shapes.together[-1]))
        if not entering:
            return
        count = len(entering)
        each = next(n for n in shapes.together if room(rows[-1], n) >= count)
        longest = max(len(ticket.request.prompt) for ticket in entering)
        self._ready(longest, next(n for n in rows if room(n, each) >= count))
        with self._changed:
            entries, where = self._seat(entering, each)
        columns = 0 if prefixes is None else known_columns_for(longest, self.max_tokens)
        tokens = [
            [len(t.request.prompt) - t.begun.tokens for t in entries[at : at + each] if t]
            for at in range(0, len(entries), each)
        ]
        new = self._admission(entries, where, shapes.room(tokens, each, columns), columns)
        blocks = None if prefixes is None else prefixes.blocks
        drawn = table.admit(SamplingParams(), self._model.params, new, blocks)
        with self._changed:
            for ticket in entering:
                ticket.cached = max(ticket.begun.tokens - ticket.read, 0)
                self._told["prompt_tokens"] += len(ticket.request.prompt)
                self._told["cached_tokens"] += ticket.cached
        self._keep([(row, t.request.prompt) for row, t in self._rows() if t and t in entering])
        for ticket in entering:
            self._forget(ticket)
        self._hand_on(entries, drawn)

    def _rows(self) -> Iterator[tuple[int, RequestHandle | None]]:
        """Each row of the state with who has it."""
        yield from enumerate(map(self._running.get, self._table.who.ravel().tolist()))

    def _keep(self, sequences: list[tuple[int, Sequence[int]]]) -> None:
        """What rows have computed, for prompts to come."""
        if self._prefixes is not None and sequences:
            self._prefixes.keep(self._table.state, sequences)

    def _ready(self, tokens: int, rows: int) -> None:
        """A state of so many rows of each part at least, where prompts of so many tokens may end in
        the next column, or begin."""
        engine, table, shapes = self._engine, self._table, self._shapes
        if table.state is None:
            # For the kernel all that a row may ever need.
            most = self.max_tokens if engine.by_kernel else tokens
            table.open(rows, shapes.longer(most, rows), tokens)
            return
        if rows > table.who.shape[1]:
            table.widen(rows)
        if engine.by_kernel or tokens <= table.column and not engine.by_row:
            return
        length = max(table.length, shapes.longer(tokens, table.who.shape[1]))
        first = 0
        if not engine.by_row:
            # Further than is asked, as the next prompt is likely to be longer still.
            further = min(2 * shapes.steps, length - shapes.spare - tokens)
            first = table.column - tokens - further
        table.move(first, length)

    def _seat(
        self, entering: list[RequestHandle], each: int
    ) -> tuple[list[RequestHandle | None], np.ndarray]:
        """Give rows to those who enter, by turns of the parts: who enters, by entry, and of each
        entry its row within its part, one beyond for nobody."""
        table, free = self._table, self._table.free()
        seats = [(part, f[i]) for i in range(each) for part, f in enumerate(free) if i < len(f)]
        entries: list[RequestHandle | None] = [None] * (len(free) * each)
        where = np.full(len(entries), table.who.shape[1], np.int32)
        used = [part * each for part in range(len(free))]
        for ticket, (part, row) in zip(entering, seats):
            self._count += 1
            self._running[self._count] = ticket
            table.seat(part, row, np.array([self._count]), len(ticket.request.prompt))
            entries[used[part]], where[used[part]] = ticket, row
            used[part] += 1
        return entries, where

    def _admission(
        self,
        entries: list[RequestHandle | None],
        where: np.ndarray,
        room: tuple[int, int],
        known: int,
    ) -> Admission:
        """What is not known of the prompts, and how they are answered; ``room``: columns of each
        and of all without padding, as of ``ServiceBuckets``; ``known``: as of ``unread``."""
        columns, flat = room
        asked = [None if t is None else t.request for t in entries]
        prompts = [() if r is None else r.prompt for r in asked]
        found = [CachedPrefix() if t is None else t.begun for t in entries]
        tokens, mask, begun = unread(prompts, found, columns, known)
        seeds = np.array([0 if r is None else r.seed for r in asked], np.uint32)
        choices = np.array([0 if r is None else r.choice for r in asked], np.int32)
        return Admission(
            tokens,
            mask,
            where,
            where,
            np.asarray(self._keys(seeds, choices)),
            np.array([1 if r is None else r.max_tokens for r in asked], np.int32),
            RowSampling.of([None if r is None else r.options for r in asked], self._own),
            begun,
            texts(prompts, self.max_tokens if self._engine.lookup else 0),
            self._allowed(entries),
            flat=flat,
        )

    def _decode(self) -> None:
        table, shapes, running = self._table, self._shapes, self._running.values()
        waits = self._first(lambda ticket: not ticket.reading and not ticket.unscored)
        if waits is None and not self._engine.by_kernel:
            rows = next(n for n in shapes.rows if n >= table.most_live)
            if rows < table.who.shape[1]:
                table.move(0, next(n for n in shapes.lengths_of(rows) if n >= table.length))
                table.narrow(rows)
        table.make_room(max(len(row.request.prompt) + len(row.tokens) for row in running))
        # What a matcher allows is known for one token ahead.
        steps = 1 if any(row.matcher for row in running) else shapes.steps
        entries = [ticket for _, ticket in self._rows()]
        drawn = table.decode(SamplingParams(), self._model.params, steps, self._allowed(entries))
        with self._changed:
            if drawn.guessed is not None and drawn.right is not None:
                self._told["guessed_tokens"] += int(drawn.guessed.sum())
                self._told["right_tokens"] += int(drawn.right.sum())
        self._hand_on(entries, drawn)

    def _allowed(self, entries: Sequence[RequestHandle | None]) -> np.ndarray | jax.Array:
        """uint32 [entries, words], the tokens that each may draw: there is one program, whether
        somebody has a matcher or nobody."""
        matchers = [None if ticket is None else ticket.matcher for ticket in entries]
        if not any(matchers):
            return self._every(len(entries))
        everything = vocab_parallel.every(1, self._own.vocab)[0]
        return np.stack([everything if m is None else m.allowed for m in matchers])

    def _every_token(self, rows: int) -> jax.Array:
        """Of rows that may draw every token; on the devices already."""
        whole = vocab_parallel.every(rows, self._own.vocab)
        return place(whole, self._engine.layout.sharding("batch"))

    def _hand_on(self, entries: list[RequestHandle | None], drawn: DecodedTokens) -> None:
        """What was drawn for each entry, to who asked for it."""
        told: dict[RequestHandle, ResponseChunk] = {}
        top = None
        if drawn.top is not None and any(t is not None and t.request.options.top for t in entries):
            top = [to_numpy(table) for table in drawn.top]
        for at, ticket in enumerate(entries):
            if ticket is None:
                continue
            mask = drawn.mask[at]
            tokens = tuple(drawn.tokens[at][mask].tolist())
            finish = ""
            if drawn.done[at]:
                stopped = bool(tokens) and tokens[-1] in ticket.request.options.stop
                finish = "stop" if stopped else "length"
            if ticket.matcher is not None:
                finish = ticket.matcher.take(tokens, finish)
            ticket.tokens += tokens
            sampled, policy = (
                tuple(drawn.logprobs[name][at][mask].tolist())
                for name in ("logprobs", "policy_logprobs")
            )
            most: tuple[Top, ...] = ()
            if top is not None and (count := ticket.request.options.top):
                most = tops(*(table[at][mask][:, :count] for table in top))
            scores, ticket.scores = ticket.scores, None
            told[ticket] = ResponseChunk(tokens, sampled, policy, finish, most, scores)
        ended = {ticket for ticket, piece in told.items() if piece.finish}
        rows = [(row, ticket) for row, ticket in self._rows() if ticket in ended and ticket]
        # Of those that ended the engine would go on with some, of which matchers alone know.
        halted = np.zeros(self._table.who.shape, bool)
        halted.flat[[row for row, ticket in rows if ticket.matcher]] = True
        self._table.halt(halted)
        # The last token drawn is not in the cache.
        self._keep([(row, (*t.request.prompt, *t.tokens[:-1])) for row, t in rows])
        with self._changed:
            count = sum(len(piece.tokens) for piece in told.values())
            self._told["generated_tokens"] += count
            self._leave(ended)
        for ticket, piece in told.items():
            ticket.tell(piece)


def _key(seed: jax.Array, choice: jax.Array) -> jax.Array:
    """As ``hjax.rollout.sampling.sequence_keys`` of a run's step 0."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.random.key_data(jax.random.fold_in(key, choice))
