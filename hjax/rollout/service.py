"""Requests from anywhere, answered by one engine: what servers and chats stand on.

A thread owns the engine. Between its dispatches it lets in who waits, hands on what was drawn, and
drops what was cancelled. What prompts and answers computed is kept and found again by prompts that
begin like them; long prompts are read in chunks, between which others go on. A request's tokens
follow from it and its seed alone: not from its slot, nor from who else is there or was (up to
float32's rounding, docs/design.md section 9). Weights can be replaced between two requests.
"""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError, RunError
from hjax.models.continuing import BLOCK
from hjax.rollout import vocabulary
from hjax.rollout.engine import Engine
from hjax.rollout.matching import Matcher, Matchers
from hjax.rollout.options import Sampling
from hjax.rollout.prefixes import (
    Beginning,
    Prefixes,
    known_columns_for,
    known_of,
    room_for,
    why_not,
)
from hjax.rollout.replacement import Replacement
from hjax.rollout.requests import Piece, QueueFull, Request, Ticket
from hjax.rollout.row_sampling import RowSampling, Sizes
from hjax.rollout.scoring import Scorer, Scores, Top, tops
from hjax.rollout.shapes import CHUNK, STEPS, Shapes
from hjax.rollout.slots import Admission, Drawn, Known
from hjax.rollout.table import Table
from hjax.rollout.warm_up import WarmUp
from hjax.sharding.arrays import place, to_numpy

SLOTS = 16
# Tokens that are kept for prompts to come, if nobody says how many.
PREFIX_TOKENS = 16 * 1024


class Model(Protocol):
    """What answers: a ``LanguageModel``, of which this is used."""

    config: Any
    params: Any
    tokenizer: Tokenizer | None

    def engine_for(self, lookup: int) -> Engine: ...

    def held(self, params: Any) -> Any: ...


