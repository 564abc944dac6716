"""What the forward and the backward kernel of a TPU's attention share: a step of their grid, a pair
of blocks of queries and keys, what of it is computed and which of its keys each query sees.

Scores lie [keys, queries]: what there is one of per query is a row, which needs no copies along the
width of a register.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels.attention import MASKED, Sight
from hjax.kernels.attention_visits import STEP, WHOLE, Run, Visits, strip_of, visits

Hide = Callable[[jax.Array], jax.Array]  # of scores [keys, queries]: what is not seen is ``MASKED``

LIMIT = 56 << 20  # bytes on the chip that a kernel may have
_FEW = 3  # patterns of which each has instructions of its own


@dataclasses.dataclass(frozen=True)
class How:
    """What is static of a call.

    Attributes:
      sight, length, block: of a row in whole blocks.
      softcap: as of ``Scoring``.
      interpret: run the kernel's steps in plain JAX.
    """

    sight: Sight
    length: int
    block: int
    softcap: float
    interpret: bool

    @property
    def visits(self) -> Visits:
        """What is computed."""
        return visits(self.sight, self.length, self.block)


class Given(NamedTuple):
    """Arguments of a kernel besides its arrays.

    Attributes:
      numbers: that are there before it starts: ``Visits.lists``, and with segments the smallest
        and the largest of each block of each row.
      rows: int32, along the length: ``Sight.start``, and with segments they, for queries and keys.
    """

    numbers: list[jax.Array]
    rows: list[jax.Array]

    @classmethod
    def of(cls, how: How, segments: jax.Array | None) -> Given:
        """``segments``: int32 [batch, length]."""
        numbers = [jnp.asarray(x) for x in how.visits.lists]
        starts = how.sight.start(np.arange(how.length)).astype(np.int32)
        rows = [jnp.asarray(starts)[None]]
        if segments is not None:
            blocks = segments.reshape(-1, how.block)
            numbers += [blocks.min(1), blocks.max(1)]
            rows += [segments[:, None]] * 2
        return cls(numbers, rows)


class Specs(NamedTuple):
    """Which part of an array a step has, by its grid: rows of the batch, key-value heads, the heads
    of queries that share one, visits."""

    queries: Any  # of [batch, heads, length, head_dim]
    keys: Any  # of [batch, kv_heads, length, head_dim]
    line: Any  # of [batch, heads, 1, length], queries'
    rows: list[Any]  # of ``Given.rows``

    @classmethod
    def of(cls, how: How, each: int, dim: int, given: Given) -> Specs:
        """``each``: heads of queries of a key-value head."""

        def queries(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return row, kv * each + member, lists[0][visit], 0

        def keys(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return row, kv, lists[1][visit], 0

        def line(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return row, kv * each + member, 0, lists[0][visit]

        def starts(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return 0, lists[0][visit]

        def marks(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return row, 0, lists[0][visit]

        def key_marks(row: Any, kv: Any, member: Any, visit: Any, *lists: Any) -> Any:
            return row, 0, lists[1][visit]

        block = how.block
        rows = [pl.BlockSpec((1, block), starts)]
        rows += [pl.BlockSpec((None, 1, block), at) for at in (marks, key_marks)]
        tile = None, None, block, dim
        return cls(
            pl.BlockSpec(tile, queries),
            pl.BlockSpec(tile, keys),
            pl.BlockSpec((None, None, 1, block), line),
            rows[: len(given.rows)],
        )


class Step:
    """A step of the grid, inside a kernel."""

    def __init__(self, how: How, numbers: Sequence[Any], rows: Sequence[Any]):
        self._how, self._bounds, self._rows = how, numbers[7:], rows
        self._queries, self._keys, kinds, self._first, self._count, _, self._strips = numbers[:7]
        self._visit = pl.program_id(3)
        self._kind = kinds[self._visit]
        self.place = pl.multiple_of(self._keys[self._visit] * how.block, STEP)  # of the first key

    def on(self, kind: int, also: Any = True) -> Callable[[Callable[[], None]], None]:
        """Run a function where the visit is of this kind."""
        return pl.when((self._kind & kind > 0) & also)

    def compute(self, add: Callable[[Any, Any, Hide], None]) -> None:
        """Call ``add`` (queries, keys, hide) for the parts of a block that are computed.

        Where all its queries and keys are of one segment: all of it without a mask if every query
        sees every key; else strips one after another in one piece, which a compiler interleaves, if
        few patterns of them are there; masks only where they are needed. Else strips are a loop, of
        1.6 times as many instructions, and masked. Nothing where no segment of its queries is one
        of its keys.
        """
        found = self._how.visits
        whole, met, one = self._kind & WHOLE > 0, jnp.bool_(True), jnp.bool_(True)
        if self._bounds:
            low, high = self._bounds
            first = pl.program_id(0) * (self._how.length // self._how.block)
            q, k = first + self._queries[self._visit], first + self._keys[self._visit]
            met = (low[q] <= high[k]) & (low[k] <= high[q])
            one = (low[q] == high[q]) & (low[k] == high[k])
        every = pl.ds(0, self._how.block)
        if found.whole.any():
            pl.when(met & whole & one)(lambda: add(every, every, lambda scores: scores))
            if self._bounds:
                mixed = functools.partial(self._hide_others, every, every)
                pl.when(met & whole & ~one)(lambda: add(every, every, mixed))
        partly, few = met & ~whole, len(found.patterns) <= _FEW
        if few:
            for place, runs in found.patterns.items():
                here = partly & one & (self._first[self._visit] == place)
                pl.when(here)(functools.partial(self._pattern, runs, add))
            partly &= ~one
        if found.patterns and (self._bounds or not few):
            pl.when(partly)(lambda: self._loop(add))

    def _pattern(self, runs: tuple[Run, ...], add: Callable[[Any, Any, Hide], None]) -> None:
        for run in runs:
            queries = pl.ds(run.strip * STEP, STEP)
            keys = pl.ds(run.begin * STEP, run.steps * STEP)
            add(queries, keys, functools.partial(self._hide_ends, run, queries, keys))

    def _loop(self, add: Callable[[Any, Any, Hide], None]) -> None:
        def strip(entry: Any, carry: Any) -> Any:
            number, begin, steps = strip_of(self._strips[entry])
            queries = pl.ds(pl.multiple_of(number * STEP, STEP), STEP)
            for length in self._how.visits.lengths:
                keys = pl.ds(pl.multiple_of(begin * STEP, STEP), length * STEP)

                def hide(scores: jax.Array, keys: Any = keys) -> jax.Array:
                    scores = self._hide_unseen(queries, keys, scores)
                    return self._hide_others(queries, keys, scores) if self._bounds else scores

                pl.when(steps == length)(functools.partial(add, queries, keys, hide))
            return carry

        first = self._first[self._visit]
        jax.lax.fori_loop(first, first + self._count[self._visit], strip, 0)

    def _hide_ends(self, run: Run, queries: Any, keys: Any, scores: jax.Array) -> jax.Array:
        head, tail = run.head * STEP, keys.size - run.tail * STEP
        parts = []
        for begin, end, hidden in ((0, head, True), (head, tail, False), (tail, keys.size, True)):
            part = scores[begin:end]
            if hidden and end > begin:
                part = self._hide_unseen(queries, pl.ds(keys.start + begin, end - begin), part)
            parts += [part] if end > begin else []
        return jnp.concatenate(parts) if len(parts) > 1 else parts[0]

    def _hide_unseen(self, queries: Any, keys: Any, scores: jax.Array) -> jax.Array:
        """Of these parts of the block what ``Sight`` hides."""
        sight, first = self._how.sight, self.place + keys.start
        # Places count from the first key on: what is added is so of queries alone, a row of them.
        query = self._queries[self._visit] * self._how.block + queries.start - first
        query += jax.lax.broadcasted_iota(jnp.int32, (1, queries.size), 1)
        key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        sight = dataclasses.replace(sight, prompt=sight.prompt - first)
        seen = sight.sees(query, self._rows[0][:, queries] - first, key)
        return jnp.where(seen, scores, MASKED)

    def _hide_others(self, queries: Any, keys: Any, scores: jax.Array) -> jax.Array:
        """Of these parts of the block what is of another segment."""
        own, other = self._rows[1][:, queries], self._rows[2][:, keys]
        same = jnp.broadcast_to(other, (8, keys.size)).T[:, :1] == own
        return jnp.where(same, scores, MASKED)


def dot(
    left: jax.Array, right: jax.Array, over: int, other: int, precision: Any = None
) -> jax.Array:
    """Product of two matrices over these dimensions, summed in float32."""
    summed = (((over,), (other,)), ((), ()))
    return jax.lax.dot_general(left, right, summed, precision, preferred_element_type=jnp.float32)


def params() -> Any:
    """What the compiler is told: rows and key-value heads are free of each other."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=LIMIT,
    )


def lanes(dim: int) -> int:
    """Elements that a row of a head takes on the chip."""
    return -(-dim // STEP) * STEP
