"""The rollout scheduler: which sequence enters which slot when, and when the state shrinks.

All decisions follow from what was drawn, which every process of a pool knows, so all call the same
programs. Without a kernel that reads only filled columns, the state shrinks to half of its rows
once half have ended, and gets columns as they are needed: a long tail costs only its own rows.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from hjax.models.packed_prefill import packed_sizes
from hjax.models.parameters import Weights
from hjax.rollout.bucketing import MIN_COLUMNS, RolloutBuckets
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.prefix_cache import text_table
from hjax.rollout.prefix_sharing import MAX_CHUNKS, PREFILL_CHUNK, PrefixSharing
from hjax.rollout.rollout_job import EMPTY, OnPromptDone, RolloutJob, RolloutResponses, StopCheck
from hjax.rollout.slot_state import Admission, DecodedTokens, ResumedRows
from hjax.rollout.slot_table import SlotTable
from hjax.xla.abstract_program import AbstractProgram

# Columns of a prefill batch from which packed prefill pays.
MIN_PACKED_COLUMNS = 512


@dataclasses.dataclass
class SchedulerCounts:
    """Counts of a schedule: dispatches, tokens drawn, and rows times steps that were computed."""

    dispatches: int = 0
    tokens: int = 0
    computed: int = 0


def resumed_columns(tokens: int, limit: int) -> int:
    """Columns in which this many tokens of resumed responses are prefilled, at most ``limit``; from
    64 on there are at most four sizes to an octave."""
    step = max((1 << tokens.bit_length()) // 8, MIN_COLUMNS)
    return min(-(-tokens // step) * step, limit)


class RolloutScheduler:
    """Schedules one rollout job on an engine, from its first prompt to its last token.

    Args:
      engine: whose slots it fills.
      job: its prompts divide over the engine's data-parallel parts.
      stop_check: which responses' texts end among new tokens; None: none does.
      on_prompt_done: as in ``RolloutResponses``.
    """

    def __init__(
        self,
        engine: Engine,
        job: RolloutJob,
        stop_check: StopCheck | None = None,
        on_prompt_done: OnPromptDone | None = None,
    ):
        self.engine, self.job, self._stop_check = engine, job, stop_check
        self.sampling, samples, resumed = job.config.sampling, job.samples, job.resumed
        self._text_ended = np.zeros(job.rows, bool)  # sequences whose text has ended
        self._responses = RolloutResponses(job, on_prompt_done)
        # Sequences that are still to be drawn.
        self._to_draw = ~self._responses.ended & ~np.repeat(self._responses.complete, samples)
        # Columns of resumed responses: few, so that parts of a rollout share programs.
        self._resumed_columns = 0 if resumed is None else resumed_columns(resumed.start, job.limit)
        waiting = np.flatnonzero(self._to_draw.reshape(-1, samples).any(axis=1))
        self.sharing = PrefixSharing(engine, job, waiting)
        self.buckets = RolloutBuckets(engine, job, self.sharing.columns)
        together = self.sharing.prefill_batch(samples * self._resumed_columns)
        self.max_groups = min(self.buckets.groups, together)
        self.counts = SchedulerCounts()
        self.table = SlotTable(engine, self.buckets, samples)
        self._decoding = False

    # Sizes

    @property
    def program_key(self) -> Hashable:
        """Key of its programs: of one engine and sampling, equal keys mean equal programs."""
        flat = self._packed_sizes(self.max_groups)
        reading = self.sharing.active, self.job.prompts.shape[1], self._resumed_columns, flat
        sizes = tuple(self.buckets.state_sizes(rows, n) for rows, n in self.buckets.states)
        return bool(self.job.config.extra_samples), sizes, reading

    def programs(self, call: str, params: Weights) -> Iterator[AbstractProgram]:
        """The programs that take time and memory, of abstract parameters in the generate layout.

        States are at their largest, so that their memory is an upper bound.

        Args:
          call: its name.
          params: jax.ShapeDtypeStruct with shardings.
        """
        engine, job = self.engine, self.job
        most = self.buckets.state_sizes(self.buckets.rows[0], self.buckets.lengths[-1])
        held = engine.abstract(most)
        blocks: dict[str, Any] = {}
        if self.sharing.active:
            blocks = {"blocks": engine.chunked_prefill.abstract(self.sharing.block_count)}
        yield from self._prefill_programs(call, params, {"cache": held}, blocks)
        turns = -(-job.rows // most.rows)
        # The first token is drawn from the prompt.
        dispatches = -(-max(job.limit - 1, 1) // STEPS)
        yield AbstractProgram(
            f"{call}.decode",
            lambda: engine.trace_decode(self.sampling, params, most, STEPS + engine.draft_tokens),
            engine.loop_iterations(STEPS),
            runs=turns * dispatches,
            resident=blocks,
            tokens=most.rows * STEPS,
        )

    def _prefill_programs(
        self, call: str, params: Weights, held: dict[str, Any], blocks: dict[str, Any]
    ) -> Iterator[AbstractProgram]:
        """The prefill programs, beside a state and blocks: whole prompts, or chunks if prompts are
        too long for that."""
        engine, sharing = self.engine, self.sharing
        count, limit = self.job.prompts.shape
        each, known = engine.parts * self.max_groups, (0, 0)
        if not sharing.fits_whole:
            limit, known = PREFILL_CHUNK, (sharing.columns, sharing.block_count)
            trace = engine.chunked_prefill.trace
            chunks = -(-self.job.prompts.shape[1] // PREFILL_CHUNK) - 1
            yield AbstractProgram(
                f"{call}.prefill_chunk",
                lambda: trace(params, sharing.block_count, PREFILL_CHUNK, sharing.columns),
                runs=-(-count // engine.parts) * chunks,
                resident=held,
                tokens=0,
            )
        yield AbstractProgram(
            f"{call}.prefill",
            lambda: engine.trace_prefill(params, (each, limit), self.job.samples, known),
            runs=-(-count // each),
            resident=held | blocks if sharing.fits_whole else held,
            tokens=0,
        )

    def precompile(self, params: Weights) -> None:
        """Compile every program that this schedule may call, so that none is compiled later."""
        # Programs over several devices run one after another, in one order everywhere.
        workers = os.cpu_count() if self.engine.layout.mesh.size == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            made = [pool.submit(self._precompile_prefill, params)]
            made.append(pool.submit(PrefixSharing(self.engine, self.job).precompile, params))
            for rows, length in self.buckets.states:
                made.append(pool.submit(self._precompile_state, params, rows, length))
            for each in made:
                each.result()

    def _precompile_state(self, params: Weights, rows: int, length: int) -> None:
        buckets = self.buckets

        def empty() -> SlotTable:
            return SlotTable(self.engine, buckets, self.job.samples).open(rows, length)

        empty().decode(self.sampling, params, 0)
        if self.job.config.extra_samples or self._stop_check is not None:
            table = empty()
            table.state = self.engine.stop_rows(table.state, table.live.ravel())
        if buckets.drops_columns:
            empty().move_columns(1, length)
        if (rows, longer := buckets.next_length(length)) in buckets.states:
            empty().move_columns(0, longer)
        if fewer := buckets.fewer_rows(rows, length):
            empty().shrink_rows(fewer)

    def _precompile_prefill(self, params: Weights) -> None:
        table = SlotTable(self.engine, self.buckets, self.job.samples)
        table.open(self.buckets.rows[0], self.buckets.lengths[0])
        sharing, blocks = self.sharing, None
        if sharing.active:
            blocks = self.engine.chunked_prefill.empty(sharing.block_count)
        for new in (0, *sharing.column_sizes):
            for each in self._prefill_batches(new):
                blank = self._admission(np.full((self.engine.parts, each), EMPTY), new, {})
                for flat in self._packed_sizes(each, new):
                    entry = dataclasses.replace(blank, packed_size=flat)
                    table.update_sharing()
                    table.admit(self.sampling, params, entry, blocks if new else None)

    def _prefill_batches(self, new: int = 0) -> list[int]:
        """Groups of a part that may enter together, ascending; ``new``: as in ``PrefixSharing``."""
        sharing, buckets = self.sharing, self.buckets
        if new:
            return sorted({1, self.max_groups})
        if not sharing.fits_whole:
            return []
        at_once = not buckets.refills and self.max_groups == buckets.groups
        at_once = at_once and self.job.resumed is None
        if sharing.chunked or at_once:
            return [self.max_groups]
        powers = {min(1 << i, self.max_groups) for i in range(self.max_groups.bit_length() + 1)}
        return sorted(powers)

    def _packed_sizes(self, each: int, new: int = 0) -> tuple[int, ...]:
        """Sizes of a packed prefill of this many prompts, ascending; the last, 0, is padded.
        ``new``: as in ``PrefixSharing``."""
        columns = each * (new or self.job.prompts.shape[1])
        padded = self.job.mask.all() or self._resumed_columns or not self.engine.packs_prompts
        return (0,) if padded or columns < MIN_PACKED_COLUMNS else (*packed_sizes(columns), 0)

    # Running

    def run(self, params: Weights) -> dict[str, np.ndarray]:
        """Draw everything; returns tables as in ``RolloutResponses``."""
        buckets, table = self.buckets, self.table
        table.open(buckets.rows[0], buckets.lengths[0], buckets.resumed_tokens)
        self.sharing.prefill_shared(params)
        while table.max_live_rows or self.sharing.waiting_count:
            if table.max_live_rows:
                self._decode(params)
                self._stop_finished()
            self._admit_waiting(params)
            if not self._decoding:  # all may end with their first token
                self._stop_finished()
        return self._responses.tables()

    def _decode(self, params: Weights) -> None:
        table = self.table
        while (fewer := self._shrunk_rows()) and table.max_live_rows <= fewer:
            table.shrink_rows(fewer)
            table.update_sharing()
        table.ensure_columns(int(self._responses.drawn[table.sequence_ids[table.live]].max()))
        fewer = self._shrunk_rows()
        enough_live = fewer if table.max_live_rows > fewer else 0
        drawn = table.decode(self.sampling, params, STEPS, enough_live=enough_live)
        self._decoding = True
        sequences = table.sequence_ids.ravel().copy()
        table.release_rows(drawn.done.reshape(table.sequence_ids.shape))
        self._record(sequences, drawn, drawn.steps)

    def _shrunk_rows(self) -> int:
        """Rows of a part after the next shrink, once only so many run; 0: no shrink."""
        rows = self.table.sequence_ids.shape[1]
        return 0 if self.sharing.waiting_count else self.buckets.fewer_rows(rows, self.table.length)

    def _record(self, sequences: np.ndarray, drawn: DecodedTokens, steps: int) -> None:
        """Record what a dispatch drew.

        Args:
          sequences: int [rows], of the tables' rows.
          drawn: the tables.
          steps: that all slots took.
        """
        drawn, over = self._cut_at_stop(sequences, drawn)
        there = sequences != EMPTY
        count = np.where(there, drawn.mask.sum(axis=1), 0)
        ended = (drawn.done & (count > 0)) | over
        if self.job.end < self.job.limit:  # full but without a last token: paused, not ended
            last = drawn.tokens[np.arange(there.size), np.maximum(count - 1, 0)]
            left_off = np.where(there, self._responses.drawn[sequences] + count, 0) == self.job.end
            ended &= ~left_off | np.isin(last, self.sampling.stop) | over
        self._responses.record(sequences, drawn, ended)
        self.counts.dispatches += 1
        self.counts.tokens += int(count.sum())
        self.counts.computed += steps * drawn.done.size

    def _cut_at_stop(
        self, sequences: np.ndarray, drawn: DecodedTokens
    ) -> tuple[DecodedTokens, np.ndarray]:
        """Tables cut at the ends of texts (stop strings), and which rows end there, bool [rows]."""
        over = np.zeros(len(sequences), bool)
        if self._stop_check is None:
            return drawn, over
        mask = np.array(drawn.mask)
        for row in np.flatnonzero((sequences != EMPTY) & mask.any(axis=1)):
            if self._text_ended[sequences[row]]:  # its first token was its last
                mask[row] = False
                continue
            at = np.flatnonzero(mask[row])
            count = self._stop_check(int(sequences[row]), drawn.tokens[row, at].tolist())
            if count is not None:
                mask[row, at[count:]], over[row] = False, True
        self._text_ended[sequences[over]] = True
        return dataclasses.replace(drawn, mask=mask), over

    def _stop_finished(self) -> None:
        """Stop rows of samples that will not be kept, or whose text has ended."""
        table = self.table
        enough = self._text_ended[table.sequence_ids]
        if self.job.config.extra_samples:
            enough |= self._responses.complete[table.sequence_ids // self.job.samples]
        table.stop_rows(enough & table.live)
        table.release_rows(enough & table.live)

    # Entering

    def _admit_waiting(self, params: Weights) -> None:
        """Admit all that can enter, and prefill chunks of the next prompts while others decode."""
        chunks = min(1 + max(map(len, self.table.free_groups())), MAX_CHUNKS)
        while self.sharing.waiting_count:
            if self._admit_some(params):
                continue
            # With free slots and nothing decoding, chunks are all there is to do.
            nobody = not (self._decoding and self.table.max_live_rows)
            idle = nobody and max(map(len, self.table.free_groups()))
            if not (idle or chunks) or not self.sharing.prefill_chunk(params):
                break
            chunks = max(chunks - 1, 0)
        if not self.sharing.waiting_count:
            self.sharing.clear()

    def _admit_some(self, params: Weights) -> bool:
        """Admit waiting prompts into free groups; False: none can enter."""
        table, sharing, parts = self.table, self.sharing, self.engine.parts
        free = table.free_groups()
        most = min(max(map(len, free)), -(-sharing.waiting_count // parts), self.max_groups)
        turns = [(i, part) for i in range(most) for part in range(parts) if i < len(free[part])]
        if not self._decoding:  # in order, part by part
            turns.sort(key=lambda turn: turn[1])
        taken: list[list[int]] = [[] for _ in range(parts)]
        for _, part in turns:
            number = sharing.next_prompt(part, self._decoding)
            taken[part] += [] if number == EMPTY else [number]
        if not any(taken):
            return False
        # Batch sizes are bucketed, so that few programs are needed.
        new = sharing.columns_for(taken)
        each = next(n for n in self._prefill_batches(new) if n >= max(map(len, taken)))
        numbers = np.array([some + [EMPTY] * (each - len(some)) for some in taken])
        places = {
            (part, i): free[part][i] for part, some in enumerate(taken) for i in range(len(some))
        }
        entry = self._admission(numbers, new, places)
        table.update_sharing()
        prefixes = sharing.cache if new else None
        blocks = None if prefixes is None else prefixes.blocks
        drawn = table.admit(self.sampling, params, entry, blocks)
        sequences = self._sequences(numbers).ravel()
        table.release_rows(np.isin(table.sequence_ids, sequences[drawn.done]) & table.live)
        self._record(sequences, drawn, 0)
        return True

    def _sequences(self, numbers: np.ndarray) -> np.ndarray:
        """int [..., samples]: the sequences of prompts to be drawn; EMPTY: ended already."""
        ids = numbers[..., None] * self.job.samples + np.arange(self.job.samples)
        return np.where((numbers[..., None] != EMPTY) & self._to_draw[ids], ids, EMPTY)

    def _admission(
        self, numbers: np.ndarray, new: int, places: dict[tuple[int, int], int]
    ) -> Admission:
        """The ``Admission`` of prompts that enter.

        Args:
          numbers: int [parts, each], which prompts; EMPTY: padding.
          new: columns of their uncached tokens, as in ``PrefixSharing``.
          places: the free group of each of them, by its place in ``numbers``.
        """
        job, table, ids = self.job, self.table, self._sequences(numbers)
        groups = np.full(numbers.shape, self.buckets.groups, np.int32)
        rows = np.full(ids.shape, self.buckets.rows[0], np.int32)
        for at, group in places.items():
            own = table.assign(at[0], group, ids[at], self.buckets.resumed_tokens)
            groups[at], rows[at] = group, np.where(ids[at] != EMPTY, own, rows[at])
        prompts, mask, known = self.sharing.admission_inputs(numbers, new)
        total = int(mask.reshape(len(numbers), -1).sum(axis=1).max())
        flat = next(n for n in self._packed_sizes(numbers.shape[1], new) if not n or total <= n)
        ids = ids.ravel()
        live = ids != EMPTY
        return Admission(
            prompts,
            mask,
            groups.ravel(),
            rows.ravel(),
            np.where(live[:, None], job.keys[ids], 0).astype(np.uint32),
            np.where(live, job.end, 1).astype(np.int32),
            cached=known,
            text=self._texts_so_far(ids),
            final_limit=np.where(live, job.limit, 1).astype(np.int32),
            resumed=self._resumed_rows(ids),
            packed_size=flat,
        )

    def _texts_so_far(self, ids: np.ndarray) -> np.ndarray | None:
        """Prompts and responses so far, in which prompt lookup searches."""
        job = self.job
        if not self.engine.draft_tokens:
            return None
        made: list[list[int]] = []
        for number in ids:
            prompt = number // job.samples
            own = [] if number == EMPTY else job.prompts[prompt][job.mask[prompt]].tolist()
            if own and job.resumed is not None:
                before = self.buckets.resumed_tokens
                own += job.resumed.tables["responses"][number, :before].tolist()
            made.append(own)
        return text_table(made, job.prompts.shape[1] + job.limit)

    def _resumed_rows(self, ids: np.ndarray) -> ResumedRows | None:
        """The tokens of resumed responses."""
        resumed, before = self.job.resumed, self.buckets.resumed_tokens
        if resumed is None:
            return None
        live = ids != EMPTY
        tokens = np.zeros((ids.size, self._resumed_columns), np.int32)
        tokens[live, :before] = resumed.tables["responses"][ids[live], :before]
        return ResumedRows(tokens, np.where(live, before, 1).astype(np.int32))
