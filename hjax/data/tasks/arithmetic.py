"""Built-in tasks: sums and products of two numbers."""

import dataclasses
from typing import Any, ClassVar

from hjax.data.tasks.task import Task, option, register


@dataclasses.dataclass(frozen=True)
class _Arithmetic(Task):
    """Two numbers and a sign: "12+34=", answered "46"; numbers are written without zeros ahead."""

    sign: ClassVar[str]

    digits: int = option(2, 1, 9)

    @property
    def alphabet(self) -> str:
        return f"0123456789{self.sign}="

    @property
    def size(self) -> int:
        return 10 ** (2 * self.digits)

    def record(self, index: int) -> dict[str, Any]:
        a, b = divmod(index, 10**self.digits)
        return {"prompt": f"{a}{self.sign}{b}=", "answer": str(self._result(a, b))}

    def _result(self, a: int, b: int) -> int:
        raise NotImplementedError


@register
@dataclasses.dataclass(frozen=True)
class Addition(_Arithmetic):
    """Adding two numbers: "12+34=" -> "46". Teaches carrying, with one right answer each.

    Options:
      digits: most digits of either number (1 to 9); 2 gives 10,000 prompts.
      partial: share of the places that are right, paid for wrong answers (see Task).
    """

    name: ClassVar[str] = "addition"
    sign: ClassVar[str] = "+"

    @property
    def response_length(self) -> int:
        return self.digits + 2

    def _result(self, a: int, b: int) -> int:
        return a + b


@register
@dataclasses.dataclass(frozen=True)
class Multiplication(_Arithmetic):
    """Multiplying two numbers: "12*34=" -> "408". Harder than addition: every digit of the answer
    depends on all digits of the prompt.

    Options:
      digits: most digits of either number (1 to 9); 2 gives 10,000 prompts.
      partial: share of the places that are right, paid for wrong answers (see Task).
    """

    name: ClassVar[str] = "multiplication"
    sign: ClassVar[str] = "*"

    @property
    def response_length(self) -> int:
        return 2 * self.digits + 1

    def _result(self, a: int, b: int) -> int:
        return a * b
