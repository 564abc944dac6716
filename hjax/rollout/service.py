"""Requests from anywhere, answered by one engine: what servers and chats stand on.

A thread owns the engine. Between its dispatches it lets in who waits, hands on what was drawn, and
drops what was cancelled. A request's tokens follow from it and its seed alone: not from its slot,
nor from who else is there (up to float32's rounding, docs/design.md section 9).
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from hjax.errors import ConfigError, RunError
from hjax.rollout.engine import Admission, Drawn, How, Size, State
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.options import Options
from hjax.rollout.row_sampling import RowSampling, Sizes
from hjax.rollout.scheduler import COLUMNS

SLOTS = 16
# Tokens between two looks at who waits and who listens.
STEPS = 8
# Prompts that are read together, so that others do not wait long for their next tokens.
TOGETHER = 8


class QueueFull(RunError):
    """As many requests wait as may."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: of the response, at least 1.
      options: how they are drawn; with its stop tokens a response ends.
      seed: 0 to 2**32 - 1; with ``choice`` it decides what is drawn.
      choice: which of several answers to one prompt.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    options: Options = Options()
    seed: int = 0
    choice: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What was drawn since the last piece.

    Attributes:
      tokens: a stop token included.
      logprobs: of the distribution sampled.
      finish: empty while it goes on; then ``stop``, ``length``, ``cancelled`` or ``error: ...``.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: str = ""


class Ticket:
    """A request on its way."""

    def __init__(self, request: Request, options: RowSampling, on_piece: Callable[[Piece], None]):
        self.request, self.options, self._on_piece = request, options, on_piece
        self.cancelled = False
        self.drawn = 0

    def cancel(self) -> None:
        """Draw no more; the last piece says ``cancelled``. Nothing happens if it has ended."""
        self.cancelled = True

    def tell(self, piece: Piece) -> None:
        """Hand a piece on; a listener that fails is none any more."""
        try:
            self._on_piece(piece)
        except Exception:
            self.cancelled = True


