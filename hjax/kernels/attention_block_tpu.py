"""What the forward and the backward kernel of a TPU's attention share: a step of their grid, a pair
of blocks of queries and keys, what of it is computed and which of its keys each query sees.

Scores lie [keys, queries]: what there is one of per query is a row, which needs no copies along the
width of a register.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hjax.kernels.attention import MASKED, Sight
from hjax.kernels.attention_visits import STRIP, WHOLE, Visits, strip_of, visits

LIMIT = 56 << 20  # bytes on the chip that a kernel may have


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
        self.place = pl.multiple_of(self._keys[self._visit] * how.block, STRIP)  # of the first key

    def on(self, kind: int, also: Any = True) -> Callable[[Callable[[], None]], None]:
        """Run a function where the visit is of this kind."""
        return pl.when((self._kind & kind > 0) & also)

    def compute(self, add: Callable[[Any, Any, bool], None]) -> None:
        """Call ``add`` (queries, keys, masked) for the parts of a block that are computed: all of
        it where every query sees every key, else strip by strip, and nothing where no segment of
        its queries can be one of its keys."""
        how = self._how
        every, met = self._kind & WHOLE > 0, jnp.bool_(True)
        if self._bounds:
            low, high = self._bounds
            first = pl.program_id(0) * (how.length // how.block)
            q, k = first + self._queries[self._visit], first + self._keys[self._visit]
            met = (low[q] <= high[k]) & (low[k] <= high[q])
            every &= (low[q] == high[q]) & (low[k] == high[k])

        def strip(entry: Any, carry: Any) -> Any:
            number, begin, steps = strip_of(self._strips[entry])
            queries = pl.ds(pl.multiple_of(number * STRIP, STRIP), STRIP)
            for length in how.visits.lengths:
                keys = pl.ds(pl.multiple_of(begin * STRIP, STRIP), length * STRIP)
                pl.when(steps == length)(lambda keys=keys: add(queries, keys, True))
            return carry

        @pl.when(met & ~every)
        def _() -> None:
            first = self._first[self._visit]
            jax.lax.fori_loop(first, first + self._count[self._visit], strip, 0)

        if how.visits.any_whole:
            whole = pl.ds(0, how.block)
            pl.when(met & every)(lambda: add(whole, whole, False))

    def hidden(self, scores: jax.Array, queries: Any, keys: Any) -> jax.Array:
        """Scores [keys, queries] of these parts of the block, ``MASKED`` where nothing is seen."""
        starts, *marks = self._rows
        place = self._queries[self._visit] * self._how.block + queries.start
        query = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1) + place
        key = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) + self.place + keys.start
        seen = self._how.sight.sees(query, starts[:, queries], key)
        if marks:
            own, other = marks[0][:, queries], marks[1][:, keys]
            seen &= jnp.broadcast_to(other, (8, keys.size)).T[:, :1] == own
        return jnp.where(seen, scores, MASKED)


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
    return -(-dim // STRIP) * STRIP
