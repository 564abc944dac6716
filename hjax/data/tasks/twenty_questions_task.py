"""Built-in task: find a hidden item of a table by asking."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.task import option, register
from hjax.errors import ConfigError

_NAMES = "ABCDEFGHIJKLMNOP"


@register
@dataclasses.dataclass(frozen=True)
class TwentyQuestionsTask(EnvironmentTask):
    """Finding a hidden item of a table such as "Ayn\\nBny\\nCyy": "2" asks the second attribute and
    is answered "y" or "n", "C" guesses, see `hjax.environments.twenty_questions.TwentyQuestions`.
    Which questions are worth their turn depends on the answers so far.

    The prompt is the table. Column: `table`, whose items differ in their attributes. Turns: two
    more than attributes.

    Options:
      items: lines of the table (2 to 16).
      attributes: yes-or-no attributes of each item (1 to 8); they must tell the items apart.
      question_cost: taken from the reward of each question.
      noise: share of the demonstrations' actions that are drawn from all questions and guesses.
      partial: not used.
    """

    name: ClassVar[str] = "twenty_questions"
    environment: ClassVar[str] = "hjax.environments.twenty_questions:TwentyQuestions"

    items: int = option(6, 2, 16)
    attributes: int = option(4, 1, 8)
    question_cost: float = option(0.0, 0.0, 1.0)

    turn_length = 2
    observation_length = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items > 2**self.attributes:
            raise ConfigError(
                f"task twenty_questions: option items is {self.items}; attributes="
                f"{self.attributes} tell at most {2**self.attributes} apart"
            )

    @property
    def alphabet(self) -> str:
        return _NAMES[: self.items] + "12345678"[: self.attributes] + "yn?\n"

    @property
    def size(self) -> int:
        return 2 ** (self.items * self.attributes)

    @property
    def settings(self) -> dict[str, Any]:
        return {"question_cost": self.question_cost}

    @property
    def max_turns(self) -> int:
        return self.attributes + 2

    def record(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        drawn = rng.choice(2**self.attributes, size=self.items, replace=False)
        answers = str.maketrans("01", "ny")
        rows = [f"{number:0{self.attributes}b}".translate(answers) for number in drawn.tolist()]
        table = "\n".join(map("".join, zip(_NAMES, rows)))
        return {"prompt": table, "table": table} | self.settings

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> list[str]:
        left = environment.candidates()
        if len(left) == 1:
            return left
        evenness = [
            abs(2 * sum(environment.items[name][i] == "y" for name in left) - len(left))
            for i in range(self.attributes)
        ]
        best = [i for i, value in enumerate(evenness) if value == min(evenness)]
        return [str(1 + best[int(rng.integers(len(best)))])]

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        actions = [*map(str, range(1, self.attributes + 1)), *environment.items]
        return actions[int(rng.integers(len(actions)))]
