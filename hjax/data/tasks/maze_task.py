"""Built-in task: walk through a maze, a move a turn."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.maze_rules import MOVES, Cell, distances_to, free_cells, neighbor_cell
from hjax.data.tasks.task import choice, option, register
from hjax.errors import ConfigError


@register
@dataclasses.dataclass(frozen=True)
class MazeTask(EnvironmentTask):
    """Walking from `@` to `G`, see `hjax.environments.maze.Maze`. The goal is far ahead of the
    moves that lead to it, and episodes of a maze meet in the same cells.

    The prompt is the maze and the position, such as "@.#\\n..G\\n#..\\n00"; with the view `walls`
    the environment shows less. Column: `maze`. Side 3 has some 2,000 mazes with distance=2. Turns:
    four per row.

    Options:
      side: rows and columns (3 to 10).
      distance: fewest moves from start to goal; they are at most three times the side.
      wall_share: share of the cells that are wall, on average (0.1 to 0.5).
      view: `map`, or `walls`, which shows only the four cells around.
      step_cost: taken from the reward of every turn.
      noise: share of the demonstrations' moves that are drawn from N, E, S and W.
      partial: not used.
    """

    name: ClassVar[str] = "maze"
    environment: ClassVar[str] = "hjax.environments.maze:Maze"

    side: int = option(5, 3, 10)
    distance: int = option(4, 1, 18)
    wall_share: float = option(0.3, 0.1, 0.5)
    view: str = choice("map", "walls")
    step_cost: float = option(0.0, 0.0, 1.0)

    turn_length = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance > (farthest := 2 * self.side - 2):
            raise ConfigError(
                f"task maze: option distance is {self.distance}; with side={self.side} it must be "
                f"at most {farthest}"
            )

    @property
    def alphabet(self) -> str:
        return "#.@G\n!NESW" + "0123456789"[: self.side]

    @property
    def size(self) -> int:
        return 2 ** (self.side**2 + 3)

    @property
    def max_turns(self) -> int:
        return 4 * self.side

    @property
    def observation_length(self) -> int:
        return 5 if self.view == "walls" else 3

    @property
    def settings(self) -> dict[str, Any]:
        return {"view": self.view, "step_cost": self.step_cost}

    def record(self, index: int) -> dict[str, Any] | None:
        rng, side = np.random.default_rng(index), self.side
        walls = (rng.random((side, side)) < self.wall_share).tolist()
        free = [(i, j) for i in range(side) for j in range(side) if not walls[i][j]]
        goal = _drawn(free, rng)
        if goal is None:
            return None
        moves = distances_to(set(free), goal)
        far = [cell for cell, n in moves.items() if self.distance <= n <= 3 * side]
        start = _drawn(far, rng)
        if start is None:
            return None
        lines = [[".#"[wall] for wall in line] for line in walls]
        for (row, column), character in ((start, "@"), (goal, "G")):
            lines[row][column] = character
        maze = "\n".join(map("".join, lines))
        return {"prompt": f"{maze}\n{start[0]}{start[1]}", "maze": maze} | self.settings

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> list[str]:
        moves = distances_to(free_cells(environment.rows), environment.goal)
        here = environment.position
        actions = []
        while moves[here]:
            nearer = moves[here] - 1
            good = [a for a, m in MOVES.items() if moves.get(neighbor_cell(here, m)) == nearer]
            actions.append(good[int(rng.integers(len(good)))])
            here = neighbor_cell(here, MOVES[actions[-1]])
        return actions

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        return list(MOVES)[int(rng.integers(len(MOVES)))]


def _drawn(cells: list[Cell], rng: np.random.Generator) -> Cell | None:
    return cells[int(rng.integers(len(cells)))] if cells else None
