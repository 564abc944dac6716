"""Built-in task: reach a target with given numbers (countdown)."""

import dataclasses
import re
from typing import Any, ClassVar

from hjax.data.tasks.task import Task, digits_of, option, register


@register
@dataclasses.dataclass(frozen=True)
class Countdown(Task):
    """Reaching a target: "2 3 7:13=" -> "2*3+7". Several expressions may be right, so a policy can
    find its own; the verifier evaluates the expression exactly, with the usual precedence.

    Each number (shown in ascending order) is used exactly once, with + - * between, no brackets.
    Targets are 0 to 99 and always reachable. Columns: `numbers`, `target` and `answer` (the
    demonstration, one of the right expressions).

    Options:
      numbers: how many numbers per prompt (2 to 6).
      largest: the largest number (2 to 99); numbers start at 1.
      partial: paid for a wrong expression that uses the numbers as asked (see Task).
    """

    name: ClassVar[str] = "countdown"

    numbers: int = option(3, 2, 6)
    largest: int = option(20, 2, 99)

    alphabet = "0123456789 +-*:="

    @property
    def size(self) -> int:
        return self.largest**self.numbers * 3 ** (self.numbers - 1)

    @property
    def response_length(self) -> int:
        return self.numbers * (len(str(self.largest)) + 1)

    def record(self, index: int) -> dict[str, Any] | None:
        which_numbers, which_signs = divmod(index, 3 ** (self.numbers - 1))
        numbers = [1 + d for d in digits_of(which_numbers, self.largest, self.numbers)]
        signs = ["+-*"[d] for d in digits_of(which_signs, 3, self.numbers - 1)]
        answer = str(numbers[0]) + "".join(f"{s}{n}" for s, n in zip(signs, numbers[1:]))
        target = evaluate(answer)
        if target is None or not 0 <= target <= 99:
            return None
        shown = sorted(numbers)
        prompt = f"{' '.join(map(str, shown))}:{target}="
        return {"prompt": prompt, "numbers": shown, "target": target, "answer": answer}

    def is_correct(self, response: str, record: dict[str, Any]) -> bool:
        uses = self._uses_numbers(response, record)
        return uses and evaluate(response) == int(record["target"])

    def closeness(self, response: str, record: dict[str, Any]) -> float:
        return float(self._uses_numbers(response, record))

    def _uses_numbers(self, response: str, record: dict[str, Any]) -> bool:
        if evaluate(response) is None:
            return False
        used = sorted(int(n) for n in re.findall(r"[0-9]+", response))
        return used == sorted(int(n) for n in record["numbers"])


def evaluate(expression: str) -> int | None:
    """Value of "a+b*c-...": integers of at most 6 digits joined by + - *; None if it isn't one."""
    if not re.fullmatch(r"[0-9]{1,6}([-+*][0-9]{1,6})*", expression):
        return None
    total = 0
    for sign, product in re.findall(r"([-+]?)([0-9*]+)", expression):
        value = 1
        for factor in product.split("*"):
            value *= int(factor)
        total += -value if sign == "-" else value
    return total
