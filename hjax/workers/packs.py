"""Which rows of a batch share a pack: first-fit decreasing, in plain Python and NumPy on the host.

Every process of a world makes the same packs of the same lengths. Shapes are few: where a run asks
for packs, the numbers of packs, of slots and of answers are rounded up, so that lengths that vary
from step to step compile few programs; where each batch chooses (``hjax.workers.packer``), packs
have one shape.
"""

import math
from typing import NamedTuple

import numpy as np

from hjax.models.sequence_packing import Packing


class PackShape(NamedTuple):
    """Of a packing.

    Attributes:
      passes: of a data-parallel part, each a cell.
      height: packs of a cell.
      capacity: places of a pack.
      slots: rows that a cell has room for.
      answers: response tokens of a cell, by pack.
    """

    passes: int
    height: int
    capacity: int
    slots: int
    answers: int


class PackedGroup(NamedTuple):
    """Rows that answer one prompt, which stands before them once."""

    rows: tuple[int, ...]
    places: int


def first_fit(
    prompts: np.ndarray,
    responses: np.ndarray,
    share: int,
    capacity: int,
    unit: int = 1,
    answers: int = 0,
    rows_of_pack: int = 0,
) -> list[list[PackedGroup]]:
    """Packs of rows: the longest first, each where it fits first.

    A row goes into the first pack that has its prompt and room for its response, else into the
    first with room for both. Without shared prompts that is first-fit decreasing, which takes at
    most 11/9 of the fewest packs and 6/9 of one (Dosa 2007). Rows of a unit go into one pack, as
    one row of their places would.

    Args:
      prompts, responses: int [rows], tokens. A response's last token takes no place, and rows
        without a response are in no pack.
      share: consecutive rows that answer one prompt: 1, or a multiple of the unit.
      capacity: places of a pack.
      unit: consecutive rows that are never in different packs.
      answers: most response tokens of a pack; 0: any.
      rows_of_pack: most rows of a pack; 0: any.

    Raises:
      AssertionError: a row or unit that is longer than a pack, or a response to no prompt.
    """
    if share > 1 and share % unit:
        raise AssertionError(f"units of {unit} rows, {share} of which share a prompt")
    own = np.maximum(responses - 1, 0)
    units = [
        rows
        for first in range(0, len(responses), unit)
        if (rows := [r for r in range(first, min(first + unit, len(responses))) if responses[r]])
    ]

    def before(rows: list[int]) -> int:
        """Places of the prompts of a unit's rows, each prompt counted once."""
        return int(sum(prompts[row] for row in {row // share: row for row in rows}.values()))

    for rows in units:
        if not all(prompts[rows]) or before(rows) + own[rows].sum() > capacity:
            after = own[rows].sum()
            raise AssertionError(f"{before(rows)} + {after} places in packs of {capacity}")
    limits = capacity, answers or responses.sum(), rows_of_pack or unit * len(units)
    free = np.tile(limits, (len(units), 1))
    packs: list[dict[int, list[int]]] = []  # rows by group
    standing: dict[int, list[int]] = {}  # packs that have a group's prompt
    for rows in sorted(units, key=lambda rows: -(before(rows) + own[rows].sum())):
        # The rows of a unit are of one group, or each is one of its own, which stands nowhere yet.
        taken = np.array([own[rows].sum(), responses[rows].sum(), unit])
        ready = standing.get(rows[0] // share, ())
        at = next((pack for pack in ready if (free[pack] >= taken).all()), None)
        if at is None:
            taken[0] += before(rows)
            at = int(np.argmax((free >= taken).all(axis=1)))
            if at == len(packs):
                packs.append({})
            standing.setdefault(rows[0] // share, []).append(at)
        for row in rows:
            packs[at].setdefault(row // share, []).append(row)
        free[at] -= taken
    return [
        [
            PackedGroup(tuple(sorted(held)), int(prompts[held[0]] + own[held].sum()))
            for held in pack.values()
        ]
        for pack in packs
    ]


def make_packing(
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: tuple[int, int],
    share: int,
    capacity: int,
    parts: int,
    per_pass: int = 0,
    unit: int = 1,
) -> Packing:
    """Packs of a batch of rows [prompt padded on the left | response padded on the right].

    Args:
      prompts, responses: int [rows], tokens.
      widths: of the batch's prompts and responses, padding included.
      share: consecutive rows that answer one prompt and are to share it; 1: none do.
      capacity: places of a pack.
      parts: data-parallel parts.
      per_pass: packs of a part in one pass; 0: all.
      unit: consecutive rows that stay together, in one pack and in slots that follow each other.

    Raises:
      AssertionError: as of ``first_fit``.
    """
    packs = first_fit(prompts, responses, share, capacity, unit)
    each = max(-(-len(packs) // parts), 1)
    passes, height = 1, rounded(each)
    if per_pass and each > per_pass:
        passes, height = rounded(-(-each // per_pass)), per_pass
    elif per_pass:
        height = min(height, per_pass)
    cells = _dealt(packs, parts * passes)
    slots = _slots(cells, len(responses), unit)
    size = _roomy(max(map(len, slots)), len(prompts), len(cells), unit)
    most = max(sum(int(responses[row]) for row in rows) for rows in slots)
    step = max(capacity // 4, 1)
    width = max(-(-most // (height * step)), 1) * step
    shape = PackShape(passes, height, capacity, size, width)
    return _written(cells, slots, prompts, responses, widths, share, shape)


def fill(
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: tuple[int, int],
    share: int,
    shape: PackShape,
    parts: int,
    unit: int = 1,
) -> Packing | None:
    """Packs of one shape, their passes counted; None: the rows do not go into it.

    Args:
      prompts, responses, widths, share, unit: as of ``make_packing``.
      shape: of a part's packs.
      parts: data-parallel parts.
    """
    first = prompts[::share] if len(prompts) % share == 0 else prompts
    tokens = first.sum() + np.maximum(responses - 1, 0).sum()
    room = parts * shape.passes * shape.height * shape.capacity
    if tokens > room or not prompts[responses > 0].all():
        return None
    packs = first_fit(
        prompts,
        responses,
        share=share,
        capacity=shape.capacity,
        unit=unit,
        answers=shape.answers,
        rows_of_pack=shape.slots // shape.height,
    )
    passes = max(-(-len(packs) // (parts * shape.height)), 1)
    if passes > shape.passes:
        return None
    dealt = _dealt(packs, parts * passes)
    rows = _slots(dealt, len(responses), unit)
    if max(map(len, rows)) > shape.slots:
        return None
    cells: list[list[list[PackedGroup]]] = [[] for _ in range(parts * shape.passes)]
    slots: list[list[int]] = [[] for _ in cells]
    for number, cell in enumerate(first_cells(passes, parts, shape.passes)):
        cells[cell], slots[cell] = dealt[number], rows[number]
    packing = _written(cells, slots, prompts, responses, widths, share, shape)
    return packing._replace(passes=np.asarray(passes, np.int32))


def first_cells(passes: int, parts: int, of: int) -> np.ndarray:
    """The cells of the first passes, of all parts that have so many each."""
    return (np.arange(parts)[:, None] * of + np.arange(passes)).reshape(-1)


def _written(
    cells: list[list[list[PackedGroup]]],
    slots: list[list[int]],
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: tuple[int, int],
    share: int,
    shape: PackShape,
) -> Packing:
    """The packing of packs and rows by cell; the rest as of ``make_packing``."""
    rows, tokens = len(prompts), sum(widths)
    count, size, height, width = len(cells), shape.slots, shape.height, shape.answers
    filled = height, shape.capacity
    packing = Packing(
        order=np.full((count, size), rows, np.int32),
        source=np.full((count, *filled), size * tokens, np.int32),
        positions=np.zeros((count, *filled), np.int32),
        segments=np.zeros((count, *filled), np.int32),
        prompts=np.zeros((count, *filled), np.int32) if share > 1 else None,
        states=np.full((count, height, width), math.prod(filled), np.int32),
        targets=np.full((count, height, width), size * tokens, np.int32),
        back=np.full((count, size, widths[1]), height * width, np.int32),
    )
    for cell, own in enumerate(slots):
        packing.order[cell, : len(own)] = own
        writer = _Writer(Packing(*(x if x is None else x[cell] for x in packing)), widths)
        slot_of = {row: slot for slot, row in enumerate(own)}
        for pack, held in enumerate(cells[cell]):
            for piece in held:
                counts = [int(responses[row]) for row in piece.rows]
                in_slots = [slot_of[row] for row in piece.rows]
                writer.write(pack, in_slots, int(prompts[piece.rows[0]]), counts)
    return packing


def rounded(count: int) -> int:
    """The next number with at most four leading bits: at most an eighth more."""
    step = 1 << max((count - 1).bit_length() - 4, 0)
    return -(-count // step) * step


def _roomy(slots: int, rows: int, cells: int, unit: int) -> int:
    """Slots that hold so many rows also when they are dealt out a little otherwise; of units."""
    if cells == 1:
        return rows
    room = -(-5 * rows // (4 * cells))
    room += -room % unit
    while room < slots:
        room *= 2
    return room


def _dealt(packs: list[list[PackedGroup]], cells: int) -> list[list[list[PackedGroup]]]:
    """Packs by cell, the fullest first, back and forth, so that all cells get about as much."""
    dealt: list[list[list[PackedGroup]]] = [[] for _ in range(cells)]
    fullest = sorted(packs, key=lambda pack: -sum(piece.places for piece in pack))
    for number, pack in enumerate(fullest):
        turn, cell = divmod(number, cells)
        dealt[cell if turn % 2 == 0 else cells - 1 - cell].append(pack)
    return dealt


def _slots(cells: list[list[list[PackedGroup]]], rows: int, unit: int) -> list[list[int]]:
    """Rows by cell, in the order of its packs; those without a response beside the rest of their
    unit, or where there is room."""
    of_cells = [
        dict.fromkeys(row // unit for pack in cell for piece in pack for row in piece.rows)
        for cell in cells
    ]
    slots = [
        [row for one in units for row in range(one * unit, min((one + 1) * unit, rows))]
        for units in of_cells
    ]
    for row in sorted(set(range(rows)).difference(*slots)):
        if row % unit == 0:
            min(slots, key=len).extend(range(row, min(row + unit, rows)))
    return slots


class _Writer:
    """Writes one cell's packs, from their first place on.

    Args:
      cell: the cell's arrays.
      widths: of the batch's prompts and responses.
    """

    def __init__(self, cell: Packing, widths: tuple[int, int]):
        self._cell, self._widths = cell, widths
        self._states, self._targets = cell.states.reshape(-1), cell.targets.reshape(-1)
        self._answered = 0
        self._place, self._number = [0] * len(cell.source), [0] * len(cell.source)

    def write(self, pack: int, slots: list[int], prompt: int, responses: list[int]) -> None:
        """A prompt of so many tokens and its responses, each in its slot."""
        cell, (prompt_width, width) = self._cell, self._widths
        row = prompt_width + width
        before = pack * cell.source.shape[1]
        self._number[pack] += 1
        of_prompt = self._number[pack]
        self._put(pack, slots[0] * row + prompt_width - prompt, 0, prompt, of_prompt)
        last = before + self._place[pack] - 1
        for slot, count in zip(slots, responses, strict=True):
            if cell.prompts is not None:
                self._number[pack] += 1
            first = slot * row + prompt_width
            own = np.arange(count)
            at = slice(self._answered, self._answered + count)
            self._states[at] = np.append(last, before + self._place[pack] + own[:-1])
            self._targets[at] = first + own
            cell.back[slot, :count] = self._answered + own
            self._answered += count
            self._put(pack, first, prompt, count - 1, of_prompt)

    def _put(self, pack: int, token: int, position: int, count: int, of_prompt: int) -> None:
        """Consecutive tokens from one on, at the pack's next places."""
        at = slice(self._place[pack], self._place[pack] + count)
        self._place[pack] += count
        cell = self._cell
        cell.source[pack, at] = token + np.arange(count)
        cell.positions[pack, at] = position + np.arange(count)
        cell.segments[pack, at] = self._number[pack]
        if cell.prompts is not None:
            cell.prompts[pack, at] = of_prompt
