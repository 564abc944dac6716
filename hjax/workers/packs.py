"""Bin packing of rows into packs: first-fit decreasing, in plain Python and NumPy on the host.

Every process makes the same packs from the same lengths. Shapes are few, so that varying lengths
compile few programs: with a fixed capacity the numbers of packs, slots and response tokens are
rounded up; where batches choose (``hjax.workers.packer``) there is one shape.
"""

import math
from typing import NamedTuple

import numpy as np

from hjax.models.sequence_packing import Packing


class PackShape(NamedTuple):
    """The shape of a packing. A cell is one pass of one data-parallel part.

    Attributes:
      passes: cells of a data-parallel part.
      height: packs of a cell.
      capacity: places of a pack.
      slots: most rows of a cell.
      answers: response tokens of a cell, over all its packs.
    """

    passes: int
    height: int
    capacity: int
    slots: int
    answers: int


class PackedGroup(NamedTuple):
    """Rows in one pack that share a prompt, which stands before them once."""

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
    """Pack rows, the longest first, each into the first pack with room.

    A row prefers packs that hold its prompt already. Without shared prompts this is first-fit
    decreasing, which needs at most 11/9 of the fewest packs and 6/9 of one (Dosa 2007). Rows of a
    unit go into one pack, like one row of their total length.

    Args:
      prompts, responses: int [rows], tokens. A response's last token takes no place, and rows
        without a response are in no pack.
      share: consecutive rows that answer one prompt: 1, or a multiple of the unit.
      capacity: places of a pack.
      unit: consecutive rows that are never in different packs.
      answers: most response tokens of a pack; 0: any.
      rows_of_pack: most rows of a pack; 0: any.

    Raises:
      AssertionError: a row or unit longer than a pack, or a response without a prompt.
    """
    if share > 1 and share % unit:
        raise AssertionError(f"units of {unit} rows, {share} of which share a prompt")
    own = np.maximum(responses - 1, 0)
    units = _places_of_units(prompts, responses, share, capacity, unit)
    limits = capacity, answers or responses.sum(), rows_of_pack or unit * len(units)
    free = np.tile(limits, (len(units), 1))
    packs: list[dict[int, list[int]]] = []  # rows by group
    packs_with_prompt: dict[int, list[int]] = {}  # by group
    for rows, before, after in sorted(units, key=lambda sized: -(sized[1] + sized[2])):
        # A unit's rows are one group, or each its own group, whose prompt is in no pack yet.
        needed = np.array([after, responses[rows].sum(), unit])
        ready = packs_with_prompt.get(rows[0] // share, ())
        at = next((pack for pack in ready if (free[pack] >= needed).all()), None)
        if at is None:
            needed[0] += before
            at = int(np.argmax((free >= needed).all(axis=1)))
            if at == len(packs):
                packs.append({})
            packs_with_prompt.setdefault(rows[0] // share, []).append(at)
        for row in rows:
            packs[at].setdefault(row // share, []).append(row)
        free[at] -= needed
    return [
        [
            PackedGroup(tuple(sorted(held)), int(prompts[held[0]] + own[held].sum()))
            for held in pack.values()
        ]
        for pack in packs
    ]


def _places_of_units(
    prompts: np.ndarray, responses: np.ndarray, share: int, capacity: int, unit: int
) -> list[tuple[list[int], int, int]]:
    """(rows, places of their prompts, of their responses) of each unit with responses; a prompt
    counts once."""
    found = []
    for first in range(0, len(responses), unit):
        rows = [r for r in range(first, min(first + unit, len(responses))) if responses[r]]
        if not rows:
            continue
        before = int(sum(prompts[row] for row in {row // share: row for row in rows}.values()))
        after = int(np.maximum(responses[rows] - 1, 0).sum())
        if not all(prompts[rows]) or before + after > capacity:
            raise AssertionError(f"{before} + {after} places in packs of {capacity}")
        found.append((rows, before, after))
    return found


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
      widths: padded lengths of the batch's prompts and responses.
      share: consecutive rows that share one prompt; 1: none do.
      capacity: places of a pack.
      parts: data-parallel parts.
      per_pass: packs of a part in one pass; 0: all.
      unit: consecutive rows that stay together, in one pack and in consecutive slots.

    Raises:
      AssertionError: as of ``first_fit``.
    """
    packs = first_fit(prompts, responses, share, capacity, unit)
    each = max(-(-len(packs) // parts), 1)
    passes, height = 1, round_up(each)
    if per_pass and each > per_pass:
        passes, height = round_up(-(-each // per_pass)), per_pass
    elif per_pass:
        height = min(height, per_pass)
    cells = _distribute(packs, parts * passes)
    slots = _rows_by_cell(cells, len(responses), unit)
    size = _slots_per_cell(max(map(len, slots)), len(prompts), len(cells), unit)
    most = max(sum(int(responses[row]) for row in rows) for rows in slots)
    step = max(capacity // 4, 1)
    width = max(-(-most // (height * step)), 1) * step
    shape = PackShape(passes, height, capacity, size, width)
    return _build_packing(cells, slots, prompts, responses, widths, share, shape)


def fill_shape(
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: tuple[int, int],
    share: int,
    shape: PackShape,
    parts: int,
    unit: int = 1,
) -> Packing | None:
    """Packs of the given shape, with the number of passes used; None: the rows do not fit.

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
    dealt = _distribute(packs, parts * passes)
    rows = _rows_by_cell(dealt, len(responses), unit)
    if max(map(len, rows)) > shape.slots:
        return None
    cells: list[list[list[PackedGroup]]] = [[] for _ in range(parts * shape.passes)]
    slots: list[list[int]] = [[] for _ in cells]
    for number, cell in enumerate(filled_cells(passes, parts, shape.passes)):
        cells[cell], slots[cell] = dealt[number], rows[number]
    packing = _build_packing(cells, slots, prompts, responses, widths, share, shape)
    return packing._replace(passes=np.asarray(passes, np.int32))


def filled_cells(passes: int, parts: int, of: int) -> np.ndarray:
    """Indices of the cells of the first ``passes`` passes of all parts; ``of``: passes per part."""
    return (np.arange(parts)[:, None] * of + np.arange(passes)).reshape(-1)


def _build_packing(
    cells: list[list[list[PackedGroup]]],
    slots: list[list[int]],
    prompts: np.ndarray,
    responses: np.ndarray,
    widths: tuple[int, int],
    share: int,
    shape: PackShape,
) -> Packing:
    """The arrays of a packing from packs and rows by cell; the rest as of ``make_packing``."""
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


def round_up(count: int) -> int:
    """The next number with at most four leading bits: at most an eighth more."""
    step = 1 << max((count - 1).bit_length() - 4, 0)
    return -(-count // step) * step


def _slots_per_cell(slots: int, rows: int, cells: int, unit: int) -> int:
    """Slots per cell with a margin for an uneven split of the rows; a multiple of ``unit``."""
    if cells == 1:
        return rows
    room = -(-5 * rows // (4 * cells))
    room += -room % unit
    while room < slots:
        room *= 2
    return room


def _distribute(packs: list[list[PackedGroup]], cells: int) -> list[list[list[PackedGroup]]]:
    """Packs by cell, the fullest first, back and forth, so that cells are filled about evenly."""
    dealt: list[list[list[PackedGroup]]] = [[] for _ in range(cells)]
    fullest = sorted(packs, key=lambda pack: -sum(piece.places for piece in pack))
    for number, pack in enumerate(fullest):
        sweep, cell = divmod(number, cells)
        dealt[cell if sweep % 2 == 0 else cells - 1 - cell].append(pack)
    return dealt


def _rows_by_cell(cells: list[list[list[PackedGroup]]], rows: int, unit: int) -> list[list[int]]:
    """Rows by cell, in the order of its packs. Rows without a response go to their unit's cell, or
    to the emptiest."""
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
    """Writes one cell's packs, from the first place on.

    Args:
      cell: the cell's arrays.
      widths: padded lengths of the batch's prompts and responses.
    """

    def __init__(self, cell: Packing, widths: tuple[int, int]):
        self._cell, self._widths = cell, widths
        self._states, self._targets = cell.states.reshape(-1), cell.targets.reshape(-1)
        self._answered = 0
        self._place, self._number = [0] * len(cell.source), [0] * len(cell.source)

    def write(self, pack: int, slots: list[int], prompt: int, responses: list[int]) -> None:
        """Write a prompt of so many tokens and its responses, each with its slot."""
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
        """Write ``count`` consecutive tokens, the first being ``token``, at the pack's next
        places."""
        at = slice(self._place[pack], self._place[pack] + count)
        self._place[pack] += count
        cell = self._cell
        cell.source[pack, at] = token + np.arange(count)
        cell.positions[pack, at] = position + np.arange(count)
        cell.segments[pack, at] = self._number[pack]
        if cell.prompts is not None:
            cell.prompts[pack, at] = of_prompt
