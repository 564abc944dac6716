"""Continuous batching of requests that continue each other: their rows stay in their slots.

The next request of an episode begins with what its row has in the cache already; the rest is
appended in place and the response drawn by one program, for all that wait at once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hjax.rollout.batcher import ContinuousBatcher
from hjax.rollout.bucketing import TurnBuckets
from hjax.rollout.requests import Request, RequestHandle
from hjax.rollout.rollout_job import EMPTY
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.slot_state import ContinuedRows


@dataclasses.dataclass(frozen=True)
class LastingRow:
    """A row that stays after its request has ended.

    Attributes:
      number: of its sequence in the slot table.
      tokens: that it has in the cache.
    """

    number: int
    tokens: tuple[int, ...]


class LastingBatcher(ContinuousBatcher):
    """A ``ContinuousBatcher`` in which a request continues the last one with the same ``choice``.

    A row leaves when others need its slot, the one that ended first before others, and when what
    follows is too long to be appended; the prefix cache then has what it had. Its engine has
    ``row_columns``, its buckets are ``TurnBuckets``.
    """

    buckets: TurnBuckets

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._lasting: dict[int, LastingRow] = {}  # by choice, in the order in which they ended

    def replace_params(self, params: Any) -> None:
        """As of ``ContinuousBatcher``; all rows leave."""
        super().replace_params(params)
        self._lasting.clear()
        self._table.release_rows(self._table.live)

    def _blank_rows(self) -> list[ContinuedRows]:
        rows = self.buckets.rows[-1] * self._engine.parts
        sizes = self.buckets.continuation_sizes
        return [self._continued([None] * rows, [0] * rows, size) for size in sizes]

    def _leave(self, rows: Sequence[tuple[int, RequestHandle]]) -> None:
        self._release({handle for _, handle in rows})

    def _release(self, handles: set[RequestHandle]) -> np.ndarray:
        """As of ``ContinuousBatcher``, but the rows stay."""
        ended = {number: one for number, one in self.running.items() if one in handles}
        for number, handle in ended.items():
            del self.running[number]
            self._lasting[handle.request.choice] = LastingRow(number, handle.cached_sequence)
        return np.isin(self._table.sequence_ids, list(ended))

    def _admit(self) -> None:
        self._continue_rows()
        self._make_room()
        super()._admit()

    def _continue_rows(self) -> None:
        """Continue the rows of all waiting requests that have one."""
        longest = self.buckets.continuation_sizes[-1][0]
        known: dict[int, int] = {}  # by number of the sequence: tokens that stay in the cache
        for handle in list(self.waiting.requests):
            request = handle.request
            row = self._lasting.get(request.choice)
            if row is None:
                continue
            cached = _common(row.tokens, request.prompt[:-1])
            # Counts of tokens that do not stay cannot be taken back.
            counts = request.options.penalised and cached < len(row.tokens)
            if counts or len(request.prompt) - cached > longest:
                self._evict(request.choice)
                continue
            del self._lasting[request.choice]
            self.waiting.requests.remove(handle)
            self.running[row.number], known[row.number] = handle, cached
            handle.cached_tokens = cached
            self.totals["prompt_tokens"] += len(request.prompt)
            self.totals["cached_tokens"] += cached
        if not known:
            return
        table = self._table
        numbers = table.sequence_ids.ravel().tolist()
        asked = [self.running[number].request if number in known else None for number in numbers]
        stays = [known.get(number, 0) for number in numbers]
        new = [0 if r is None else len(r.prompt) - n for r, n in zip(asked, stays, strict=True)]
        # As in ``_decode``: a bitmask is for one token, which is drawn beside the steps.
        steps = 0 if any(row.matcher for row in self.running.values()) else self.buckets.steps
        table.ensure_columns(
            max(
                len(each.request.prompt) + min(each.request.max_tokens, len(each.tokens) + steps)
                for each in self.running.values()
            )
        )
        entries = [handle for _, handle in self._rows()]
        rows = self._continued(asked, stays, self.buckets.continuation_size(new))
        bitmasks = self._bitmasks(entries)
        drawn = table.decode(SamplingParams(), self.params, steps, bitmasks, new=rows)
        self._deliver(entries, drawn)

    def _continued(
        self, asked: Sequence[Request | None], cached: Sequence[int], size: tuple[int, int]
    ) -> ContinuedRows:
        """What continues each row of the state.

        Args:
          asked: the request of each; None: it is not continued.
          cached: tokens of each that stay in the cache.
          size: of ``TurnBuckets.continuation_sizes``.
        """
        columns, packed = size
        tokens = np.zeros((len(asked), columns), np.int32)
        count = np.zeros(len(asked), np.int32)
        for row, (request, known) in enumerate(zip(asked, cached, strict=True)):
            if request is not None:
                rest = request.prompt[known:]
                tokens[row, : len(rest)], count[row] = rest, len(rest)
        inputs = self._draw_inputs(asked)
        there = np.array(cached, np.int32)
        return ContinuedRows(tokens, count, there, **inputs, packed_size=packed)

    def _evict(self, choice: int) -> None:
        """Let a row leave, once its prefix is stored."""
        row = self._lasting.pop(choice)
        where = self._table.sequence_ids == row.number
        self._store_prefixes([(int(np.flatnonzero(where)[0]), row.tokens)])
        self._table.release_rows(where)

    def _make_room(self) -> None:
        """Let rows leave for waiting requests that need their slots."""
        waiting = self.waiting.requests
        # A prompt that is prefilled in chunks has a part.
        parts = {handle.part for handle in waiting if handle.prefilled_tokens}
        for choice, row in list(self._lasting.items()):
            free = (self._table.sequence_ids == EMPTY).sum(axis=1)
            part = int(np.nonzero(self._table.sequence_ids == row.number)[0][0])
            if free.sum() < len(waiting) or part in parts and not free[part]:
                self._evict(choice)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens with which both begin."""
    if other[: len(one)] == one:
        return len(one)
    return len(os.path.commonprefix([one, other]))
