"""Sokoban: push every box onto a goal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hjax.data.tasks.sokoban_rules import parse_level, positions_text
from hjax.environments.environment import Environment, Observation, Step
from hjax.environments.row_columns import number_column, one_of_column


class Sokoban(Environment):
    """Pushes boxes onto goals; they are never pulled, and only one moves at a time.

    The row's column ``level`` is the level as lines of the usual characters: `#` wall, blank floor,
    `@` player, `$` box, `.` goal, `*` box on a goal, `+` player on a goal; at most 36 by 36. Beyond
    the lines is wall. An action is one letter: U, D, L or R. One that is none, or into a wall or a
    box that cannot move, changes nothing and is not valid.

    ``hjax.data.tasks.sokoban_rules.read_levels`` reads files of levels (boxoban); rows for
    ``data.path`` are ``{"prompt": level, "level": level}``.

    | `view` | first observation | observation after a move |
    |---|---|---|
    | `positions` | the row's prompt if it is text, else the level, a line break and positions | \
row and column of the player and of each box, from 0 at the top left: `23 34 45` |
    | `map` | the row's prompt if it is text, else the level | the level; it replaces the history \
(``Step.fresh``) |

    Numbers above 9 are letters, `a` 10 and so on. After an action that is not valid `!` precedes
    the observation. Alphabet: ``#@$.*+!UDLR``, digits, the blank and the line break; of levels
    above 10 by 10 the letters too. Anchor: the level as it stands.

    Columns that a row may lack: ``view``, `positions` (else) or `map`; ``box_reward`` (0), paid for
    each box pushed onto a goal, and taken for each pushed off one. When all boxes stand on goals
    1.0 is paid and the episode ends.
    """

    def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.state = parse_level(task.get("level"))
        self._view = one_of_column(task, "view", ("positions", "map"))
        self._box_reward = number_column(task, "box_reward")
        prompt, level = task.get("prompt"), str(self.state)
        if not isinstance(prompt, str):
            prompt = level if self._view == "map" else f"{level}\n{positions_text(self.state)}"
        return Observation(prompt, anchor=level)

    def step(self, action: str) -> Step:
        before, after = self.state, self.state.after_move(action.strip())
        self.state = after or before
        pushed = self.state.boxes_on_goals - before.boxes_on_goals
        reward = self._box_reward * pushed + self.state.solved
        level, hint = str(self.state), "" if after else "!"
        text = level if self._view == "map" else positions_text(self.state)
        return Step(
            Observation(hint + text, anchor=level),
            reward=reward,
            done=self.state.solved,
            valid=after is not None,
            fresh=self._view == "map",
        )
