"""Continuous batching of requests by one engine: which enter when, prefixes kept, tokens delivered.

The prefix cache keeps keys and values of prompts and answers for prompts that begin alike; long
prompts are prefilled in chunks, between which others decode. A request's tokens follow from the
request and its seed alone, not from its slot or from other requests (up to float32's rounding,
docs/design.md section 9). What is done follows from the order of the requests alone, so that every
process of a pool does the same. Only one thread may call it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hjax.rollout import vocab_parallel
from hjax.rollout.bucketing import PREFILL_BATCHES, ServiceBuckets
from hjax.rollout.engine import Engine
from hjax.rollout.precompile import Precompilation
from hjax.rollout.prefix_cache import (
    CachedPrefix,
    PrefixCache,
    cached_columns,
    text_table,
    uncached_tokens,
)
from hjax.rollout.prompt_log_probs import PromptScorer, Top, top_tokens
from hjax.rollout.requests import Request, RequestHandle, ResponseChunk
from hjax.rollout.row_sampling import RowSampling, SamplingSizes
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import Admission, ContinuedRows, DecodedTokens
from hjax.rollout.slot_table import SlotTable
from hjax.rollout.waiting_requests import WaitingRequests
from hjax.sharding.global_arrays import place, to_numpy


class ContinuousBatcher:
    """Requests in the slots of an engine.

    Args:
      engine: the engine.
      params: the weights that answer.
      slots: requests that run at a time, a multiple of the engine's data-parallel parts.
      max_tokens: of a prompt and its response together.
      prefixes: the prefix cache, which others of the same weights may share; None: there is none.
      prefill_batches: prompts in a prefill batch. Few, so that running requests soon get their next
        tokens; many where all wait for each other.
      bucketing: the sizes of its programs.

    Attributes:
      params: the weights in use, see ``replace_params``.
      waiting: requests that have not entered.
      running: requests in slots, by their number in the slot table.
      totals: ``generated``, ``prompt``, ``cached``, ``guessed`` and ``right`` tokens so far.
    """

    def __init__(
        self,
        engine: Engine,
        params: Any,
        *,
        slots: int,
        max_tokens: int,
        prefixes: PrefixCache | None = None,
        prefill_batches: tuple[int, ...] = PREFILL_BATCHES,
        bucketing: type[ServiceBuckets] = ServiceBuckets,
    ):
        self.params, self._engine, self.max_tokens = params, engine, max_tokens
        vocab = engine.network.config.vocab_size
        self.sampling_sizes = SamplingSizes(vocab, penalties=True)
        sizes = self.sampling_sizes
        self.buckets = bucketing(engine, slots, max_tokens, sizes, prefill_batches)
        self.prefixes = prefixes
        self.scorer = PromptScorer(engine)
        self.waiting = WaitingRequests(self.prefixes, engine.parts, max_tokens)
        self.running: dict[int, RequestHandle] = {}
        self._last_id = 0
        self._table = SlotTable(engine, self.buckets)
        kinds = "generated", "prompt", "cached", "guessed", "right"
        self.totals = {f"{kind}_tokens": 0 for kind in kinds}
        self.allow_all = functools.cache(self._make_allow_all)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting.requests or self.running)

    def advance(self, admits: bool = True) -> None:
        """Admit what can enter, and draw some tokens of what runs.

        Args:
          admits: whether waiting requests may enter.
        """
        self._drop_cancelled()
        if admits:
            self._score_prompt()
            self.waiting.prefill_chunk(self.params)
            self._admit()
        if self.running:
            self._decode()

    def precompile(
        self, on_progress: Callable[[str], None] = lambda line: None, scores: bool = True
    ) -> None:
        """Compile every program that requests may need, of any lengths, before the first one.

        Args:
          on_progress: called, in any thread, with what is compiled next, in a few words.
          scores: whether requests may ask for log-probs of their prompts.
        """
        Precompilation(
            self.buckets, self.params, self.prefixes, self.scorer if scores else None,
            admission=self.admission, every=self.allow_all, continuations=self._blank_rows(),
        ).run(on_progress)  # fmt: skip

    def _blank_rows(self) -> list[ContinuedRows]:
        """One of each size with which rows may be continued; nothing is."""
        return []

    def release_slots(self) -> None:
        """Give up the slots' memory; the next request gets new ones."""
        self._table.state = None

    def replace_params(self, params: Any) -> None:
        """Use other weights, while none run: the prefix cache and all scores are invalid."""
        self.scorer.clear()
        self.waiting.discard_progress()
        if self.prefixes is not None:
            self.prefixes.clear()
        self._table.state, self.params = None, params

    def end_all(self, finish: str) -> None:
        """End every request, with this reason."""
        left = [*self.running.values(), *self.waiting.requests]
        self._release(set(left))
        self.waiting.requests = []
        for handle in left:
            handle.deliver(ResponseChunk(finish=finish))

    def _release(self, handles: set[RequestHandle]) -> np.ndarray:
        """Free the rows of these requests; returns bool [parts, rows], which they were."""
        numbers = [number for number, handle in self.running.items() if handle in handles]
        rows = np.isin(self._table.sequence_ids, numbers)
        self._table.release_rows(rows)
        for number in numbers:
            del self.running[number]
        return rows

    def _drop_cancelled(self) -> None:
        # Read only once, as clients cancel at any moment.
        waiting = self.waiting.requests
        gone = [handle for handle in (*self.running.values(), *waiting) if handle.cancelled]
        for handle in gone:
            self.waiting.release_prefix(handle)
        self.waiting.requests = [handle for handle in waiting if handle not in gone]
        rows = self._release(set(gone))
        self._table.stop_rows(rows)
        for handle in gone:
            handle.deliver(ResponseChunk(finish="cancelled"))

    def _first_waiting(self, of: Callable[[RequestHandle], bool]) -> RequestHandle | None:
        """The first waiting request that satisfies a condition."""
        return next(filter(of, self.waiting.requests), None)

    def _score_prompt(self) -> None:
        """Score the prompt of a waiting request; a request for scores only then ends."""
        handle = self._first_waiting(lambda handle: handle.needs_scores)
        if handle is None:
            return
        prompt = handle.request.prompt
        columns = self.buckets.prompt_columns(len(prompt))
        handle.scores = self.scorer(self.params, prompt, columns)
        if not handle.request.max_tokens:
            self.waiting.requests.remove(handle)
            handle.cached_tokens = 0
            self.totals["prompt_tokens"] += len(prompt)
            handle.deliver(ResponseChunk(finish="length", prompt=handle.scores))

    def _admit(self) -> None:
        """Admit waiting requests."""
        table, buckets, prefixes = self._table, self.buckets, self.prefixes
        taken, batches = table.live.sum(axis=1), buckets.prefill_batches
        entering = self.waiting.take(buckets.rows[-1] - taken, batches[-1])
        if not entering:
            return
        more = np.bincount([handle.part for handle in entering], minlength=len(taken))
        each = next(n for n in batches if n >= more.max())
        longest = max(len(handle.request.prompt) for handle in entering)
        self._ensure_size(longest, next(n for n in buckets.rows if n >= (taken + more).max()))
        entries, where = self._assign_rows(entering, each)
        columns = 0 if prefixes is None else cached_columns(longest, self.max_tokens)
        tokens = [
            [len(t.request.prompt) - t.cached_prefix.tokens for t in entries[at : at + each] if t]
            for at in range(0, len(entries), each)
        ]
        new = self.admission(entries, where, buckets.prefill_size(tokens, each, columns), columns)
        blocks = None if prefixes is None else prefixes.blocks
        drawn = table.admit(SamplingParams(), self.params, new, blocks)
        for handle in entering:
            handle.cached_tokens = max(handle.cached_prefix.tokens - handle.prefilled_tokens, 0)
            self.totals["prompt_tokens"] += len(handle.request.prompt)
            self.totals["cached_tokens"] += handle.cached_tokens
        there = [(row, t.request.prompt) for row, t in self._rows() if t and t in entering]
        self._store_prefixes(there)
        for handle in entering:
            self.waiting.release_prefix(handle)
        self._deliver(entries, drawn)

    def _rows(self) -> Iterator[tuple[int, RequestHandle | None]]:
        """Each row of the state, with its request."""
        yield from enumerate(map(self.running.get, self._table.sequence_ids.ravel().tolist()))

    def _store_prefixes(self, sequences: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Store what rows have computed in the prefix cache."""
        rows = self._table.sequence_ids.shape[1]
        if self.prefixes is not None and sequences:
            placed = [(*divmod(row, rows), tokens) for row, tokens in sequences]
            self.prefixes.store(self._table.state, placed)

    def _ensure_size(self, tokens: int, rows: int) -> None:
        """Have a state with at least ``rows`` rows per part, in which prompts of ``tokens`` tokens
        can end at the next column, or begin at column 0."""
        engine, table, buckets = self._engine, self._table, self.buckets
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
        """Assign rows of their parts to requests that enter. Returns the request of each entry, and
        its row within its part; a padding entry has a row beyond the last."""
        table = self._table
        free = [iter(groups) for groups in table.free_groups()]
        entries: list[RequestHandle | None] = [None] * (len(free) * each)
        where = np.full(len(entries), table.sequence_ids.shape[1], np.int32)
        used = [part * each for part in range(len(free))]
        for handle in entering:
            self._last_id += 1
            self.running[self._last_id] = handle
            part, row = handle.part, next(free[handle.part])
            table.assign(part, row, np.array([self._last_id]), len(handle.request.prompt))
            entries[used[part]], where[used[part]] = handle, row
            used[part] += 1
        return entries, where

    def admission(
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
        return Admission(
            tokens,
            mask,
            where,
            where,
            **self._draw_inputs(asked),
            cached=cached,
            text=text_table(prompts, self.max_tokens if self._engine.draft_tokens else 0),
            bitmask=self._bitmasks(entries),
            packed_size=flat,
        )

    def _draw_inputs(self, asked: Sequence[Request | None]) -> dict[str, Any]:
        """``keys``, ``limit`` and ``options`` of requests, as ``Admission`` has them."""
        seeds = np.array([0 if r is None else r.seed for r in asked], np.uint32)
        numbers = [(0, 0) if r is None else (r.step, r.choice) for r in asked]
        options = RowSampling.of(
            [None if r is None else r.options for r in asked],
            self.sampling_sizes,
            [0 if r is None else r.first_draw for r in asked],
        )
        return {
            "keys": np.asarray(_keys(seeds, *np.array(numbers, np.int32).T)),
            "limit": np.array([1 if r is None else r.max_tokens for r in asked], np.int32),
            "options": options,
        }

    def _decode(self) -> None:
        table, buckets, running = self._table, self.buckets, self.running.values()
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
        drawn = table.decode(SamplingParams(), self.params, steps, bitmasks)
        if drawn.guessed is not None and drawn.right is not None:
            self.totals["guessed_tokens"] += int(drawn.guessed.sum())
            self.totals["right_tokens"] += int(drawn.right.sum())
        self._deliver(entries, drawn)

    def _bitmasks(self, entries: Sequence[RequestHandle | None]) -> np.ndarray | jax.Array:
        """uint32 [entries, words], the tokens that each may draw; always given, so that one program
        serves requests with and without a constraint."""
        matchers = [None if handle is None else handle.matcher for handle in entries]
        if not any(matchers):
            return self.allow_all(len(entries))
        everything = vocab_parallel.full_bitmask(1, self.sampling_sizes.vocab)[0]
        return np.stack([everything if m is None else m.bitmask for m in matchers])

    def _make_allow_all(self, rows: int) -> jax.Array:
        """Bitmasks of rows that allow every token, on the devices."""
        whole = vocab_parallel.full_bitmask(rows, self.sampling_sizes.vocab)
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
        self.totals["generated_tokens"] += sum(len(piece.tokens) for piece in chunks.values())
        self._leave(rows)
        for handle, piece in chunks.items():
            handle.deliver(piece)

    def _leave(self, rows: Sequence[tuple[int, RequestHandle]]) -> None:
        """Free the rows of requests that have ended, once their prefixes are stored."""
        self._store_prefixes([(row, handle.cached_sequence) for row, handle in rows])
        self._release({handle for _, handle in rows})


@jax.jit
@jax.vmap
def _keys(seed: jax.Array, step: jax.Array, choice: jax.Array) -> jax.Array:
    """As ``hjax.rollout.sampling.sequence_keys``."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.key_data(jax.random.fold_in(key, choice))