class Service:
    """An engine for requests that come at any time.

    Args:
      model: whose weights answer.
      slots: requests that are answered at a time; 0: 16.
      max_queue: requests that may wait beside.
      prefix_tokens: whose keys and values are kept for prompts that begin with them; 0: none, and
        long prompts are read in one piece. None: those of the longest prompt, at least 16384, as
        far as a quarter of the free memory holds them, where the model allows it; see ``stats``.
      lookup: tokens that are guessed at a time from what a text said before, see
        ``hjax.rollout.lookup``; answers are the same.
      context: tokens of a prompt and its response at most; 0: the model's positions.

    Raises:
      ConfigError: a number out of its range.

    Attributes:
      max_tokens: of a prompt and its response together.
      slots: as given.
    """

    def __init__(
        self,
        model: Model,
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
        self._prefixes = Prefixes(self._engine, prefix_tokens) if prefix_tokens else None
        self._scorer = Scorer(self._engine)
        self._unscored: collections.deque[Ticket] = collections.deque()
        self._reading: collections.deque[Ticket] = collections.deque()
        self._own = Sizes(model.config.vocab_size, penalties=True)
        self._shapes = Shapes(self._engine, self.slots, self.max_tokens, self._own)
        self._matchers = Matchers(model.tokenizer, model.config.vocab_size)
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._table = Table(self._engine, self._shapes, self.max_tokens)
        self._replacement: Replacement | None = None
        self._changed = threading.Condition()
        self._asked = False
        self._closing, self._ends_at = False, 0.0
        self._error: BaseException | None = None
        self._prompt_tokens = self._generated = self._cached = 0
        self._guessed = self._right = 0
        self._keys = jax.jit(jax.vmap(_key))
        self._every = functools.cache(self._every_token)
        self._thread = threading.Thread(target=self._serve, name="rollout service", daemon=True)
        self._thread.start()

    # Called from anywhere

    def submit(
        self,
        request: Request,
        on_piece: Callable[[Piece], None],
        matcher: Matcher | None = None,
    ) -> Ticket:
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
        ticket = Ticket(request, matcher or self.prepare(request), on_piece)
        with self._changed:
            self._check_open("requests")
            waiting = len(self._waiting) + len(self._unscored)
            if waiting >= self.max_queue:
                raise QueueFull(f"{waiting} requests wait, as many as may; try later")
            self._asked = True
            (self._unscored if request.scored else self._waiting).append(ticket)
            self._changed.notify()
        return ticket

    def prepare(self, request: Request) -> Matcher | None:
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
        replacement = Replacement(self._model.held(params))
        with self._changed:
            self._check_open("weights")
            if self._replacement is not None:
                raise RunError("others are replacing the weights; try when that has ended")
            self._replacement = replacement
            self._changed.notify()
        try:
            replacement.wait(seconds)
        finally:
            with self._changed:
                if self._replacement is replacement:
                    late = f"running requests did not end within {seconds} s"
                    self._end_replacement(f"{late}; the old weights go on")
        replacement.check()

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

            def nobody(entries: int, room: tuple[int, int], known: Known | None) -> Admission:
                return self._admission([None] * entries, np.zeros(entries), room, known)

            given = self._shapes, self._model.params, self._prefixes, self._scorer, nobody
            WarmUp(*given, self._every).run(told)

    def stats(self) -> dict[str, float]:
        """``running``, ``waiting``, ``slots``, ``generated_tokens``, ``prompt_tokens``, of these
        ``cached_tokens`` that were known; ``kept_tokens`` of ``kept_room`` are kept;
        ``guessed_tokens``, of which ``right_tokens`` were drawn."""
        prefixes = self._prefixes
        with self._changed:
            return {
                "running": sum(row is not None for row in self._table.rows),
                "waiting": len(self._waiting) + len(self._reading) + len(self._unscored),
                "slots": self.slots,
                "generated_tokens": self._generated,
                "prompt_tokens": self._prompt_tokens,
                "cached_tokens": self._cached,
                "kept_tokens": 0 if prefixes is None else prefixes.held,
                "kept_room": 0 if prefixes is None else prefixes.room,
                "guessed_tokens": self._guessed,
                "right_tokens": self._right,
            }

    def close(self, seconds: float = 10.0) -> None:
        """Take no more; what is there may end within so many seconds, then it is cancelled."""
        with self._changed:
            self._closing, self._ends_at = True, time.monotonic() + seconds
            self._end_replacement("the service is closing and takes no weights")
            self._changed.notify()
        self._thread.join()

    def _check_open(self, what: str) -> None:
        if self._error is not None:
            raise RunError(f"the engine failed: {self._error}")
        if self._closing:
            raise RunError(f"the service is closing and takes no {what}")

    def _end_replacement(self, refused: str = "") -> None:
        if self._replacement is not None:
            self._replacement.end(refused)
            self._replacement = None

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
                if self._table.busy:
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
                running = self._table.busy
                if self._replacement is not None and not running:
                    self._take(self._replacement.params)
                busy = self._waiting or self._reading or self._unscored or running
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
        for ticket in (*self._reading, *self._waiting):
            self._forget(ticket)
            ticket.read, ticket.whole = 0, False
        for queue in (self._reading, self._waiting):
            for ticket in [each for each in queue if each.scores is not None]:
                queue.remove(ticket)
                ticket.scores = None
                self._unscored.append(ticket)
        if self._prefixes is not None:
            self._prefixes.clear()
        self._table.state, self._model.params = None, params
        self._end_replacement()

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [row for row in self._table.rows if row is not None]
            for queue in (self._reading, self._waiting, self._unscored):
                left += queue
                queue.clear()
            self._table.rows = [None] * len(self._table.rows)
        for ticket in left:
            ticket.tell(Piece(finish=finish))

    def _drop_cancelled(self) -> None:
        with self._changed:
            # Looked at once: clients cancel at any moment.
            rows = self._table.rows
            leaving = [row if row is not None and row.cancelled else None for row in rows]
            gone = [row for row in leaving if row is not None]
            for queue in (self._waiting, self._reading, self._unscored):
                some = [ticket for ticket in queue if ticket.cancelled]
                for ticket in some:
                    queue.remove(ticket)
                    self._forget(ticket)
                gone += some
            halted = np.array([row is not None for row in leaving])
            self._table.give_up({row for row in leaving if row is not None})
        self._table.halt(halted)
        for ticket in gone:
            ticket.tell(Piece(finish="cancelled"))

    def _score(self) -> None:
        """A prompt that is to be scored; who asks for nothing else has ended."""
        if not self._unscored:
            return
        ticket = self._unscored[0]
        ticket.scores = self._scored(self._model.params, ticket)
        ends = not ticket.request.max_tokens
        with self._changed:
            self._unscored.popleft()
            if ends:
                ticket.cached = 0
                self._prompt_tokens += len(ticket.request.prompt)
            else:
                self._waiting.append(ticket)
        if ends:
            ticket.tell(Piece(finish="length", prompt=ticket.scores))

    def _scored(self, params: Any, ticket: Ticket) -> Scores:
        prompt = ticket.request.prompt
        return self._scorer(params, prompt, self._shapes.new(len(prompt)))

    def _read(self) -> None:
        """A chunk of a long prompt."""
        if not self._reading:
            return
        assert self._prefixes is not None
        ticket = self._reading[0]
        prompt = ticket.request.prompt
        begun, params = ticket.begun, self._model.params
        ticket.whole = not self._prefixes.read(params, prompt, CHUNK, self.max_tokens)
        ticket.begun = self._prefixes.find(prompt)
        ticket.read += 0 if ticket.whole else CHUNK
        self._prefixes.release(begun)
        if ticket.whole or len(prompt) - ticket.begun.tokens <= CHUNK:
            with self._changed:
                self._reading.popleft()
                self._waiting.appendleft(ticket)

    def _forget(self, ticket: Ticket) -> None:
        """Nothing is held for it."""
        if self._prefixes is not None:
            self._prefixes.release(ticket.begun)
            ticket.begun = Beginning()

    def _next(self, count: int) -> list[Ticket]:
        """Up to so many of those who wait, first come first; what is known of each is held.

        Of several whose prompts go on alike one comes now, the others when that is known.
        """
        if self._prefixes is None:
            return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        entering: list[Ticket] = []
        later: list[Ticket] = []
        goes_on: set[tuple] = set()
        while self._waiting and len(entering) < count:
            ticket = self._waiting.popleft()
            prompt = ticket.request.prompt
            self._forget(ticket)
            ticket.begun = self._prefixes.find(prompt)
            known = ticket.begun.tokens
            ahead = prompt[known : known + BLOCK]
            if len(prompt) - known > CHUNK and not ticket.whole:
                self._reading.append(ticket)
            elif len(prompt) > known + BLOCK and (ticket.begun, ahead) in goes_on:
                later.append(ticket)
            else:
                goes_on.add((ticket.begun, ahead))
                entering.append(ticket)
        self._waiting.extendleft(reversed(later))
        return entering

    def _admit(self) -> None:
        """Let in some of those who wait."""
        engine, table, shapes = self._engine, self._table, self._shapes
        parts, taken = engine.parts, table.taken()

        def room(rows: int, each: int) -> int:
            """How many may enter a state of so many rows, so many in each part."""
            return int(np.clip(rows // parts - taken, 0, each).sum())

        with self._changed:
            entering = self._next(room(self.slots, shapes.together[-1]))
        if not entering:
            return
        count = len(entering)
        each = next(n for n in shapes.together if room(self.slots, n) >= count)
        longest = max(len(ticket.request.prompt) for ticket in entering)
        table.ready(longest, next(n for n in shapes.rows if room(n, each) >= count))
        assert table.state is not None
        entries, where = table.seat(entering, each)
        known, blocks, columns = None, None, 0
        if self._prefixes is not None:
            asked = [() if t is None else t.request.prompt for t in entries]
            begun = [Beginning() if t is None else t.begun for t in entries]
            columns = known_columns_for(longest, self.max_tokens)
            known, blocks = known_of(asked, begun, columns), self._prefixes.blocks
        by_part = [entries[at : at + each] for at in range(0, len(entries), each)]
        tokens = [
            [len(t.request.prompt) - t.begun.tokens for t in some if t is not None]
            for some in by_part
        ]
        sizes = shapes.room(tokens, each, columns)
        new = self._admission(entries, where, sizes, known)
        params = self._model.params
        table.state, drawn = engine.admit(Sampling(), params, table.state, new, blocks)
        with self._changed:
            for ticket in entering:
                ticket.cached = max(ticket.begun.tokens - ticket.read, 0)
                self._prompt_tokens += len(ticket.request.prompt)
                self._cached += ticket.cached
        if self._prefixes is not None:
            seated = zip(entries, where.tolist(), strict=True)
            kept = [(row, t.request.prompt) for t, row in seated if t is not None]
            self._prefixes.keep(table.state, kept)
            for ticket in entering:
                self._forget(ticket)
        self._hand_on(entries, drawn)

    def _admission(
        self,
        entries: list[Ticket | None],
        where: np.ndarray,
        room: tuple[int, int],
        known: Known | None,
    ) -> Admission:
        """What is not known of the prompts, and how they are answered; ``room``: columns of each
        and of all without padding, as of ``Shapes``."""
        columns, flat = room
        tokens = np.zeros((len(entries), columns), np.int32)
        mask = np.zeros(tokens.shape, bool)
        mask[:, -1] = True  # an entry that fills up has a token too
        for at, ticket in enumerate(entries):
            if ticket is not None:
                new = ticket.request.prompt[ticket.begun.tokens :]
                tokens[at, columns - len(new) :], mask[at, columns - len(new) :] = new, True
        asked = [None if t is None else t.request for t in entries]
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
            known,
            self._texts(entries),
            self._allowed(entries),
            flat=flat,
        )

    def _texts(self, entries: list[Ticket | None]) -> np.ndarray | None:
        """Where guesses are looked up."""
        if not self._engine.lookup:
            return None
        made = np.zeros((len(entries), self.max_tokens), np.int32)
        for text, ticket in zip(made, entries, strict=True):
            if ticket is not None:
                text[: len(ticket.request.prompt)] = ticket.request.prompt
        return made

    def _decode(self) -> None:
        engine, table, steps = self._engine, self._table, STEPS
        assert table.state is not None
        if not engine.by_kernel:
            if not self._waiting:
                table.narrow()
            table.make_room()
        if not engine.by_row:
            steps = min(STEPS, table.length - table.column)
        most = STEPS + engine.lookup
        # What a matcher allows is known for one token ahead.
        steps = 1 if any(row is not None and row.matcher for row in table.rows) else steps
        given = Sampling(), self._model.params, table.state, steps, most
        table.state, drawn = engine.decode(*given, self._allowed(table.rows))
        table.column += drawn.steps
        with self._changed:
            if drawn.guessed is not None and drawn.right is not None:
                self._guessed += int(drawn.guessed.sum())
                self._right += int(drawn.right.sum())
        self._hand_on(list(table.rows), drawn)

    def _allowed(self, entries: Sequence[Ticket | None]) -> np.ndarray | jax.Array:
        """uint32 [entries, words], the tokens that each may draw: there is one program, whether
        somebody has a matcher or nobody."""
        matchers = [None if ticket is None else ticket.matcher for ticket in entries]
        if not any(matchers):
            return self._every(len(entries))
        everything = vocabulary.every(1, self._own.vocab)[0]
        return np.stack([everything if m is None else m.allowed for m in matchers])

    def _every_token(self, rows: int) -> jax.Array:
        """Of rows that may draw every token; on the devices already."""
        whole = vocabulary.every(rows, self._own.vocab)
        return place(whole, self._engine.layout.sharding("batch"))

    def _hand_on(self, entries: list[Ticket | None], drawn: Drawn) -> None:
        """What was drawn for each entry, to who asked for it."""
        told: list[tuple[Ticket, Piece]] = []
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
            told.append((ticket, Piece(tokens, sampled, policy, finish, most, scores)))
        ended = {ticket for ticket, piece in told if piece.finish}
        at_rows = [(i, row) for i, row in enumerate(self._table.rows) if row in ended]
        self._halt_matched(at_rows)
        if self._prefixes is not None and at_rows:
            assert self._table.state is not None
            # The last token drawn is not in the cache.
            kept = [(i, (*row.request.prompt, *row.tokens[:-1])) for i, row in at_rows if row]
            self._prefixes.keep(self._table.state, kept)
        with self._changed:
            self._generated += sum(len(piece.tokens) for _, piece in told)
            self._table.give_up(ended)
        for ticket, piece in told:
            ticket.tell(piece)

    def _halt_matched(self, ended: Sequence[tuple[int, Ticket | None]]) -> None:
        """Of those that ended the engine would go on with some, of which matchers alone know."""
        halted = np.zeros(len(self._table.rows), bool)
        halted[[i for i, ticket in ended if ticket is not None and ticket.matcher]] = True
        self._table.halt(halted)


def _key(seed: jax.Array, choice: jax.Array) -> jax.Array:
    """As ``hjax.rollout.sampling.sequence_keys`` of a run's step 0."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.random.key_data(jax.random.fold_in(key, choice))
