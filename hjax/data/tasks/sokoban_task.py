"""Built-in task: small levels of Sokoban."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.maze_rules import distances_to, free_cells, neighbor_cell
from hjax.data.tasks.sokoban_rules import PUSHES, SokobanState, positions_text, solve
from hjax.data.tasks.task import choice, option, register


@register
@dataclasses.dataclass(frozen=True)
class SokobanTask(EnvironmentTask):
    """Pushing boxes onto goals, see `hjax.environments.sokoban.Sokoban`. Some moves cannot be taken
    back.

    The prompt is the level, with the view `positions` followed by the positions. Column: `level`.
    Levels are made by pulling boxes off their goals at random, so each can be solved within
    `max_turns`, eight per cell of a side within the border.

    Options:
      side: rows and columns with the border (5 to 8).
      boxes: boxes, and goals (1 to 2).
      wall_share: share of the cells within the border that are wall (0.0 to 0.3).
      view: `positions`, or `map`, where each observation is the level and replaces the history.
      box_reward: paid for each box pushed onto a goal, and taken for each pushed off one.
      noise: share of the demonstrations' moves that are drawn from U, D, L and R; a demonstration
        ends where they made the level unsolvable.
      partial: not used.
    """

    name: ClassVar[str] = "sokoban"
    environment: ClassVar[str] = "hjax.environments.sokoban:Sokoban"

    side: int = option(6, 5, 8)
    boxes: int = option(1, 1, 2)
    wall_share: float = option(0.1, 0.0, 0.3)
    view: str = choice("positions", "map")
    box_reward: float = option(0.0, 0.0, 1.0)

    turn_length = 2

    @property
    def alphabet(self) -> str:
        return "# @$.*+\n!UDLR" + "01234567"[: self.side]

    @property
    def size(self) -> int:
        return 2 ** ((self.side - 2) ** 2 + 3)

    @property
    def max_turns(self) -> int:
        return 8 * (self.side - 2)

    @property
    def observation_length(self) -> int:
        if self.view == "map":
            return self.side * (self.side + 1)
        return 3 * (self.boxes + 1)

    @property
    def settings(self) -> dict[str, Any]:
        return {"view": self.view, "box_reward": self.box_reward}

    def record(self, index: int) -> dict[str, Any] | None:
        rng, inner = np.random.default_rng(index), self.side - 2
        cells = [(1 + n // inner, 1 + n % inner) for n in rng.permutation(inner * inner).tolist()]
        wall_count = int(rng.binomial(len(cells), self.wall_share))
        if len(cells) - wall_count < 2 * self.boxes + 1:
            return None
        goals, player = cells[: self.boxes], cells[self.boxes]
        floor = set(cells[: len(cells) - wall_count])
        grid = range(self.side)
        rows = tuple(
            "".join("." if (i, j) in goals else "# "[(i, j) in floor] for j in grid) for i in grid
        )
        state = _pulled(SokobanState(rows, player, frozenset(goals)), rng, self.max_turns)
        if state.boxes_on_goals:
            return None
        level = str(state)
        shown = "" if self.view == "map" else f"\n{positions_text(state)}"
        return {"prompt": level + shown, "level": level} | self.settings

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> str:
        return solve(environment.state) or ""

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        return list(PUSHES)[int(rng.integers(len(PUSHES)))]


def _pulled(state: SokobanState, rng: np.random.Generator, most_moves: int) -> SokobanState:
    """A state from which ``state`` is reached by pushing back what is pulled here.

    Args:
      most_moves: of the player, on the way back.
    """
    moves, floor = 0, free_cells(state.rows)
    for _ in range(3 * len(state.boxes)):
        steps = distances_to(floor - state.boxes, state.player)
        pulls = [
            (box, move)
            for box in sorted(state.boxes)
            for move in PUSHES.values()
            if (to := neighbor_cell(box, move)) in steps and neighbor_cell(to, move) in steps
        ]
        if not pulls:
            break
        box, move = pulls[int(rng.integers(len(pulls)))]
        player, boxes = neighbor_cell(box, move), state.boxes - {box}
        moves += steps[player]
        while moves < most_moves and neighbor_cell(player, move) in steps and rng.random() < 0.7:
            box, player, moves = player, neighbor_cell(player, move), moves + 1
        if moves > most_moves:
            moves = most_moves
            break
        state = state._replace(player=player, boxes=boxes | {box})
    steps = distances_to(floor - state.boxes, state.player)
    near = [cell for cell in sorted(steps) if moves + steps[cell] <= most_moves]
    return state._replace(player=near[int(rng.integers(len(near)))])
