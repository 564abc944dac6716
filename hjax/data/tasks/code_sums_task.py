"""Built-in task: sums of several terms, computed by code in the response, or by heart."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.calculator_task import CalculatorTask, calculation_steps
from hjax.data.tasks.task import option, register

_SHOWN_CHARACTERS = 24
_WORDS = {"*": "times", "+": "plus", "-": "minus"}
_CALCULATION = re.compile(r"(-?[0-9]+)([-+*])(-?[0-9]+)=")


@register
@dataclasses.dataclass(frozen=True)
class CodeSumsTask(CalculatorTask):
    """Sums such as "47*38-129?" by plan, code and answer, see
    `hjax.environments.code_blocks.CodeBlocks`: "times, minus<code>a=47*38\\na</code>" is
    answered by "<out>1786</out>", "<code>a-129</code>" by "<out>1657</out>", and "####1657" is the
    answer.

    Column: `solution`. Turns: one per number, and one more for a block that fails.

    Options:
      terms: numbers of a sum (2 to 4).
      digits: most digits of each (1 to 3).
      tool: whether code is run; else only an answer is possible.
      failures: share of the blocks that an injected error ends; demonstrations repeat these.
      noise: share of the demonstrations' blocks in which a digit is wrong, and so the answer, which
        is what the last block said; without the tool, share of the answers.
      partial: not used.
    """

    name: ClassVar[str] = "code_sums"
    environment: ClassVar[str] = "hjax.environments.code_blocks:CodeBlocks"

    failures: float = option(0.0, 0.0, 1.0)

    alphabet = "\n" + "".join(map(chr, range(32, 127)))

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "interpreter": self.tool,
            "failures": self.failures,
            "output_characters": _SHOWN_CHARACTERS,
            "stop_at_block": False,
        }

    @property
    def max_turns(self) -> int:
        return self.terms + 1

    @property
    def turn_length(self) -> int:
        plan = (self.terms - 1) * len(", minus")
        return plan + len("<code>a=+\na</code>") + 2 * self.digits + 1

    @property
    def observation_length(self) -> int:
        return len("<out></out>") + _SHOWN_CHARACTERS

    def record(self, index: int) -> dict[str, Any]:
        row = super().record(index)
        return {"prompt": row["prompt"], "solution": str(row["result"])} | self.settings

    def make_environment(self) -> Any:
        environment = super().make_environment()
        environment.open_session = lambda seed: _Rehearsal()
        return environment

    def expert_actions(self, environment: Any, rng: np.random.Generator) -> list[str]:
        *blocks, answer = code_steps(environment.prompt.removesuffix("?"))
        if not self.tool:
            return [answer]
        ran = [out for out in environment.outputs if not out.startswith("RuntimeError")]
        if len(ran) == len(blocks):
            return [f"####{ran[-1]}"]
        action = blocks[len(ran)]
        return [action[action.index("<code>") :] if environment.blocks else action]  # one plan

    def random_action(self, environment: Any, rng: np.random.Generator) -> str:
        [action] = self.expert_actions(environment, rng)
        places = [i for i, character in enumerate(action) if character.isdigit()]
        if not places or (self.tool and action.startswith("####")):
            return action
        place = places[int(rng.integers(len(places)))]
        # Another one, and no 0, with which Python begins no number.
        digit = 1 + (int(action[place]) + int(rng.integers(8))) % 9
        return f"{action[:place]}{digit}{action[place + 1 :]}"


def code_steps(expression: str) -> list[str]:
    """The turns that work an expression out, products first: the plan with the first block, a block
    for each further calculation, and the answer."""
    *calculations, answer = calculation_steps(expression)
    names, plan, blocks = dict[str, str](), list[str](), list[str]()
    for number, calculation in enumerate(calculations):
        found = _CALCULATION.fullmatch(calculation)
        assert found is not None
        left, sign, right = found.groups()
        code = f"{names.get(left, left)}{sign}{names.get(right, right)}"
        name = "abc"[number]
        names[str(eval(calculation.removesuffix("=")))] = name
        if number < len(calculations) - 1:
            code = f"{name}={code}\n{name}"
        plan.append(_WORDS[sign])
        blocks.append(f"<code>{code}</code>")
    return [f"{', '.join(plan)}{blocks[0]}", *blocks[1:], f"####{answer.removeprefix('#')}"]


class _Rehearsal:
    """Runs the blocks of demonstrations, which are this module's own, without a sandbox."""

    def __init__(self) -> None:
        self._variables: dict[str, Any] = {}

    def run(self, code: str) -> str:
        *statements, last = code.split("\n")
        exec("\n".join(statements), self._variables)
        return str(eval(last, self._variables))

    def close(self) -> None:
        """Nothing is open."""
