"""Rules of Sokoban: levels, moves, solutions, and files of levels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hjax.data.tasks.maze_rules import Cell, cell_at, free_cells, neighbor_cell
from hjax.errors import DataError, short_repr
from hjax.user_input import read_text

# Direction of each action: rows down, columns to the right.
PUSHES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
# Rows and columns by number, one character each.
COORDINATES = "0123456789abcdefghijklmnopqrstuvwxyz"


class SokobanState(NamedTuple):
    """A level and where its player and boxes are.

    Attributes:
      rows: lines of `#` (wall), `.` (goal) and blanks (floor); beyond them is wall.
    """

    rows: tuple[str, ...]
    player: Cell
    boxes: frozenset[Cell]

    @property
    def boxes_on_goals(self) -> int:
        """Boxes that stand on goals."""
        return sum(cell_at(self.rows, box) == "." for box in self.boxes)

    @property
    def solved(self) -> bool:
        """Whether every box stands on a goal."""
        return self.boxes_on_goals == len(self.boxes)

    def after_move(self, action: str) -> SokobanState | None:
        """The state after U, D, L or R, pushing at most one box; None where that is not allowed."""
        move = PUSHES.get(action)
        if move is None:
            return None
        player = neighbor_cell(self.player, move)
        if cell_at(self.rows, player) == "#":
            return None
        if player not in self.boxes:
            return self._replace(player=player)
        box = neighbor_cell(player, move)
        if box in self.boxes or cell_at(self.rows, box) == "#":
            return None
        return self._replace(player=player, boxes=self.boxes - {player} | {box})

    def __str__(self) -> str:
        lines = [list(row) for row in self.rows]
        for (row, column), drawn in [(self.player, "@+"), *((box, "$*") for box in self.boxes)]:
            lines[row][column] = drawn[lines[row][column] == "."]
        return "\n".join(map("".join, lines))


def parse_level(level: Any) -> SokobanState:
    """The state that a level's text draws.

    Raises:
      DataError: it is no level, or it is solved.
    """
    rows = level.strip("\r\n").splitlines() if isinstance(level, str) else []
    cells = {(i, j): c for i, row in enumerate(rows) for j, c in enumerate(row)}
    players = [cell for cell, c in cells.items() if c in "@+"]
    boxes = frozenset(cell for cell, c in cells.items() if c in "$*")
    goals = sum(c in ".*+" for c in cells.values())
    wrong = sorted(set(cells.values()) - set("# @$.*+"))
    problem = ""
    if wrong:
        problem = f"it has {wrong[0]!r}; allowed are # @ $ . * + and blanks"
    elif len(players) != 1 or not boxes or len(boxes) != goals:
        problem = (
            f"players: {len(players)}, boxes: {len(boxes)}, goals: {goals}; it must have one "
            "player, and as many goals as boxes, at least one"
        )
    elif max(len(rows), *map(len, rows)) > len(COORDINATES):
        problem = f"it has more than {len(COORDINATES)} rows or columns"
    elif all(cells[box] == "*" for box in boxes):
        problem = "every box stands on a goal already"
    if problem:
        raise DataError(f"level is {short_repr(level, 80)}: {problem}")
    floors = str.maketrans("@$*+", "  ..")
    return SokobanState(tuple(row.translate(floors) for row in rows), players[0], boxes)


def positions_text(state: SokobanState) -> str:
    """Row and column of the player and of each box in their order: `23 34 45`."""
    cells = [state.player, *sorted(state.boxes)]
    return " ".join(COORDINATES[row] + COORDINATES[column] for row, column in cells)


def solve(state: SokobanState, limit: int = 200_000) -> str | None:
    """The actions of a shortest solution (breadth first); None if there is none.

    Args:
      limit: states looked at; None is returned for a level that needs more.
    """
    cells = free_cells(state.rows)
    goals = {cell for cell in cells if cell_at(state.rows, cell) == "."}
    start = state.player, state.boxes
    # For each state the one before it and the action between.
    before: dict[tuple[Cell, frozenset[Cell]], Any] = {start: None}
    queue = deque([start])
    while queue and len(before) <= limit:
        here = player, boxes = queue.popleft()
        if boxes <= goals:
            actions = []
            while (step := before[here]) is not None:
                here, action = step
                actions.append(action)
            return "".join(reversed(actions))
        for action, move in PUSHES.items():
            to, moved = neighbor_cell(player, move), boxes
            if to in boxes:
                box = neighbor_cell(to, move)
                if box in boxes or box not in cells:
                    continue
                moved = boxes - {to} | {box}
            if to in cells and (to, moved) not in before:
                before[to, moved] = here, action
                queue.append((to, moved))
    return None


def read_levels(path: str | Path) -> list[str]:
    """The levels of a text file, such as those of boxoban: each follows a line of `;` and a number.

    Raises:
      DataError: a level that is none, with the file and its number in the file, from 0; or there is
        none.
    """
    levels = list(_level_texts(read_text(Path(path)).splitlines()))
    for number, level in enumerate(levels):
        try:
            parse_level(level)
        except DataError as error:
            raise DataError(f"{path}: level {number}: {error}") from None
    if not levels:
        raise DataError(f"{path} has no levels; each is lines that begin with # after a blank line")
    return levels


def _level_texts(lines: Iterable[str]) -> Iterable[str]:
    level: list[str] = []
    for line in [*lines, ""]:
        if line.strip() and not line.startswith(";"):
            level.append(line)
        elif level:
            yield "\n".join(level)
            level = []
