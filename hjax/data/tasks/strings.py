"""Built-in tasks on strings: sorting, reversal, parity."""

import dataclasses
import itertools
import string
from typing import Any, ClassVar

from hjax.data.tasks.task import Strings, digits_of, option, register
from hjax.errors import ConfigError


@register
@dataclasses.dataclass(frozen=True)
class Sorting(Strings):
    """Sorting digits: "52413>" -> "12345". Every token depends on the whole prompt. The reward is
    dense with partial credit and sparse without.

    Options:
      length: digits per prompt (1 to 64); 5 gives 100,000 prompts.
      partial: share of the places that are right, paid for wrong answers (see Task).
    """

    name: ClassVar[str] = "sorting"

    length: int = option(5, 1, 64)

    alphabet = "0123456789>"

    @property
    def size(self) -> int:
        return 10**self.length

    def record(self, index: int) -> dict[str, Any]:
        digits = str(index).zfill(self.length)
        return {"prompt": f"{digits}>", "answer": "".join(sorted(digits))}


@register
@dataclasses.dataclass(frozen=True)
class Reversal(Strings):
    """Reversing letters: "abcdef|" -> "fedcba". Needs a position lookup that gets harder with the
    length.

    Options:
      length: letters per prompt (1 to 64).
      letters: size of the alphabet used, a first (2 to 26).
      partial: share of the places that are right, paid for wrong answers (see Task).
    """

    name: ClassVar[str] = "reversal"

    length: int = option(6, 1, 64)
    letters: int = option(26, 2, 26)

    @property
    def alphabet(self) -> str:
        return string.ascii_lowercase[: self.letters] + "|"

    @property
    def size(self) -> int:
        return self.letters**self.length

    def record(self, index: int) -> dict[str, Any]:
        letters = (string.ascii_lowercase[d] for d in digits_of(index, self.letters, self.length))
        text = "".join(letters)
        return {"prompt": f"{text}|", "answer": text[::-1]}


@register
@dataclasses.dataclass(frozen=True)
class MixedReversal(Strings):
    """Reversing digits, of all lengths: "90310|" -> "01309". Short prompts are soon always right,
    long ones long always wrong, so that it matters which are answered. The alphabet has `?` and `;`
    too, with which judgements of prompts are written (METIS).

    Options:
      length: most digits per prompt (1 to 64).
      shortest: fewest digits; of short ones there are only so many.
      partial: share of the places that are right, paid for wrong answers (see Task).
    """

    name: ClassVar[str] = "mixed_reversal"

    length: int = option(12, 1, 64)
    shortest: int = option(1, 1, 64)

    alphabet = "0123456789|?;"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.length:
            raise ConfigError(
                f"task mixed_reversal: option shortest is {self.shortest}; it must be at most "
                f"length={self.length}"
            )

    @property
    def size(self) -> int:
        return (self.length - self.shortest + 1) * 10**self.length

    def record(self, index: int) -> dict[str, Any]:
        further, rest = divmod(index, 10**self.length)
        length = self.shortest + further
        digits = str(rest % 10**length).zfill(length)
        return {"prompt": f"{digits}|", "answer": digits[::-1]}


@register
@dataclasses.dataclass(frozen=True)
class Parity(Strings):
    """Parity of the number of ones: "11010?" -> bits of which the last is the answer, 1 for odd.
    Demonstrations write the running parity ("10011"), but only the last bit is verified. This is
    an outcome reward over a chain of thought that the model may keep, shorten or spoil.

    Options:
      length: bits per prompt (1 to 64); 10 gives 1024 prompts.
      partial: paid for a wrong answer made of bits only, at most `length` of them (see Task).
    """

    name: ClassVar[str] = "parity"

    length: int = option(10, 1, 64)

    alphabet = "01?"

    @property
    def size(self) -> int:
        return 2**self.length

    def record(self, index: int) -> dict[str, Any]:
        bits = f"{index:0{self.length}b}"
        return {"prompt": f"{bits}?", "answer": str(bits.count("1") % 2)}

    def demonstration(self, record: dict[str, Any], rng: Any) -> str:
        bits = (int(bit) for bit in record["prompt"][:-1])
        return "".join(str(total % 2) for total in itertools.accumulate(bits))

    def is_correct(self, response: str, record: dict[str, Any]) -> bool:
        return self._well_formed(response) and response[-1] == record["answer"]

    def closeness(self, response: str, record: dict[str, Any]) -> float:
        return float(self._well_formed(response))

    def _well_formed(self, response: str) -> bool:
        return 0 < len(response) <= self.length and set(response) <= {"0", "1"}
