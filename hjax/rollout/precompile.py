"""Precompilation (warm-up): compiles every program that a service may call.

On one device several compile at a time, as tracing and compiling keep a core busy each. Over
several devices programs run one after another, in one order.
"""

import concurrent.futures
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from hjax import machine
from hjax.models.parameters import Weights
from hjax.rollout.bucketing import PREFILL_CHUNK, ServiceBuckets
from hjax.rollout.prefix_cache import PrefixCache, cached_column_sizes
from hjax.rollout.prompt_log_probs import PromptScorer
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import (
    Admission,
    ContinuedRows,
    PrefilledPrompts,
    RunningSequences,
)
from hjax.rollout.slot_table import SlotTable

# Share of the free memory that the states under compilation may take.
MEMORY_SHARE = 0.25
# A description, and a call that compiles.
_Task = tuple[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Precompilation:
    """Precompilation of a service that has had no request yet.

    Attributes:
      buckets: of the service.
      params: of its model.
      prefixes: its prefix cache; None: there is none.
      scorer: of prompts; None: no request asks for their log-probs.
      admission: makes an ``Admission`` from entries, target rows, columns of each entry and of the
        packed form, and columns for cached tokens.
      every: bitmasks of this many rows that allow every token.
      continuations: one of each size with which rows may be continued, without any tokens.
    """

    buckets: ServiceBuckets
    params: Weights
    prefixes: PrefixCache | None
    scorer: PromptScorer | None
    admission: Callable[[list[Any], np.ndarray, tuple[int, int], int], Admission]
    every: Callable[[int], Any]
    continuations: Sequence[ContinuedRows] = ()
    _blocks: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, on_progress: Callable[[str], None]) -> None:
        """Compile; ``on_progress`` is called, in any thread, with a few words on what is next."""
        with concurrent.futures.ThreadPoolExecutor(self._workers()) as pool:

            def results(groups: list[list[_Task]]) -> list[Any]:
                """The first of a kind compiles what the others share: once, not in each thread."""

                def one(task: _Task) -> Any:
                    on_progress(task[0])
                    return task[1]()

                groups = [tasks for tasks in groups if tasks]
                firsts = list(pool.map(one, [tasks[0] for tasks in groups]))
                return firsts + list(pool.map(one, [x for tasks in groups for x in tasks[1:]]))

            # Prefills of one size are inserted by the same programs, so one of each is enough.
            read = dict(results(self._prompts()))
            results([*self._states(list(read.values())), *self._rest()])

    def _workers(self) -> int:
        engine = self.buckets.engine
        if engine.layout.mesh.size > 1:
            return 1
        sizes = self.buckets.state_sizes(self.buckets.rows[-1], self.buckets.lengths[-1])
        largest = engine.abstract(sizes)
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(largest))
        free = machine.free_bytes(engine.layout.mesh.devices.flat[0])
        # Twice the size, as moving a state copies it.
        return max(min(os.cpu_count() or 1, int(MEMORY_SHARE * free) // (2 * size)), 1)

    def _prompts(self) -> list[list[_Task]]:
        """Prefill tasks by batch size, one for each number of columns."""
        parts = self.buckets.engine.parts
        return [
            [
                (f"{each * parts} prompts, {flat or new} tokens",
                 functools.partial(self._read, each * parts, (new, flat), columns))
                for new, columns in self._columns()
                for flat in self.buckets.packed_sizes(each, new, columns)
            ]
            for each in self.buckets.prefill_batches
        ]  # fmt: skip

    def _columns(self) -> Iterator[tuple[int, int]]:
        """Columns for uncached tokens, and for whole prompts if there is a prefix cache, else 0."""
        buckets = self.buckets
        if self.prefixes is None:
            yield from ((new, 0) for new in buckets.prompt_column_sizes)
            return
        for columns in cached_column_sizes(buckets.limit):
            most = buckets.max_prompt_columns(columns)
            yield from ((new, columns) for new in buckets.prompt_column_sizes if new <= most)

    def _read(
        self, entries: int, room: tuple[int, int], columns: int
    ) -> tuple[tuple[int, int], tuple[PrefilledPrompts, RunningSequences]]:
        blocks = None if self.prefixes is None else self.prefixes.blocks
        nobody, engine = [None] * entries, self.buckets.engine
        new = self.admission(nobody, np.zeros(entries), room, columns)
        counted = self.buckets.sampling_sizes.penalties
        prompts, rows, _ = engine.prefill(SamplingParams(), self.params, new, 1, counted, blocks)
        return (entries, columns or room[0]), (prompts, rows)

    def _states(self, read: list[tuple[PrefilledPrompts, RunningSequences]]) -> list[list[_Task]]:
        states: list[list[_Task]] = [
            [
                (f"{rows * self.buckets.engine.parts} slots of {length} tokens",
                 functools.partial(self._slots, rows, length, read))
                for length in self.buckets.lengths_for(rows)
            ]
            for rows in self.buckets.rows
        ]  # fmt: skip
        further: list[_Task] = [
            (f"{new.packed_size or new.tokens.size} further tokens",
             functools.partial(self._continue, length, new))
            for new in self.continuations
            for length in self.buckets.lengths
        ]  # fmt: skip
        return [*states, further]

    def _continue(self, length: int, new: ContinuedRows) -> None:
        rows = self.buckets.rows[-1]
        table = SlotTable(self.buckets.engine, self.buckets).open(rows, length)
        every = self.every(rows * self.buckets.engine.parts)
        table.decode(SamplingParams(), self.params, 0, every, new=new)

    def _slots(
        self, rows: int, length: int, read: list[tuple[PrefilledPrompts, RunningSequences]]
    ) -> None:
        buckets, engine, count = self.buckets, self.buckets.engine, rows * self.buckets.engine.parts

        def empty() -> SlotTable:
            return SlotTable(engine, buckets).open(rows, length, length)

        table = empty()
        for prompts, running in read:
            nowhere = np.full(running.drawn.shape, rows, np.int32)
            table.state = engine.insert(table.state, prompts, running, nowhere, nowhere)
        table.decode(SamplingParams(), self.params, 0, self.every(count))
        table.state = engine.stop_rows(table.state, np.zeros(count, bool))
        if self.prefixes is not None:
            with self._blocks:
                self.prefixes.precompile_store(table.state)
        lengths = buckets.lengths_for(rows)
        if not engine.row_columns:
            table.move_columns(1, length)
        at = lengths.index(length)
        for near in lengths[max(at - 1, 0) : at + 2]:
            table.move_columns(0, near)
            table.move_columns(0, length)
        for other in buckets.rows:
            if length in buckets.lengths_for(other) and other > rows:
                empty().grow_rows(other)
            elif length in buckets.lengths_for(other) and other < rows:
                empty().shrink_rows(other)

    def _rest(self) -> list[list[_Task]]:
        """Log-probs of prompts, and chunked prefill."""
        tasks: list[_Task] = []
        if self.scorer is not None:
            tasks = [
                (f"log-probs of {new} tokens",
                 functools.partial(self.scorer.run, self.params, (0,), new))
                for new in self.buckets.prompt_column_sizes
            ]  # fmt: skip
        if self.prefixes is None:
            return [tasks]
        return [tasks, [("long prompts", functools.partial(self._chunks, self.prefixes))]]

    def _chunks(self, prefixes: PrefixCache) -> None:
        with self._blocks:
            prefixes.precompile_prefill(self.params, PREFILL_CHUNK, self.buckets.limit)
