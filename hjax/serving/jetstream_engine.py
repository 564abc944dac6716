"""JetStream's engine interface over hjax's own engine.

``prefill``, ``insert`` and ``generate`` of ``jetstream.engine.engine_api.Engine`` (google-jetstream
0.2.2) are the engine's ``prefill``, ``insert`` and ``decode``. All shapes are fixed by ``context``
and ``slots``, and ``warm_up`` meets each of them, so that nothing is compiled for a request.

Where the engine writes all rows into one column, prompts end in the last column taken. That column
is ``home`` at first; when the columns behind it are used up, the cache is moved back, an array at a
time, so that it is ``home`` again. No sequence is longer than that, so none loses anything.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

from hjax.errors import ConfigError
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.prefixes import columns_for
from hjax.rollout.sampling import Sampling, sequence_keys
from hjax.rollout.slots import Admission, How, Prompts, Running, Size, State


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """While TensorFlow is imported, whose C++ greets on stderr whatever it is told; and without
    what JetStream's orchestrator does to the root logger: every step at DEBUG to stdout."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    sys.stderr.flush()
    stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
        root.handlers[:] = handlers
        root.setLevel(level)


if not hasattr(jax, "tree_map"):
    jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # its orchestrator calls it
with _quietly():
    from jetstream.core import orchestrator  # noqa: F401
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

T = TypeVar("T")
SLOTS = 16
# Tokens of each sequence that a call of ``generate`` gives.
STEPS = 8
# Columns behind ``home``.
SLACK = 64
# Tokens of a prompt and its response, if nobody says how many.
CONTEXT = 2048
# JetStream's own sizes of padded prompts.
PREFILL_LENGTHS = [1 << n for n in range(4, 16)]


class Length(int):
    """Tokens of a prompt, and what JetStream's interface has no word for.

    Attributes:
      max_tokens: of its response.
      cancelled: tells whether nobody waits for it any more.
    """

    max_tokens: int
    cancelled: Callable[[], bool]

    def __new__(cls, tokens: int, max_tokens: int, cancelled: Callable[[], bool]) -> Length:
        made = super().__new__(cls, tokens)
        made.max_tokens, made.cancelled = max_tokens, cancelled
        return made


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Prefix:
    """A prompt that was read; JetStream deletes its arrays once it is inserted.

    Attributes:
      prompts, rows: as ``Engine.insert`` takes them; None: it was cancelled before.
      first: int32 [n], the first token.
      ended: whether that is the last.
      cancelled: as of ``Length``.
    """

    prompts: Prompts | None
    rows: Running | None
    first: Any
    ended: Any
    cancelled: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass
class Decoding:
    """JetStream's decode state; insert and generate change it and give it back.

    Attributes:
      state: of the engine, donated to each program.
      column: that the next token goes into, where all rows share it.
      ended: bool [slots]: nothing more is drawn there.
      given: tokens of each that ``generate`` has given out.
      waiting: tokens of each that were drawn and not given out.
      cancelled: as of ``Length``, for each.
    """

    state: State
    column: int
    ended: np.ndarray
    given: np.ndarray
    waiting: list[collections.deque[int]]
    cancelled: list[Callable[[], bool]]


class Tokens(tokenizer_api.Tokenizer):
    """A model's tokenizer, as JetStream asks for one.

    Args:
      model: whose; one without tokenizer has ids alone.
    """

    def __init__(self, model: LanguageModel):
        self._model, self._own = model, model.tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Padded ids of a text, and how many are its own; BOS as the tokenizer has it."""
        if self._own is None:
            raise ConfigError("this model has no tokenizer; give token ids")
        tokens = np.array(self._own.encode(s, kwargs.pop("is_bos", True)), np.int32)
        return token_utils.pad_tokens(tokens, 0, 0, is_bos=False, **kwargs)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Text of ids; special tokens have none."""
        return "" if self._own is None else self._own.decode(token_ids)

    @property
    def pad_id(self) -> int:
        """Padding is told by length, so any id would do."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of ``stop_tokens``; -1: there is none."""
        return next(iter(self._model.eos_ids), -1)

    @property
    def bos_id(self) -> int:
        """-1: there is none."""
        bos = None if self._own is None else self._own.bos_id
        return -1 if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        """The model's own end tokens."""
        return set(self._model.eos_ids)


