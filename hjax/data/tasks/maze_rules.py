"""Rules of mazes: their text, moves and distances."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from hjax.errors import DataError, short_repr

# Direction of each action: rows down, columns to the right.
MOVES = {"N": (-1, 0), "E": (0, 1), "S": (1, 0), "W": (0, -1)}
LARGEST = 10  # rows and columns, so that a digit numbers each
Cell = tuple[int, int]


def check_maze(maze: Any) -> list[str]:
    """The rows of a maze's text.

    Raises:
      DataError: it is no maze.
    """
    rows = maze.split("\n") if isinstance(maze, str) else []
    sound = 0 < len(rows) <= LARGEST and all(0 < len(r) == len(rows[0]) <= LARGEST for r in rows)
    if not sound or set(maze) - set("#.@G\n") or maze.count("@") != 1 or maze.count("G") != 1:
        raise DataError(
            f"maze is {short_repr(maze, 80)}; it must be lines of equal length of #, ., one @ and "
            f"one G, at most {LARGEST} by {LARGEST}"
        )
    return rows


def find_cell(rows: Sequence[str], character: str) -> Cell:
    """Row and column of the first cell that holds the character."""
    row = next(i for i, line in enumerate(rows) if character in line)
    return row, rows[row].index(character)


def neighbor_cell(cell: Cell, move: Cell) -> Cell:
    """The cell that a move leads to."""
    return cell[0] + move[0], cell[1] + move[1]


def cell_at(rows: Sequence[str], cell: Cell) -> str:
    """What a cell holds; `#` beyond the edge."""
    row, column = cell
    inside = 0 <= row < len(rows) and 0 <= column < len(rows[row])
    return rows[row][column] if inside else "#"


def free_cells(rows: Sequence[str]) -> set[Cell]:
    """The cells that are no wall."""
    return {(i, j) for i, row in enumerate(rows) for j, c in enumerate(row) if c != "#"}


def distances_to(free: Collection[Cell], goal: Cell) -> dict[Cell, int]:
    """Moves from each cell to the goal, through free cells, where it can be reached."""
    found, queue = {goal: 0}, deque([goal])
    while queue:
        row, column = cell = queue.popleft()
        for down, right in MOVES.values():
            near = row + down, column + right
            if near in free and near not in found:
                found[near] = found[cell] + 1
                queue.append(near)
    return found
