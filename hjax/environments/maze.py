"""A text maze: walk to the goal, one move a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.data.tasks.maze_rules import MOVES, cell_at, check_maze, find_cell, neighbor_cell
from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.row_columns import number_column, one_of_column


class Maze(Environment):
    """Walks from `@` to `G` through free cells `.`; `#` and all beyond the edge is wall.

    The row's column ``maze`` is the maze as lines of equal length, at most 10 by 10. An action is
    one letter: N, E, S or W. A move that is none, or into a wall, changes nothing and is not valid.

    | `view` | first observation | observation after a move |
    |---|---|---|
    | `map` | the row's prompt if it is text, else the maze, a line break and the position | the \
position: digits of row and column, from 0 at the top left |
    | `walls` | as after a move | the four cells to N, E, S and W: `#`, `.` or `G` |

    After an action that is not valid `!` precedes the observation. Alphabet: ``#.@G!NESW``, the
    digits and the line break. Anchor: the maze without `@`, and the position.

    Columns that a row may lack: ``view``, `map` (else) or `walls`; ``step_cost`` (0), taken from
    the reward of every turn. Reaching the goal gives 1.0 and ends the episode.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        maze, prompt = task.get("maze"), task.get("prompt")
        self.rows = check_maze(maze)
        self.position = find_cell(self.rows, "@")
        self.goal = find_cell(self.rows, "G")
        self._view = one_of_column(task, "view", ("map", "walls"))
        self._step_cost = number_column(task, "step_cost")
        first = self._observe()
        if self._view == "walls":
            return first
        text = prompt if isinstance(prompt, str) else f"{maze}\n{first.text}"
        return Observation(text, anchor=first.anchor)

    def step(self, action: str) -> Step:
        move = MOVES.get(action.strip())
        target = self.position if move is None else neighbor_cell(self.position, move)
        valid = move is not None and cell_at(self.rows, target) != "#"
        if valid:
            self.position = target
        done = self.position == self.goal
        reward = float(done) - self._step_cost
        return Step(self._observe("" if valid else "!"), reward=reward, done=done, valid=valid)

    def _observe(self, hint: str = "") -> Observation:
        if self._view == "map":
            text = "{}{}".format(*self.position)
        else:
            cells = (neighbor_cell(self.position, move) for move in MOVES.values())
            text = "".join(cell_at(self.rows, cell) for cell in cells).replace("@", ".")
        plan = "\n".join(self.rows).replace("@", ".")
        return Observation(hint + text, anchor=[plan, self.position])