class Service:
    """An engine for requests that come at any time.

    Args:
      model: whose weights answer.
      slots: requests that are answered at a time; 0: 16.
      max_queue: requests that may wait beside.

    Attributes:
      max_tokens: of a prompt and its response together.
      slots: as given.
    """

    def __init__(self, model: LanguageModel, slots: int = 0, max_queue: int = 1024):
        if slots < 0 or max_queue < 0:
            raise ConfigError(f"slots={slots}, max_queue={max_queue}: 0 or more")
        self._model, self._engine = model, model.engine
        self.slots = slots or SLOTS
        parts = self._engine.parts
        self.slots = -(-self.slots // parts) * parts
        self.max_queue, self.max_tokens = max_queue, model.config.max_length
        self._own = Sizes(model.config.vocab_size, penalties=True)
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._rows: list[Ticket | None] = [None] * self.slots
        self._start = np.zeros(self.slots, np.int64)
        self._prompt = self._length = COLUMNS
        self._column = 0
        self._state: State | None = None
        self._changed = threading.Condition()
        self._closing, self._ends_at = False, 0.0
        self._error: BaseException | None = None
        self._prompt_tokens = self._generated = 0
        self._keys = jax.jit(jax.vmap(_key))
        self._thread = threading.Thread(target=self._serve, name="rollout service", daemon=True)
        self._thread.start()

    # Called from anywhere

    def submit(self, request: Request, on_piece: Callable[[Piece], None]) -> Ticket:
        """Ask; returns at once.

        Args:
          request: what.
          on_piece: called with each piece, from the engine's thread: it must not wait.

        Raises:
          ConfigError: what can never be answered, in a line.
          QueueFull: too many wait.
          RunError: the service is closed, or its engine failed.
        """
        options = self._checked(request)
        ticket = Ticket(request, options, on_piece)
        with self._changed:
            if self._error is not None:
                raise RunError(f"the engine failed: {self._error}")
            if self._closing:
                raise RunError("the service is closing and takes no requests")
            if len(self._waiting) >= self.max_queue:
                raise QueueFull(f"{len(self._waiting)} requests wait, as many as may; try later")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def stats(self) -> dict[str, float]:
        """``running``, ``waiting``, ``slots``, ``generated_tokens``, ``prompt_tokens``."""
        with self._changed:
            return {
                "running": sum(row is not None for row in self._rows),
                "waiting": len(self._waiting),
                "slots": self.slots,
                "generated_tokens": self._generated,
                "prompt_tokens": self._prompt_tokens,
            }

    def close(self, seconds: float = 10.0) -> None:
        """Take no more; what is there may end within so many seconds, then it is cancelled."""
        with self._changed:
            self._closing, self._ends_at = True, time.monotonic() + seconds
            self._changed.notify()
        self._thread.join()

    def _checked(self, request: Request) -> RowSampling:
        vocab = self._model.config.vocab_size
        if not request.prompt:
            raise ConfigError("the prompt is empty; give at least one token")
        wrong = [t for t in request.prompt if not 0 <= t < vocab]
        if wrong:
            raise ConfigError(f"token {wrong[0]} is outside the vocabulary, 0 to {vocab - 1}")
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens={request.max_tokens}: 1 or more")
        total = len(request.prompt) + request.max_tokens
        if total > self.max_tokens:
            raise ConfigError(
                f"a prompt of {len(request.prompt)} and max_tokens={request.max_tokens} exceed "
                f"the model's {self.max_tokens} positions"
            )
        if not (0 <= request.seed < 2**32 and 0 <= request.choice < 2**31):
            raise ConfigError(
                f"seed={request.seed}, choice={request.choice}: seeds are 0 to {2**32 - 1}"
            )
        return RowSampling.of([request.options], self._own)

    # The engine's thread

    def _serve(self) -> None:
        try:
            while self._wait():
                self._drop_cancelled()
                self._admit()
                if any(row is not None for row in self._rows):
                    self._decode()
        except BaseException as error:  # told to everybody who waits
            self._error = error
            self._end_all(f"error: {error}")
            if not isinstance(error, Exception):
                raise

    def _wait(self) -> bool:
        """Wait for something to do; False: closed, and nothing is left."""
        with self._changed:
            while True:
                busy = self._waiting or any(row is not None for row in self._rows)
                if self._closing and (not busy or time.monotonic() > self._ends_at):
                    break
                if busy:
                    return True
                self._state = None  # nobody is there: the cache begins anew, as small as it may be
                self._changed.wait()
        self._end_all("cancelled")
        return False

    def _end_all(self, finish: str) -> None:
        with self._changed:
            left = [row for row in self._rows if row is not None] + list(self._waiting)
            self._rows = [None] * self.slots
            self._waiting.clear()
        for ticket in left:
            ticket.tell(Piece(finish=finish))

    def _drop_cancelled(self) -> None:
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.cancelled]
            for ticket in gone:
                self._waiting.remove(ticket)
            halted = np.array([row is not None and row.cancelled for row in self._rows])
            gone += [row for row in self._rows if row is not None and row.cancelled]
            self._rows = [None if row is None or row.cancelled else row for row in self._rows]
        if halted.any() and self._state is not None:
            self._state = self._engine.halt(self._state, halted)
        for ticket in gone:
            ticket.tell(Piece(finish="cancelled"))

    def _admit(self) -> None:
        engine, parts = self._engine, self._engine.parts
        free = np.array([row is None for row in self._rows]).reshape(parts, -1)
        each = min(int(free.sum(axis=1).max()), max(TOGETHER // parts, 1))
        with self._changed:
            count = min(len(self._waiting), int(free.sum()), each * parts)
            entering = [self._waiting.popleft() for _ in range(count)]
        if not entering:
            return
        each = 1 << (-(-len(entering) // parts) - 1).bit_length()
        prompt = _bucket(max(len(t.request.prompt) for t in entering), self.max_tokens)
        self._ready(prompt)
        assert self._state is not None
        rows = [np.flatnonzero(free[part]) for part in range(parts)]
        seats = [(part, rows[part][i]) for i in range(each) for part in range(parts)
                 if i < len(rows[part])]  # fmt: skip
        entries: list[Ticket | None] = [None] * (parts * each)
        where = np.full(parts * each, self.slots // parts, np.int32)
        used = [0] * parts
        for ticket, (part, row) in zip(entering, seats, strict=False):
            at = part * each + used[part]
            used[part] += 1
            entries[at], where[at] = ticket, row
            place = part * (self.slots // parts) + int(row)
            self._rows[place], self._start[place] = ticket, self._column
        tokens = np.zeros((len(entries), prompt), np.int32)
        mask = np.zeros(tokens.shape, bool)
        mask[:, -1] = True  # an entry that fills up has a token too
        for at, one in enumerate(entries):
            if one is not None:
                size = len(one.request.prompt)
                tokens[at, prompt - size :], mask[at, prompt - size :] = one.request.prompt, True
        asked = [None if t is None else t.request for t in entries]
        seeds = np.array([0 if r is None else r.seed for r in asked], np.uint32)
        choices = np.array([0 if r is None else r.choice for r in asked], np.int32)
        new = Admission(
            tokens,
            mask,
            where,
            where,
            np.asarray(self._keys(seeds, choices)),
            np.array([1 if r is None else r.max_tokens for r in asked], np.int32),
            RowSampling.of([None if r is None else r.options for r in asked], self._own),
        )
        self._state, drawn = engine.admit(How(), self._model.params, self._state, new)
        self._prompt_tokens += sum(len(t.request.prompt) for t in entering)
        self._hand_on(entries, drawn)

    def _ready(self, prompt: int) -> None:
        """A state with room for prompts of so many tokens."""
        if self._state is None:
            self._prompt, self._length, self._column = prompt, COLUMNS, 0
            size = Size(self.slots, self.slots, 1, prompt, self._columns(COLUMNS), self._own)
            self._length = size.length
            self._state = self._engine.empty(size)
        elif prompt > self._prompt:
            self._state, self._prompt = self._engine.widen(self._state, prompt), prompt

    def _columns(self, length: int) -> int:
        """Of a state of at least so many; for the kernel all that a row may ever need."""
        return self.max_tokens if self._engine.by_kernel else length

    def _decode(self) -> None:
        assert self._state is not None
        steps = STEPS
        if not self._engine.by_kernel:
            self._make_room()
            steps = min(STEPS, self._length - self._column)
        self._state, drawn = self._engine.decode(
            How(), self._model.params, self._state, steps, STEPS
        )
        self._column += drawn.steps
        self._hand_on(list(self._rows), drawn)

    def _make_room(self) -> None:
        """A column at least, and none at the beginning that nobody sees."""
        if self._column < self._length:
            return
        live = [at for at, row in enumerate(self._rows) if row is not None]
        first = int(self._start[live].min())
        span = self._column - first
        assert self._state is not None
        if first:
            self._state = self._engine.move(self._state, first=first)
            self._column, self._start = span, self._start - first
        if span > self._length // 2:
            self._length *= 2
            self._state = self._engine.move(self._state, length=self._length)

    def _hand_on(self, entries: list[Ticket | None], drawn: Drawn) -> None:
        """What was drawn for each entry, to who asked for it."""
        for at, ticket in enumerate(entries):
            if ticket is None:
                continue
            mask = drawn.mask[at]
            tokens = tuple(drawn.tokens[at][mask].tolist())
            finish = ""
            if drawn.done[at]:
                stopped = bool(tokens) and tokens[-1] in ticket.request.options.stop
                finish = "stop" if stopped else "length"
                with self._changed:
                    self._rows = [None if row is ticket else row for row in self._rows]
            ticket.drawn += len(tokens)
            self._generated += len(tokens)
            ticket.tell(Piece(tokens, tuple(drawn.logprobs["logprobs"][at][mask].tolist()), finish))


def _key(seed: jax.Array, choice: jax.Array) -> jax.Array:
    """As ``hjax.rollout.sampling.sequence_keys`` of a run's step 0."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    return jax.random.key_data(jax.random.fold_in(key, choice))


def _bucket(tokens: int, limit: int) -> int:
    """Powers of two from ``COLUMNS`` on, and the limit: few lengths of prompts, few programs."""
    return min(max(COLUMNS, 1 << (tokens - 1).bit_length()), limit)
