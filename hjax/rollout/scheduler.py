"""Who has which slot of the engine, and when: sequences enter, end, and make room.

All that is decided here follows from what was drawn, which every process of a pool knows, so that
all of them call the same programs. Where caches are not read by a kernel that knows what is filled,
slots that have ended are left behind (half of the rows stay when half have ended) and columns are
added as they are needed: a long tail costs what its own rows do.
"""

import concurrent.futures
import dataclasses
import os
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np

from hjax.models.packed_prefill import packed_sizes
from hjax.models.parameters import Weights
from hjax.rollout.bucketing import COLUMNS, RolloutBuckets
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.prefix_cache import texts
from hjax.rollout.prefix_sharing import AT_ONCE, CHUNK, PrefixSharing
from hjax.rollout.rollout_job import NOBODY, Ends, OnEnded, RolloutJob, RolloutResponses
from hjax.rollout.slot_state import Admission, DecodedTokens, ResumedRows
from hjax.rollout.slot_table import SlotTable
from hjax.xla.abstract_program import AbstractProgram

# Columns of prompts that are read together from which on programs without padding pay.
FLAT = 512


@dataclasses.dataclass
class SchedulerCounts:
    """What a schedule did: dispatches, tokens drawn, and rows times steps that were computed."""

    dispatches: int = 0
    tokens: int = 0
    computed: int = 0


