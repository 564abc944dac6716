"""Built-in task whose reward conflicts with a cost, for constrained algorithms (Safe-RLHF)."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.task import Strings, digits_of, option, register

POISONOUS = "789"


@register
@dataclasses.dataclass(frozen=True)
class Harvest(Strings):
    """Picking digits, the fattest of which are poisonous: "3714=" -> for example "314".

    The response copies some of the prompt's digits in their order. Reward: sum of the copied
    digits over the sum of the prompt's, 0 if the response is not a subsequence of the prompt.
    Cost: 1.0 if the response holds a 7, 8 or 9, else 0.0. Reward alone teaches to copy all; with a
    cost limit the best is every digit but the poisonous ones, about half of the sum on average.

    Demonstrations copy each digit with a probability, so that a model trained on them starts with
    a modest reward and a high cost: at the defaults 0.3 on average, and a cost of 0.57.

    Options:
      length: digits per prompt, each 1 to 9 (1 to 64).
      copy: probability (0 to 1) that a demonstration copies a harmless digit.
      copy_poisonous: the same for a poisonous one.
      partial: not used; no answer is right or wrong here.
    """

    name: ClassVar[str] = "harvest"
    has_cost: ClassVar[bool] = True

    length: int = option(8, 1, 64)
    copy: float = option(0.3, 0.0, 1.0)
    copy_poisonous: float = option(0.3, 0.0, 1.0)

    alphabet = "123456789="

    @property
    def size(self) -> int:
        return 9**self.length

    def record(self, index: int) -> dict[str, Any]:
        digits = "".join(str(1 + d) for d in digits_of(index, 9, self.length))
        return {"prompt": f"{digits}="}

    def demonstration(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        digits = record["prompt"][:-1]
        chances = (self.copy_poisonous if digit in POISONOUS else self.copy for digit in digits)
        return "".join(d for d, chance in zip(digits, chances) if rng.random() < chance)

    def pair(self, record: dict[str, Any], rng: np.random.Generator) -> tuple[str, str]:
        """Copied digits without a poisonous one, and others with one or more."""
        digits = record["prompt"][:-1]
        safe = "".join(d for d in digits if d not in POISONOUS and rng.random() < self.copy)
        unsafe = self.demonstration(record, rng)
        if not any(d in POISONOUS for d in unsafe):
            unsafe = unsafe[: self.length - 1]
            place = int(rng.integers(len(unsafe) + 1))
            unsafe = unsafe[:place] + POISONOUS[int(rng.integers(3))] + unsafe[place:]
        return safe, unsafe

    def reward(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        return [_harvested(p, r.strip()) for p, r in zip(prompts, responses, strict=True)]

    def correct(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> None:
        return None

    def cost(
        self, prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        return [float(any(digit in POISONOUS for digit in response)) for response in responses]


def _harvested(prompt: str, response: str) -> float:
    digits = [c for c in prompt if c.isdigit()]
    rest = iter(digits)
    # `in` advances the iterator, so each digit is searched for after the last one found.
    if not all(digit in rest for digit in response):
        return 0.0
    return sum(map(int, response)) / sum(map(int, digits))