class Engine(engine_api.Engine):
    """A model for JetStream's orchestrator, which prefills in one thread and decodes in another.

    Args:
      model: on one device or several. Programs of several are run one after another, each to its
        end, whichever threads call: their collectives would wait for each other.
      slots: sequences at a time; 0: 16.
      context: tokens of a prompt and its response; 0: the model's, 2048 at most.
      sampling: of every request, as requests carry none.
      seed: the n-th prompt's draws follow from it and n; None: from chance.

    Raises:
      ConfigError: a context that the model or JetStream does not have.

    Attributes:
      context: as settled.
      stepped: called at the end of every ``generate``.
    """

    def __init__(
        self,
        model: LanguageModel,
        slots: int = 0,
        context: int = 0,
        sampling: Sampling = Sampling(temperature=0.0),
        seed: int | None = None,
    ):
        most = min(model.config.max_length, PREFILL_LENGTHS[-1])
        if not 0 <= context <= most or context == 1:
            raise ConfigError(f"context={context}: 2 to {most}, or 0 for {min(most, CONTEXT)}")
        self.model, self._engine, self._slots = model, model.engine, slots or SLOTS
        self.context = context or min(most, CONTEXT)
        self._how = How(sampling, tuple(model.eos_ids))
        seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        self._seed, self._numbers = np.uint32(seed), itertools.count()
        self._keys = jax.jit(lambda *key: jax.random.key_data(sequence_keys(*key)))
        # Of one device its own queue keeps programs in order.
        self._one_at_a_time = self._engine.layout.mesh.size > 1
        self._programs = threading.RLock()
        self._home = columns_for(self.context, self.context)
        self._length = self._home + (0 if self._engine.by_kernel else SLACK)
        self.stepped: Callable[[], None] = lambda: None

    def warm_up(self) -> None:
        """Run every program with every shape that a request may bring."""
        decoding = self.init_decode_state()
        sizes = sorted({columns_for(n, self.context) for n in (*PREFILL_LENGTHS, self.context)
                        if columns_for(n, self.context) <= self._home})  # fmt: skip
        for columns in sizes:
            length = Length(min(columns, self.context - 1), self.context, lambda: False)
            prefix = self._read(np.zeros(length, np.int32), length, 0)
            decoding = self.insert(prefix, decoding, 0)
        decoding = self._drawn(decoding)
        state = self._engine.halt(decoding.state, np.ones(self._slots, bool))
        if not self._engine.by_kernel:
            self._engine.move(state, first=1)

    # JetStream's interface

    def load_params(self, *args: Any, **kwargs: Any) -> LanguageModel:
        """The model: threads bind this once, its weights are looked up at every call."""
        return self.model

    def prefill(
        self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> Prefix:
        """Read a prompt and draw its first token.

        Args:
          params: of ``load_params``.
          existing_prefix: must be None.
          padded_tokens: int32 [n], padded at the end.
          true_length: tokens of it; a ``Length`` says how many may follow, else all there is
            room for.
        """
        if existing_prefix is not None:
            raise ConfigError("existing_prefix: not built; give whole prompts")
        if not isinstance(true_length, Length):
            true_length = Length(true_length, self.context, lambda: False)
        number = next(self._numbers)
        if true_length.cancelled():
            return Prefix(None, None, np.zeros(0, np.int32), True, true_length.cancelled)
        return self._read(np.asarray(padded_tokens)[:true_length], true_length, number)

    def insert(self, prefix: Prefix, decode_state: Decoding, slot: int) -> Decoding:
        """Put a prompt that was read into a slot."""
        decoding, where = decode_state, np.array([slot], np.int32)
        if prefix.prompts is not None and prefix.rows is not None:
            given = decoding.state, prefix.prompts, prefix.rows, where, where
            decoding.state = self._alone(lambda: self._engine.insert(*given))
        decoding.ended[slot], decoding.given[slot] = prefix.ended, 0
        decoding.waiting[slot] = collections.deque(prefix.first.tolist())
        decoding.cancelled[slot] = prefix.cancelled
        return decoding

    def generate(self, params: Any, decode_state: Decoding) -> tuple[Decoding, Any]:
        """The next tokens of every slot.

        Returns:
          the state, and ``STEPS`` tokens for each sequence that goes on. Where there are fewer,
          what follows is not valid: it has ended.
        """
        decoding = self._drop_cancelled(decode_state)
        lacks = [len(tokens) < STEPS for tokens in decoding.waiting]
        if np.any(~decoding.ended & lacks):
            decoding = self._drawn(decoding)
        data = np.zeros((self._slots, 2 * STEPS + 1), np.int32)
        for slot, waiting in enumerate(decoding.waiting):
            tokens = [waiting.popleft() for _ in range(min(STEPS, len(waiting)))]
            data[slot, : len(tokens)] = tokens
            data[slot, STEPS : STEPS + len(tokens)] = 1
            decoding.given[slot] += len(tokens)
        data[:, -1] = decoding.given
        self.stepped()
        which = (0, STEPS), (STEPS, 2 * STEPS), (2 * STEPS, 2 * STEPS + 1)
        return decoding, engine_api.ResultTokens(data, *which, self.samples_per_slot)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Decoding:
        """Free slots."""
        size = Size(self._slots, self._slots, 1, 0, self._length)
        return Decoding(
            self._alone(lambda: self._engine.empty(size, self._home)),
            self._home,
            np.ones(self._slots, bool),
            np.zeros(self._slots, np.int32),
            [collections.deque() for _ in range(self._slots)],
            [lambda: False] * self._slots,
        )

    def get_prefix_destination_sharding(self) -> Any:
        """Of prompts on their way from one engine to another; here they stay."""
        return self._engine.layout.replicated

    def get_tokenizer(self) -> Any:
        """Nothing: ``build_tokenizer`` has the model's."""
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Tokens:
        """The model's own."""
        return Tokens(self.model)

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        """One."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The one of JetStream's lengths that every prompt fits into."""
        return next(n for n in PREFILL_LENGTHS if n >= self.context)

    @property
    def mesh(self) -> Any:
        """Of the generate layout."""
        return self._engine.layout.mesh

    @property
    def colocated_cpus(self) -> None:
        """None are known."""
        return None

    # Behind it

    def _read(self, tokens: np.ndarray, length: Length, number: int) -> Prefix:
        columns = columns_for(length, self.context)
        prompts, mask = np.zeros((1, columns), np.int32), np.zeros((1, columns), bool)
        prompts[0, columns - length :], mask[0, columns - length :] = tokens, True
        numbers = np.int32(0), np.array([number], np.int32)
        keys = self._alone(lambda: np.asarray(self._keys(self._seed, *numbers)))
        limit = np.array([min(length.max_tokens, self.context - length)], np.int32)
        where = np.zeros(1, np.int32)
        new = Admission(prompts, mask, where, where, keys, limit)
        given = self._how, self.model.params, new
        read, rows, drawn = self._alone(lambda: self._engine.prefill(*given))
        return Prefix(read, rows, drawn.tokens[0], drawn.done[0], length.cancelled)

    def _alone(self, run: Callable[[], T]) -> T:
        """What a call gives; over several devices while no other runs, and when it is there."""
        if not self._one_at_a_time:
            return run()
        with self._programs:
            return jax.block_until_ready(run())

    def _drawn(self, decoding: Decoding) -> Decoding:
        """The next tokens of all that have not ended."""
        if not self._engine.by_kernel and decoding.column + STEPS > self._length:
            self._back(decoding)
        given = self._how, self.model.params, decoding.state, STEPS, STEPS
        decoding.state, drawn = self._alone(lambda: self._engine.decode(*given))
        decoding.column += drawn.steps
        for slot in np.flatnonzero(~decoding.ended):
            decoding.waiting[slot].extend(drawn.tokens[slot][drawn.mask[slot]].tolist())
        decoding.ended |= drawn.done
        return decoding

    def _back(self, decoding: Decoding) -> None:
        """Columns behind ``home`` are free again."""
        if not self._engine.by_kernel and decoding.column > self._home:
            state, first = decoding.state, decoding.column - self._home
            decoding.state = self._alone(lambda: self._engine.move(state, first=first))
            decoding.column = self._home

    def _drop_cancelled(self, decoding: Decoding) -> Decoding:
        gone = np.array([gone() for gone in decoding.cancelled])
        if (gone & ~decoding.ended).any():
            state = decoding.state
            decoding.state = self._alone(lambda: self._engine.halt(state, gone))
            decoding.ended |= gone
        for slot in np.flatnonzero(gone):
            decoding.waiting[slot].clear()
        return decoding
