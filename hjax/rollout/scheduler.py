"""Who has which slot of the engine, and when: sequences enter, end, and make room.

All that is decided here follows from what was drawn, which every process of a pool knows, so that
all of them call the same programs. Where caches are not read by a kernel that knows what is filled,
slots that have ended are left behind (half of the rows stay when half have ended) and columns are
added as they are needed: a long tail costs what its own rows do.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from hjax.models.flat import rooms
from hjax.models.parameters import Weights
from hjax.rollout.beginnings import AT_ONCE, CHUNK, Beginnings
from hjax.rollout.engine import STEPS, Engine
from hjax.rollout.options import Sampling
from hjax.rollout.slots import Admission, Begun, Drawn, Size, State
from hjax.rollout.work import NOBODY, Ends, Told, Work
from hjax.xla.program import Program

# Columns of a new state's cache; each further one has twice as many.
COLUMNS = 64
# Columns of prompts that are read together from which on programs without padding pay.
FLAT = 512
# Rows of all devices below which halving them saves nothing: weights are what is read.
FEWEST = 8


@dataclasses.dataclass
class Counts:
    """What a schedule did: dispatches, tokens drawn, and rows times steps that were computed."""

    dispatches: int = 0
    tokens: int = 0
    computed: int = 0


def lengths(limit: int, refills: bool) -> list[int]:
    """Columns that a state may have, growing; the last is enough for sequences of ``limit``.

    Args:
      limit: tokens of a sequence.
      refills: whether sequences enter while others run: then some columns more, so that those
        which nobody sees any more are not given up after every few tokens.
    """
    most = limit + 4 * STEPS if refills else limit
    made = []
    length = COLUMNS
    while length < most:
        made.append(length)
        length *= 2
    return [*made, most]


def halves(rows: int, parts: int) -> list[int]:
    """Rows of a data-parallel part that a state may have, falling."""
    made = [rows]
    while made[-1] % 2 == 0 and made[-1] * parts // 2 >= FEWEST:
        made.append(made[-1] // 2)
    return made


def width_for(tokens: int, limit: int) -> int:
    """Columns in which so many tokens of responses are read, ``limit`` at most: of those from 64 on
    there are four sizes to an octave at most."""
    step = max((1 << tokens.bit_length()) // 8, COLUMNS)
    return min(-(-tokens // step) * step, limit)


def _last(mask: np.ndarray) -> np.ndarray:
    """int [rows]: the last column of each that is True, -1 where none is."""
    size = mask.shape[1]
    return np.where(mask.any(axis=1), size - 1 - np.argmax(mask[:, ::-1], axis=1), -1)


class Schedule:
    """One piece of work on an engine, from its first prompt to its last token.

    Args:
      engine: whose slots it fills.
      sampling: of all sequences.
      work: prompts divide over the engine's data-parallel parts.
      slots: sequences at a time; 0: all.
    """

    def __init__(
        self, engine: Engine, sampling: Sampling, work: Work, slots: int = 0,
        ends: Ends | None = None,
    ):  # fmt: skip
        self.engine, self.sampling, self.work = engine, sampling, work
        self._ends = ends
        self._cut = np.zeros(work.rows, bool)  # sequences whose text has ended
        parts, samples = engine.parts, work.samples
        # A mini-batch, of which the dry run describes an update, may have fewer prompts than parts.
        groups = max(work.prompts.shape[0] // parts, 1)
        if slots:
            groups = min(groups, max(slots // (samples * parts), 1))
        self.refills = groups * parts < work.prompts.shape[0]
        # Of all parts of responses the same, so that these share their programs.
        self._all_lengths = lengths(work.limit + engine.lookup, self.refills and not engine.by_row)
        if engine.by_kernel:
            self._all_lengths = [work.limit]
        self.rows = [groups * samples]
        if not engine.by_kernel:
            self.rows = halves(groups * samples, parts)
        self.groups = groups
        begun = work.begun
        self._before = 0 if begun is None else begun.start  # tokens that each has as it enters
        # Columns in which they are read: few sizes, so that parts share these programs too.
        self._width = 0 if begun is None else width_for(begun.start, work.limit)
        self._drawn = np.zeros(work.rows, np.int64)
        self._live = np.ones(work.rows, bool)  # sequences that are to be drawn
        self._ended = np.zeros(work.prompts.shape[0], np.int64)  # samples of each prompt
        if begun is not None:
            self._drawn += begun.lengths
            self._ended += begun.ended.reshape(-1, samples).sum(axis=1)
            self._live = ~begun.ended & np.repeat(self._ended < work.kept, samples)
        waiting = np.flatnonzero(self._live.reshape(-1, samples).any(axis=1))
        self.beginnings = Beginnings(engine, work, waiting)
        self.entering = min(groups, self.beginnings.together(samples * self._width))
        self.counts = Counts()
        # By part: sequence of each row, prompt of each group, or NOBODY.
        self._row = np.full((parts, self.rows[0]), NOBODY)
        self._group = np.full((parts, groups), NOBODY)
        self._done = np.ones((parts, self.rows[0]), bool)
        self._start = np.zeros((parts, self.rows[0]), np.int64)
        self._column = self._before
        self._decoding = False
        self._length = self.lengths[0]

    # Sizes

    def size(self, rows: int, length: int) -> Size:
        """A state's, of so many rows in each part."""
        parts, samples = self.engine.parts, self.work.samples if self._shared(rows) else 1
        text = self.work.prompts.shape[1] + self.work.limit if self.engine.lookup else 0
        prompt = self.beginnings.columns
        return Size(
            parts * rows, parts * self._groups_of(rows), samples, prompt, length, text,
            counted=self.sampling.penalised,
        )  # fmt: skip

    def _shared(self, rows: int) -> bool:
        """Whether prompts stand once for their samples; few rows have each its own."""
        return self.work.samples > 1 and (rows > self.groups or self.engine.by_kernel)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of all states that there may be."""
        return tuple(self.size(*pair) for pair in self._pairs)

    @functools.cached_property
    def lengths(self) -> list[int]:
        """Columns that a state may have, growing: of those of whole responses, from what is there
        to what will be."""
        every = self._all_lengths
        room = self.engine.lookup + (4 * STEPS if self.refills and not self.engine.by_row else 0)
        last = next((i for i, n in enumerate(every) if n >= self.work.end + room), len(every) - 1)
        return [n for n in every[: last + 1] if n > self._before] or every[-1:]

    @functools.cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """Rows and columns of these: few rows are not worth a program before the tail."""
        every = self._all_lengths
        return [
            (rows, length)
            for i, rows in enumerate(self.rows)
            for length in self.lengths
            if i <= every.index(length) + 1 or length == every[-1]
        ]

    @property
    def programs_met(self) -> Hashable:
        """What tells schedules of one engine and sampling apart that call other programs."""
        flat = self._rooms(self.entering)
        reading = self.beginnings.active, self.work.prompts.shape[1], self._width, flat
        return bool(self.work.surplus), self.sizes, reading

    def _groups_of(self, rows: int) -> int:
        return min(self.groups, rows)

    def programs(self, call: str, params: Weights) -> Iterator[Program]:
        """What takes time and memory, of abstract parameters in the generate layout.

        States are as large as they become, so that what is said of them is the most there is.

        Args:
          call: its name.
          params: jax.ShapeDtypeStruct with shardings.
        """
        engine, work = self.engine, self.work
        most = self.size(self.rows[0], self.lengths[-1])
        held = engine.abstract(most)
        blocks: dict[str, Any] = {}
        if self.beginnings.active:
            blocks = {"blocks": engine.chunks.abstract(self.beginnings.count)}
        yield from self._reading(call, params, {"cache": held}, blocks)
        turns = -(-work.rows // most.rows)
        # The first token is drawn from the prompt.
        dispatches = -(-max(work.limit - 1, 1) // STEPS)
        yield Program(
            f"{call}.decode",
            lambda: engine.trace_decode(self.sampling, params, most, self._most),
            engine.trips(STEPS),
            runs=turns * dispatches,
            beside=blocks,
            tokens=most.rows * STEPS,
        )

    def _reading(
        self, call: str, params: Weights, held: dict[str, Any], blocks: dict[str, Any]
    ) -> Iterator[Program]:
        """What reads prompts, beside a state and blocks: whole, or where prompts are too long for
        that in chunks."""
        engine, beginnings = self.engine, self.beginnings
        count, limit = self.work.prompts.shape
        each, known = engine.parts * self.entering, (0, 0)
        if not beginnings.whole:
            limit, known = CHUNK, (beginnings.columns, beginnings.count)
            yield Program(
                f"{call}.prefill_chunk",
                lambda: engine.chunks.trace(params, beginnings.count, CHUNK, beginnings.columns),
                runs=-(-count // engine.parts) * (-(-self.work.prompts.shape[1] // CHUNK) - 1),
                beside=held,
                tokens=0,
            )
        traced = functools.cache(
            lambda: engine.trace_prefill(params, (each, limit), self.work.samples, known)
        )
        yield Program(
            f"{call}.prefill",
            lambda: traced()[0],
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
            made.append(pool.submit(Beginnings(self.engine, self.work).warm, params))
            made += [pool.submit(self._warm_size, params, *size) for size in self._pairs]
            for each in made:
                each.result()

    def _warm_size(self, params: Weights, rows: int, length: int) -> None:
        engine = self.engine

        def empty() -> State:
            return engine.empty(self.size(rows, length))

        engine.decode(self.sampling, params, empty(), 0, self._most)
        if self.work.surplus or self._ends is not None:
            engine.halt(empty(), np.zeros(engine.parts * rows, bool))
        if self.refills and not engine.by_row:
            engine.move(empty(), first=1)
        if (rows, longer := self._after(self.lengths, length)) in self._pairs and longer != length:
            engine.move(empty(), length=longer)
        if ((fewer := self._after(self.rows, rows)), length) in self._pairs and fewer != rows:
            engine.move(empty(), *self._kept(rows, fewer))

    def _warm_entries(self, params: Weights) -> None:
        state = self.engine.empty(self.size(self.rows[0], self.lengths[0]))
        beginnings, blocks = self.beginnings, None
        if beginnings.active:
            blocks = self.engine.chunks.empty(beginnings.count)
        for new in (0, *beginnings.new):
            for each in self._entries(new):
                blank = self._blank([[] for _ in range(self.engine.parts)], each, new)
                for flat in self._rooms(each, new):
                    entry = dataclasses.replace(blank, flat=flat)
                    state = self._share(state)
                    state, _ = self.engine.admit(
                        self.sampling, params, state, entry, blocks if new else None
                    )

    @staticmethod
    def _after(numbers: Sequence[int], number: int) -> int:
        """The next one, or the last again."""
        return numbers[min(numbers.index(number) + 1, len(numbers) - 1)]

    def _entries(self, new: int = 0) -> list[int]:
        """Groups of a part that may enter together, growing; ``new``: as of ``Beginnings``."""
        beginnings = self.beginnings
        if new:
            return sorted({1, self.entering})
        if not beginnings.whole:
            return []
        whole = not self.refills and self.entering == self.groups and self.work.begun is None
        if beginnings.in_chunks or whole:
            return [self.entering]
        powers = {min(1 << i, self.entering) for i in range(self.entering.bit_length() + 1)}
        return sorted(powers)

    def _rooms(self, each: int, new: int = 0) -> tuple[int, ...]:
        """Rooms for tokens of so many prompts that are read without padding, growing; 0, the last:
        with it. ``new``: as of ``Beginnings``."""
        columns = each * (new or self.work.prompts.shape[1])
        padded = self.work.mask.all() or self._width or not self.engine.reads_flat
        return (0,) if padded or columns < FLAT else (*rooms(columns), 0)

    def _blank(self, taken: list[list[int]], each: int, new: int) -> Admission:
        """Prompts that enter, by part, and rows for nobody yet."""
        parts, samples = self.engine.parts, self.work.samples
        prompts, mask, known = self.beginnings.entering(taken, each, new)
        total = int(mask.reshape(parts, -1).sum(axis=1).max())
        flat = next(room for room in self._rooms(each, new) if not room or total <= room)
        rows = parts * each * samples
        return Admission(
            prompts,
            mask,
            np.full(parts * each, self.groups, np.int32),
            np.full(rows, self.rows[0], np.int32),
            np.zeros((rows, self.work.keys.shape[1]), np.uint32),
            np.ones(rows, np.int32),
            known=known,
            text=self._texts(rows),
            most=np.ones(rows, np.int32),
            begun=self._left_off(rows),
            flat=flat,
        )

    def _left_off(self, rows: int) -> Begun | None:
        """Room for what there is of so many responses."""
        if not self._width:
            return None
        return Begun(np.zeros((rows, self._width), np.int32), np.ones(rows, np.int32))

    @property
    def _most(self) -> int:
        """Tokens that a row draws in a dispatch at most."""
        return STEPS + self.engine.lookup

    def _texts(self, rows: int) -> np.ndarray | None:
        """Room for the texts of so many rows, where guesses are looked up in them."""
        room = self.work.prompts.shape[1] + self.work.limit
        return np.zeros((rows, room), np.int32) if self.engine.lookup else None

    # Running

    def run(self, params: Weights) -> Iterator[Told]:
        """Draw everything; says after each dispatch what it drew."""
        state = self.engine.empty(self.size(self.rows[0], self._length), self._column)
        self.beginnings.begin(params)
        state, entered = self._fill(params, state)
        yield from entered
        state = self._give_up(state)
        while self._done.all() and self.beginnings.left:  # all gave up with their first token
            state, entered = self._fill(params, state)
            yield from entered
            state = self._give_up(state)
        while not self._done.all():
            state = self._make_room(self._shrink(state))
            room = self._length - self._column - self.engine.spare
            steps = STEPS if self.engine.by_row else min(STEPS, room)
            fewer = self._fewer()
            until = fewer if self._most_live() > fewer else 0
            given = self.sampling, params, state, steps, self._most, None, until
            state, drawn = self.engine.decode(*given)
            self._decoding = True
            self._column += drawn.steps
            self._done = drawn.done.reshape(self._done.shape).copy()
            yield self._note(self._row.ravel().copy(), drawn, drawn.steps)
            state = self._give_up(state)
            state, entered = self._fill(params, state)
            yield from entered

    def _note(self, sequences: np.ndarray, drawn: Drawn, steps: int) -> Told:
        """Who drew what in a dispatch.

        Args:
          sequences: int [rows], of the tables' rows.
          drawn: the tables.
          steps: that all slots took.
        """
        drawn, over = self._cut_off(sequences, drawn)
        there = sequences != NOBODY
        before = np.where(there, self._drawn[sequences], 0)
        count = np.where(there, drawn.mask.sum(axis=1), 0)
        np.add.at(self._drawn, sequences[there], count[there])
        ended = (drawn.done & (count > 0)) | over
        if self.work.end < self.work.limit:  # who has all its tokens but not a last one is left off
            last = drawn.tokens[np.arange(there.size), np.maximum(_last(drawn.mask), 0)]
            left_off = np.where(there, self._drawn[sequences], 0) == self.work.end
            ended &= ~left_off | np.isin(last, self.sampling.stop) | over
        np.add.at(self._ended, sequences[ended] // self.work.samples, 1)
        self.counts.dispatches += 1
        self.counts.tokens += int(count.sum())
        self.counts.computed += steps * drawn.done.size
        return Told(sequences, before, ended, drawn)

    def _cut_off(self, sequences: np.ndarray, drawn: Drawn) -> tuple[Drawn, np.ndarray]:
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

    def _give_up(self, state: State) -> State:
        """Draw no more of samples that nobody will keep, or whose text has ended."""
        if not self.work.surplus and not self._cut.any():
            return state
        enough = self._cut[self._row]
        if self.work.surplus:
            enough |= self._ended[self._row // self.work.samples] >= self.work.kept
        surplus = enough & (self._row != NOBODY) & ~self._done
        if surplus.any():
            state = self.engine.halt(state, surplus.ravel())
            self._done |= surplus
        return state

    # Entering

    def _fill(self, params: Weights, state: State) -> tuple[State, list[Told]]:
        """Let in all who can be, and read some of who comes next while others are decoded."""
        told = []
        chunks = min(1 + self._most_free(), AT_ONCE)
        while self.beginnings.left:
            state, entered = self._enter(params, state)
            if entered is not None:
                told.append(entered)
                continue
            # Slots are free and nobody decodes: then chunks are all that there is to do.
            idle = self._most_free() and (self._done.all() or not self._decoding)
            if not (idle or chunks) or not self.beginnings.read(params):
                break
            chunks = max(chunks - 1, 0)
        if not self.beginnings.left:
            self.beginnings.end()
        return state, told

    def _most_free(self) -> int:
        """Free groups of the part that has most of them."""
        return max(int(self._free(part).sum()) for part in range(self.engine.parts))

    def _enter(self, params: Weights, state: State) -> tuple[State, Told | None]:
        """Let in who waits, as far as there are free groups; None: nobody can enter."""
        parts, samples = self.engine.parts, self.work.samples
        beginnings = self.beginnings
        free = [np.flatnonzero(self._free(part)) for part in range(parts)]
        most = min(max(len(f) for f in free), -(-beginnings.left // parts), self.entering)
        turns = [(i, part) for i in range(most) for part in range(parts)]
        if not self._decoding:  # in order, part by part
            turns.sort(key=lambda turn: turn[1])
        taken: list[list[int]] = [[] for _ in range(parts)]
        for i, part in turns:
            if i < len(free[part]):
                number = beginnings.take(part, self._decoding)
                taken[part] += [] if number == NOBODY else [number]
        if not any(taken):
            return state, None
        # In few sizes, so that few programs are needed.
        new = beginnings.columns_for(taken)
        each = next(n for n in self._entries(new) if n >= max(map(len, taken)))
        entry = self._blank(taken, each, new)
        cut = (parts, each, samples)
        groups, rows, limit = (
            entry.groups.reshape(cut[:2]), entry.rows.reshape(cut), entry.limit.reshape(cut)
        )  # fmt: skip
        keys = entry.keys.reshape(*cut, -1)
        entered = np.full(rows.shape, NOBODY)
        for part, numbers in enumerate(taken):
            for i, number in enumerate(numbers):
                group = int(free[part][i])
                ids = number * samples + np.arange(samples)
                live = self._live[ids]  # others of its samples have ended
                open_rows = self._open(part, group)
                groups[part, i], rows[part, i] = group, np.where(live, open_rows, self.rows[0])
                self._begin(entry, (part * each + i) * samples, ids)
                keys[part, i], limit[part, i] = self.work.keys[ids], self.work.end
                entered[part, i] = np.where(live, ids, NOBODY)
                self._group[part, group] = number
                self._row[part, open_rows] = entered[part, i]
                self._done[part, open_rows] = ~live
                self._start[part, open_rows] = self._column - self._before
        state = self._share(state)
        blocks = beginnings.blocks if new else None
        state, drawn = self.engine.admit(self.sampling, params, state, entry, blocks)
        ended, there = drawn.done.reshape(rows.shape), entered != NOBODY
        for part, i in zip(*np.nonzero(there.any(axis=2)), strict=True):
            own = there[part, i]
            self._done[part, rows[part, i, own]] = ended[part, i, own]
        return state, self._note(entered.ravel(), drawn, 0)

    def _begin(self, new: Admission, first: int, ids: np.ndarray) -> None:
        """Put down what there is of these sequences, in entries from ``first`` on."""
        work, own = self.work, slice(first, first + ids.size)
        number = ids[0] // work.samples
        assert new.most is not None
        new.most[own] = work.limit
        if work.begun is not None and new.begun is not None:
            new.begun.tokens[own, : self._before] = work.begun.responses[ids, : self._before]
            new.begun.count[own] = self._before
        if new.text is not None:
            prompt = work.prompts[number][work.mask[number]]
            new.text[own, : prompt.size] = prompt
            if work.begun is not None:
                there = slice(prompt.size, prompt.size + self._before)
                new.text[own, there] = work.begun.responses[ids, : self._before]

    def _free(self, part: int) -> np.ndarray:
        """bool [groups]: whether all sequences of its prompt have ended, or it has none."""
        busy = np.zeros(self._group.shape[1], bool)
        live = self._row[part][~self._done[part]]
        for number in set((live // self.work.samples).tolist()):
            busy[np.flatnonzero(self._group[part] == number)] = True
        return ~busy

    def _open(self, part: int, group: int) -> np.ndarray:
        """Rows for a group's samples."""
        samples = self.work.samples
        if samples == 1 or self.engine.by_kernel:
            return group * samples + np.arange(samples)
        return np.flatnonzero(self._done[part])[:samples]

    def _share(self, state: State) -> State:
        parts, count = self._row.shape
        if self.engine.by_kernel or not self._shared(count):
            return self.engine.share(state, None, None)
        groups, samples = self._group.shape[1], self.work.samples
        members = np.full((parts, groups, samples), count, np.int32)
        where = self._where()
        for part, row in zip(*np.nonzero(~self._done), strict=True):
            group, sample = where[part, row], int(self._row[part, row]) % samples
            members[part, group, sample] = row
            where[part, row] = group * samples + sample
        return self.engine.share(state, members.reshape(-1, samples), where.ravel())

    def _where(self) -> np.ndarray:
        """int32 [parts, rows]: the group that each row's prompt is in; 0 where it is done."""
        made = np.zeros(self._row.shape, np.int32)
        for part, row in zip(*np.nonzero(~self._done), strict=True):
            number = self._row[part, row] // self.work.samples
            made[part, row] = np.flatnonzero(self._group[part] == number)[0]
        return made

    # Making room

    def _fewer(self) -> int:
        """Rows of a part that the state may have once so many are left; 0: it stays as it is."""
        rows = self._row.shape[1]
        fewer = self._after(self.rows, rows)
        if self.beginnings.left or fewer == rows or (fewer, self._length) not in self._pairs:
            return 0
        return fewer

    def _most_live(self) -> int:
        """Rows that are not done, of the part that has most of them."""
        return int((~self._done).sum(axis=1).max())

    def _shrink(self, state: State) -> State:
        """Leave rows behind that have ended, once nobody waits for them."""
        while True:
            fewer = self._fewer()
            if not fewer or self._most_live() > fewer:
                return state
            moved_rows, moved_groups = self._kept(self._row.shape[1], fewer)
            state = self.engine.move(state, moved_rows, moved_groups)
            self._take(moved_rows, moved_groups)
            state = self._share(state)

    def _kept(self, rows: int, fewer: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Numbers of the rows and groups that stay: those that live, then any."""
        parts = self.engine.parts
        done = self._done
        if done.shape[1] != rows or done.all():  # of a state that is only compiled for
            done = np.ones((parts, rows), bool)
        chosen = np.argsort(done, axis=1, kind="stable")[:, :fewer].astype(np.int32)
        chosen.sort(axis=1)
        if not self._shared(rows):
            return chosen.ravel(), chosen.ravel()
        if not self._shared(fewer):  # each takes its prompt along
            where = self._where() if done is self._done else np.zeros((parts, rows), np.int32)
            return chosen.ravel(), np.take_along_axis(where, chosen, axis=1).ravel()
        return chosen.ravel(), None

    def _take(self, rows: np.ndarray, groups: np.ndarray | None) -> None:
        def of(table: np.ndarray, index: np.ndarray) -> np.ndarray:
            return np.take_along_axis(table, index.reshape(table.shape[0], -1), axis=1)

        self._row, self._done, self._start = (
            of(table, rows) for table in (self._row, self._done, self._start)
        )
        if groups is not None:
            self._group = of(self._group, groups)

    def _make_room(self, state: State) -> State:
        """A column at least for the next token, and no columns that nobody sees."""
        if self.engine.by_row:
            return self._make_room_by_row(state)
        if self._column + self.engine.spare < self._length:
            return state
        first = int(self._start[~self._done].min())
        span = self._column - first
        longer = self._after(self.lengths, self._length)
        if span > self._length - STEPS and longer != self._length:
            self._length = longer
            return self.engine.move(state, length=longer)
        self._column, self._start = span, self._start - first
        return self.engine.move(state, first=first)

    def _make_room_by_row(self, state: State) -> State:
        """Columns for what the row that has most may draw and guess at once."""
        most = int(self._drawn[self._row[~self._done]].max()) - 1
        while most + self.engine.lookup >= self._length and not self.engine.by_kernel:
            self._length = self._after(self.lengths, self._length)
            state = self.engine.move(state, length=self._length)
        return state
