"""Built-in task: sums of several terms, with a calculator or by heart."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.countdown import evaluate
from hjax.data.tasks.environment_task import EnvironmentTask
from hjax.data.tasks.task import choice, digits_of, option, register


@register
@dataclasses.dataclass(frozen=True)
class CalculatorTask(EnvironmentTask):
    """Sums such as "47*38-12?", see `hjax.environments.calculator.Calculator`: "47*38=" is answered
    by "1786;", "1786-12=" by "1774;", and "#1774" is the answer.

    Numbers have + - * between, products first. Column: `result`. Turns: two per number.

    Options:
      terms: numbers of a sum (2 to 4).
      digits: most digits of each (1 to 3).
      tool: whether the calculator computes; else only an answer is possible.
      noise: share of the demonstrations' actions in which a digit is wrong; the calculation is then
        repeated, but an answer is given once.
      partial: share of the places that are right, paid for wrong answers.
    """

    name: ClassVar[str] = "calculator"
    environment: ClassVar[str] = "hjax.environments.calculator:Calculator"

    terms: int = option(3, 2, 4)
    digits: int = option(2, 1, 3)
    tool: bool = choice(True, False)

    alphabet = "0123456789+-*=#?;"

    @property
    def size(self) -> int:
        return 10 ** (self.digits * self.terms) * 3 ** (self.terms - 1)

    @property
    def settings(self) -> dict[str, Any]:
        return {"tool": self.tool, "partial": self.partial, "max_digits": self.terms * self.digits}

    @property
    def max_turns(self) -> int:
        return 2 * self.terms

    @property
    def turn_length(self) -> int:
        # A negative number, a sign, a number and "=": together no more digits than the result's.
        return self.terms * self.digits + 4

    @property
    def observation_length(self) -> int:
        return self.terms * self.digits + 2

    def record(self, index: int) -> dict[str, Any]:
        which_numbers, which_signs = divmod(index, 3 ** (self.terms - 1))
        numbers = digits_of(which_numbers, 10**self.digits, self.terms)
        signs = ["+-*"[d] for d in digits_of(which_signs, 3, self.terms - 1)]
        expression = "".join(f"{n}{s}" for n, s in zip(numbers, [*signs, ""]))
        return {"prompt": f"{expression}?", "result": evaluate(expression)} | self.settings

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> list[str]:
        *calculations, answer = calculation_steps(environment.prompt.removesuffix("?"))
        done = {text.partition("=")[0] + "=" for text in environment.computed}
        ahead = [action for action in calculations if action not in done] if self.tool else []
        return [*ahead, answer]

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        action = self.expert_actions(environment, rng)[0]
        places = [i for i, character in enumerate(action) if character.isdigit()]
        place = places[int(rng.integers(len(places)))]
        digit = (int(action[place]) + int(rng.integers(1, 10))) % 10
        return f"{action[:place]}{digit}{action[place + 1 :]}"


def calculation_steps(expression: str) -> list[str]:
    """The actions that work an expression out, products first, and then give the answer."""
    parts = re.findall(r"[0-9]+|[-+*]", expression)
    actions = []
    while len(parts) > 1:
        place = parts.index("*") if "*" in parts else 1
        left, sign, right = parts[place - 1 : place + 2]
        a, b = int(left), int(right)
        value = a + b if sign == "+" else a - b if sign == "-" else a * b
        actions.append(f"{left}{sign}{right}=")
        parts[place - 1 : place + 2] = [str(value)]
    return [*actions, f"#{parts[0]}"]