def width_for(tokens: int, limit: int) -> int:
    """Columns in which so many tokens of responses are read, ``limit`` at most: of those from 64 on
    there are four sizes to an octave at most."""
    step = max((1 << tokens.bit_length()) // 8, COLUMNS)
    return min(-(-tokens // step) * step, limit)


class RolloutScheduler:
    """One piece of work on an engine, from its first prompt to its last token.

    Args:
      engine: whose slots it fills.
      work: prompts divide over the engine's data-parallel parts.
      ends: which responses' texts end among new tokens; None: none does.
      on_ended: as of ``RolloutResponses``.
    """

    def __init__(
        self,
        engine: Engine,
        work: RolloutJob,
        ends: Ends | None = None,
        on_ended: OnEnded | None = None,
    ):
        self.engine, self.work, self._ends = engine, work, ends
        self.sampling, samples, begun = work.config.sampling, work.samples, work.begun
        self._cut = np.zeros(work.rows, bool)  # sequences whose text has ended
        self._made = RolloutResponses(work, on_ended)
        # Sequences that are to be drawn.
        self._live = ~self._made.ended & ~np.repeat(self._made.enough, samples)
        # Columns in which they are read: few sizes, so that parts share these programs too.
        self._width = 0 if begun is None else width_for(begun.start, work.limit)
        waiting = np.flatnonzero(self._live.reshape(-1, samples).any(axis=1))
        self.beginnings = PrefixSharing(engine, work, waiting)
        self.shapes = RolloutBuckets(engine, work, self.beginnings.columns)
        together = self.beginnings.together(samples * self._width)
        self.entering = min(self.shapes.groups, together)
        self.counts = SchedulerCounts()
        self.table = SlotTable(engine, self.shapes, samples)
        self._decoding = False

    # Sizes

    @property
    def programs_met(self) -> Hashable:
        """What tells schedules of one engine and sampling apart that call other programs."""
        flat = self._rooms(self.entering)
        reading = self.beginnings.active, self.work.prompts.shape[1], self._width, flat
        sizes = tuple(self.shapes.size(*pair) for pair in self.shapes.pairs)
        return bool(self.work.config.surplus), sizes, reading

    def programs(self, call: str, params: Weights) -> Iterator[AbstractProgram]:
        """What takes time and memory, of abstract parameters in the generate layout.

        States are as large as they become, so that what is said of them is the most there is.

        Args:
          call: its name.
          params: jax.ShapeDtypeStruct with shardings.
        """
        engine, work = self.engine, self.work
        most = self.shapes.size(self.shapes.rows[0], self.shapes.lengths[-1])
        held = engine.abstract(most)
        blocks: dict[str, Any] = {}
        if self.beginnings.active:
            blocks = {"blocks": engine.chunks.abstract(self.beginnings.count)}
        yield from self._reading(call, params, {"cache": held}, blocks)
        turns = -(-work.rows // most.rows)
        # The first token is drawn from the prompt.
        dispatches = -(-max(work.limit - 1, 1) // STEPS)
        yield AbstractProgram(
            f"{call}.decode",
            lambda: engine.trace_decode(self.sampling, params, most, STEPS + engine.lookup),
            engine.trips(STEPS),
            runs=turns * dispatches,
            beside=blocks,
            tokens=most.rows * STEPS,
        )

    def _reading(
        self, call: str, params: Weights, held: dict[str, Any], blocks: dict[str, Any]
    ) -> Iterator[AbstractProgram]:
        """What reads prompts, beside a state and blocks: whole, or where prompts are too long for
        that in chunks."""
        engine, beginnings = self.engine, self.beginnings
        count, limit = self.work.prompts.shape
        each, known = engine.parts * self.entering, (0, 0)
        if not beginnings.whole:
            limit, known = CHUNK, (beginnings.columns, beginnings.count)
            yield AbstractProgram(
                f"{call}.prefill_chunk",
                lambda: engine.chunks.trace(params, beginnings.count, CHUNK, beginnings.columns),
                runs=-(-count // engine.parts) * (-(-self.work.prompts.shape[1] // CHUNK) - 1),
                beside=held,
                tokens=0,
            )
        yield AbstractProgram(
            f"{call}.prefill",
            lambda: engine.trace_prefill(params, (each, limit), self.work.samples, known),
            runs=-(-count // each),
            beside=held | blocks if beginnings.whole else held,
            tokens=0,
        )

    def warm(self, params: Weights) -> None:
        """Compile every program that this schedule may call, so that none is compiled later."""
        # Programs of several devices are run one after another, in the same order everywhere.
        workers = os.cpu_count() if self.engine.layout.mesh.size == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            made = [pool.submit(self._warm_entries, params)]
            made.append(pool.submit(PrefixSharing(self.engine, self.work).warm, params))
            made += [pool.submit(self._warm_size, params, *pair) for pair in self.shapes.pairs]
            for each in made:
                each.result()

    def _warm_size(self, params: Weights, rows: int, length: int) -> None:
        shapes = self.shapes

        def empty() -> SlotTable:
            return SlotTable(self.engine, shapes, self.work.samples).open(rows, length)

        empty().decode(self.sampling, params, 0)
        if self.work.config.surplus or self._ends is not None:
            table = empty()
            table.state = self.engine.halt(table.state, table.live.ravel())
        if shapes.drops_columns:
            empty().move(1, length)
        if (rows, longer := shapes.longer(length)) in shapes.pairs:
            empty().move(0, longer)
        if fewer := shapes.fewer(rows, length):
            empty().narrow(fewer)

    def _warm_entries(self, params: Weights) -> None:
        table = SlotTable(self.engine, self.shapes, self.work.samples)
        table.open(self.shapes.rows[0], self.shapes.lengths[0])
        beginnings, blocks = self.beginnings, None
        if beginnings.active:
            blocks = self.engine.chunks.empty(beginnings.count)
        for new in (0, *beginnings.new):
            for each in self._entries(new):
                numbers = np.full((self.engine.parts, each), NOBODY)
                blank = self._admission(numbers, new, {})
                for flat in self._rooms(each, new):
                    entry = dataclasses.replace(blank, flat=flat)
                    table.share()
                    table.admit(self.sampling, params, entry, blocks if new else None)

    def _entries(self, new: int = 0) -> list[int]:
        """Groups of a part that may enter together, growing; ``new``: as of ``PrefixSharing``."""
        beginnings, shapes = self.beginnings, self.shapes
        if new:
            return sorted({1, self.entering})
        if not beginnings.whole:
            return []
        at_once = not shapes.refills and self.entering == shapes.groups and self.work.begun is None
        if beginnings.in_chunks or at_once:
            return [self.entering]
        powers = {min(1 << i, self.entering) for i in range(self.entering.bit_length() + 1)}
        return sorted(powers)

    def _rooms(self, each: int, new: int = 0) -> tuple[int, ...]:
        """Rooms for tokens of so many prompts that are read without padding, growing; 0, the last:
        with it. ``new``: as of ``PrefixSharing``."""
        columns = each * (new or self.work.prompts.shape[1])
        padded = self.work.mask.all() or self._width or not self.engine.reads_flat
        return (0,) if padded or columns < FLAT else (*packed_sizes(columns), 0)

    # Running

    def run(self, params: Weights) -> dict[str, np.ndarray]:
        """Draw everything: tables as of ``RolloutResponses``."""
        shapes, table = self.shapes, self.table
        table.open(shapes.rows[0], shapes.lengths[0], shapes.before)
        self.beginnings.begin(params)
        while table.most_live or self.beginnings.left:
            if table.most_live:
                self._decode(params)
                self._give_up()
            self._fill(params)
            if not self._decoding:  # all may give up with their first token
                self._give_up()
        return self._made.tables()

    def _decode(self, params: Weights) -> None:
        table = self.table
        while (fewer := self._fewer()) and table.most_live <= fewer:
            table.narrow(fewer)
            table.share()
        table.make_room(int(self._made.drawn[table.who[table.live]].max()))
        fewer = self._fewer()
        until = fewer if table.most_live > fewer else 0
        drawn = table.decode(self.sampling, params, STEPS, until=until)
        self._decoding = True
        sequences = table.who.ravel().copy()
        table.leave(drawn.done.reshape(table.who.shape))
        self._note(sequences, drawn, drawn.steps)

    def _fewer(self) -> int:
        """Rows of a part that the state may have once so many are left; 0: it stays as it is."""
        rows = self.table.who.shape[1]
        return 0 if self.beginnings.left else self.shapes.fewer(rows, self.table.length)

    def _note(self, sequences: np.ndarray, drawn: DecodedTokens, steps: int) -> None:
        """Who drew what in a dispatch.

        Args:
          sequences: int [rows], of the tables' rows.
          drawn: the tables.
          steps: that all slots took.
        """
        drawn, over = self._cut_off(sequences, drawn)
        there = sequences != NOBODY
        count = np.where(there, drawn.mask.sum(axis=1), 0)
        ended = (drawn.done & (count > 0)) | over
        if self.work.end < self.work.limit:  # who has all its tokens but not a last one is left off
            last = drawn.tokens[np.arange(there.size), np.maximum(count - 1, 0)]
            left_off = np.where(there, self._made.drawn[sequences] + count, 0) == self.work.end
            ended &= ~left_off | np.isin(last, self.sampling.stop) | over
        self._made.put(sequences, drawn, ended)
        self.counts.dispatches += 1
        self.counts.tokens += int(count.sum())
        self.counts.computed += steps * drawn.done.size

    def _cut_off(
        self, sequences: np.ndarray, drawn: DecodedTokens
    ) -> tuple[DecodedTokens, np.ndarray]:
        """Tables without what is behind the end of a text, and whose ends there, bool [rows]."""
        over = np.zeros(len(sequences), bool)
        if self._ends is None:
            return drawn, over
        mask = np.array(drawn.mask)
        for row in np.flatnonzero((sequences != NOBODY) & mask.any(axis=1)):
            if self._cut[sequences[row]]:  # it entered with its last token
                mask[row] = False
                continue
            at = np.flatnonzero(mask[row])
            count = self._ends(int(sequences[row]), drawn.tokens[row, at].tolist())
            if count is not None:
                mask[row, at[count:]], over[row] = False, True
        self._cut[sequences[over]] = True
        return dataclasses.replace(drawn, mask=mask), over

    def _give_up(self) -> None:
        """Draw no more of samples that nobody will keep, or whose text has ended."""
        table = self.table
        enough = self._cut[table.who]
        if self.work.config.surplus:
            enough |= self._made.enough[table.who // self.work.samples]
        table.halt(enough & table.live)
        table.leave(enough & table.live)

    # Entering

    def _fill(self, params: Weights) -> None:
        """Let in all who can be, and read some of who comes next while others are decoded."""
        free = max(map(len, self.table.free()))
        chunks = min(1 + free, AT_ONCE)
        while self.beginnings.left:
            if self._enter(params):
                continue
            # Slots are free and nobody decodes: then chunks are all that there is to do.
            nobody = not (self._decoding and self.table.most_live)
            idle = nobody and max(map(len, self.table.free()))
            if not (idle or chunks) or not self.beginnings.read(params):
                break
            chunks = max(chunks - 1, 0)
        if not self.beginnings.left:
            self.beginnings.end()

    def _enter(self, params: Weights) -> bool:
        """Let in who waits, as far as there are free groups; False: nobody can enter."""
        table, beginnings, parts = self.table, self.beginnings, self.engine.parts
        free = table.free()
        most = min(max(map(len, free)), -(-beginnings.left // parts), self.entering)
        turns = [(i, part) for i in range(most) for part in range(parts) if i < len(free[part])]
        if not self._decoding:  # in order, part by part
            turns.sort(key=lambda turn: turn[1])
        taken: list[list[int]] = [[] for _ in range(parts)]
        for _, part in turns:
            number = beginnings.take(part, self._decoding)
            taken[part] += [] if number == NOBODY else [number]
        if not any(taken):
            return False
        # In few sizes, so that few programs are needed.
        new = beginnings.columns_for(taken)
        each = next(n for n in self._entries(new) if n >= max(map(len, taken)))
        numbers = np.array([some + [NOBODY] * (each - len(some)) for some in taken])
        places = {
            (part, i): free[part][i] for part, some in enumerate(taken) for i in range(len(some))
        }
        entry = self._admission(numbers, new, places)
        table.share()
        prefixes = beginnings.prefixes if new else None
        blocks = None if prefixes is None else prefixes.blocks
        drawn = table.admit(self.sampling, params, entry, blocks)
        sequences = self._sequences(numbers).ravel()
        table.leave(np.isin(table.who, sequences[drawn.done]) & table.live)
        self._note(sequences, drawn, 0)
        return True

    def _sequences(self, numbers: np.ndarray) -> np.ndarray:
        """int [..., samples], those of prompts that are to be drawn; NOBODY: it has ended."""
        ids = numbers[..., None] * self.work.samples + np.arange(self.work.samples)
        return np.where((numbers[..., None] != NOBODY) & self._live[ids], ids, NOBODY)

    def _admission(
        self, numbers: np.ndarray, new: int, places: dict[tuple[int, int], int]
    ) -> Admission:
        """Prompts that enter.

        Args:
          numbers: int [parts, each], which; NOBODY fills up.
          new: columns of what is new of them, as of ``PrefixSharing``.
          places: the free group of each of them, by its place in ``numbers``.
        """
        work, table, ids = self.work, self.table, self._sequences(numbers)
        groups = np.full(numbers.shape, self.shapes.groups, np.int32)
        rows = np.full(ids.shape, self.shapes.rows[0], np.int32)
        for at, group in places.items():
            own = table.seat(at[0], group, ids[at], self.shapes.before)
            groups[at], rows[at] = group, np.where(ids[at] != NOBODY, own, rows[at])
        prompts, mask, known = self.beginnings.entering(numbers, new)
        total = int(mask.reshape(len(numbers), -1).sum(axis=1).max())
        flat = next(n for n in self._rooms(numbers.shape[1], new) if not n or total <= n)
        ids = ids.ravel()
        live = ids != NOBODY
        return Admission(
            prompts,
            mask,
            groups.ravel(),
            rows.ravel(),
            np.where(live[:, None], work.keys[ids], 0).astype(np.uint32),
            np.where(live, work.end, 1).astype(np.int32),
            known=known,
            text=self._texts(ids),
            most=np.where(live, work.limit, 1).astype(np.int32),
            begun=self._begun(ids),
            flat=flat,
        )

    def _texts(self, ids: np.ndarray) -> np.ndarray | None:
        """What there is of sequences, prompt and response, where guesses are looked up in it."""
        work = self.work
        if not self.engine.lookup:
            return None
        made: list[list[int]] = []
        for number in ids:
            prompt = number // work.samples
            own = [] if number == NOBODY else work.prompts[prompt][work.mask[prompt]].tolist()
            if own and work.begun is not None:
                own += work.begun.tables["responses"][number, : self.shapes.before].tolist()
            made.append(own)
        return texts(made, work.prompts.shape[1] + work.limit)

    def _begun(self, ids: np.ndarray) -> ResumedRows | None:
        """What there is of responses."""
        begun, before = self.work.begun, self.shapes.before
        if begun is None:
            return None
        live = ids != NOBODY
        tokens = np.zeros((ids.size, self._width), np.int32)
        tokens[live, :before] = begun.tables["responses"][ids[live], :before]
        return ResumedRows(tokens, np.where(live, before, 1).astype(np.int32))
