"""Compiles every program that a service may call, whatever the lengths of its requests.

On one device several at a time: tracing and compiling keep a core busy each. Over several devices
programs run one after another, in one order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hjax import machine
from hjax.models.parameters import Weights
from hjax.rollout.options import Sampling
from hjax.rollout.prefixes import Beginning, Prefixes, known_columns, known_of
from hjax.rollout.scoring import Scorer
from hjax.rollout.shapes import CHUNK, STEPS, Shapes
from hjax.rollout.slots import Admission, Known, Prompts, Running

# Of the memory that is free: what the states that are made at a time may take.
SHARE = 0.25
# What is done, and a call that does it.
_Task = tuple[str, Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Of a service that has answered nobody yet.

    Attributes:
      shapes: of the service.
      params: of its model.
      prefixes: what it keeps; None: nothing.
      scorer: of prompts.
      nobody: an admission of so many entries and columns, each one's and those of all without
        padding, of which nobody is there.
      every: that so many rows may draw every token, as of ``Admission``.
    """

    shapes: Shapes
    params: Weights
    prefixes: Prefixes | None
    scorer: Scorer
    nobody: Callable[[int, tuple[int, int], Known | None], Admission]
    every: Callable[[int], Any]
    _blocks: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def run(self, told: Callable[[str], None]) -> None:
        """``told`` is what is compiled next, in a few words, by any thread."""
        with concurrent.futures.ThreadPoolExecutor(self._workers()) as pool:

            def results(tasks: list[_Task]) -> list[Any]:
                def one(task: _Task) -> Any:
                    told(task[0])
                    return task[1]()

                return list(pool.map(one, tasks))

            # The first of a kind compiles what its others share: once, not in each thread.
            first, others = self._prompts()
            # Those of one size go into a state by the same programs.
            read = dict(results(first) + results(others))
            first, others = self._states(list(read.values()))
            results(first)
            results(others + self._rest())

    def _workers(self) -> int:
        engine = self.shapes.engine
        if engine.layout.mesh.size > 1:
            return 1
        largest = engine.abstract(self.shapes.size(self.shapes.slots, self.shapes.lengths[-1]))
        size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(largest))
        free = machine.free_bytes(engine.layout.mesh.devices.flat[0])
        # Two of them: one that is moved has its copy.
        return max(min(os.cpu_count() or 1, int(SHARE * free) // (2 * size)), 1)

    def _prompts(self) -> tuple[list[_Task], list[_Task]]:
        """So many read together, once for each number of columns."""
        first: list[_Task] = []
        others: list[_Task] = []
        for each in self.shapes.together:
            entries = each * self.shapes.engine.parts
            tasks: list[_Task] = [
                (f"{entries} prompts, {flat or new} tokens",
                 functools.partial(self._read, entries, (new, flat), columns))
                for new, columns in self._columns()
                for flat in self.shapes.flat(each, new, columns)
            ]  # fmt: skip
            first += tasks[:1]
            others += tasks[1:]
        return first, others

    def _columns(self) -> Iterator[tuple[int, int]]:
        """Of what is new of prompts, and of the whole of them where beginnings are kept, else 0."""
        shapes = self.shapes
        if self.prefixes is None:
            yield from ((new, 0) for new in shapes.news)
            return
        for columns in known_columns(shapes.limit):
            most = shapes.most_new(columns)
            yield from ((new, columns) for new in shapes.news if new <= most)

    def _read(
        self, entries: int, room: tuple[int, int], columns: int
    ) -> tuple[tuple[int, int], tuple[Prompts, Running]]:
        known = blocks = None
        if self.prefixes is not None:
            nothing = [Beginning()] * entries
            known = known_of([()] * entries, nothing, columns)
            blocks = self.prefixes.blocks
        asked, engine = self.nobody(entries, room, known), self.shapes.engine
        given = Sampling(), self.params, asked, 1, self.shapes.own.penalties, blocks
        prompts, rows, _ = engine.prefill(*given)
        return (entries, columns or room[0]), (prompts, rows)

    def _states(self, read: list[tuple[Prompts, Running]]) -> tuple[list[_Task], list[_Task]]:
        first: list[_Task] = []
        others: list[_Task] = []
        for rows in self.shapes.rows:
            tasks: list[_Task] = [
                (f"{rows} slots of {length} tokens",
                 functools.partial(self._slots, rows, length, read))
                for length in self.shapes.lengths_of(rows)
            ]  # fmt: skip
            first += tasks[:1]
            others += tasks[1:]
        return first, others

    def _slots(self, rows: int, length: int, read: list[tuple[Prompts, Running]]) -> None:
        engine, lengths = self.shapes.engine, self.shapes.lengths_of(rows)
        state = engine.empty(self.shapes.size(rows, length), length)
        for prompts, running in read:
            nowhere = np.full(running.drawn.shape, rows, np.int32)
            state = engine.insert(state, prompts, running, nowhere, nowhere)
        given = state, 0, STEPS + engine.lookup, self.every(rows)
        state, _ = engine.decode(Sampling(), self.params, *given)
        state = engine.halt(state, np.zeros(rows, bool))
        if self.prefixes is not None:
            with self._blocks:
                self.prefixes.warm_up_keeping(state)
        at = lengths.index(length)
        if len(lengths) > 1 and not engine.by_row:
            state = engine.move(state, first=1)
        for near in (at - 1, at + 1):
            if 0 <= near < len(lengths):
                state = engine.move(state, length=lengths[near])
                state = engine.move(state, length=length)
        for other in self.shapes.rows:
            if length not in self.shapes.lengths_of(other):
                continue
            if other > rows:
                self.shapes.widened(state, other)
            elif other < rows:
                kept = np.tile(np.arange(other // engine.parts), (engine.parts, 1))
                self.shapes.narrowed(state, kept)
            else:
                continue
            state = engine.empty(self.shapes.size(rows, length), length)

    def _rest(self) -> list[_Task]:
        """Log-probs of prompts, and chunks of long ones."""
        tasks: list[_Task] = [
            (f"log-probs of {new} tokens",
             functools.partial(self.scorer.run, self.params, (0,), new))
            for new in self.shapes.news
        ]  # fmt: skip
        if self.prefixes is not None:
            tasks.append(("long prompts", functools.partial(self._chunks, self.prefixes)))
        return tasks

    def _chunks(self, prefixes: Prefixes) -> None:
        with self._blocks:
            prefixes.warm_up_reading(self.params, CHUNK, self.shapes.limit)
