"""Answers to mathematical questions: found in a text, and compared with the data's.

`--reward=math` of the commands, and `reward.function=math_answers.py:reward` of a run. An answer
is what stands in the last `\\boxed{...}` of a text, or after its last `####`, whichever is later:
so end the solutions of MATH (Hendrycks et al. 2021, arXiv:2103.03874) and those of GSM8K (Cobbe et
al. 2021, arXiv:2110.14168).

Where the data's answer is a number, the response's must be one, of the same value: whole, decimal,
with an exponent, or a fraction (`3/4`, `\\frac{3}{4}`). Commas between thousands, signs of currency
and percent, a name ahead (`x =`) and units behind are left out. Anything else is compared by
math-verify (Hugging Face's, the extra `math`), and the answers are refused where it is not
installed: so a score never depends on what is.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hjax.errors import DataError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed

# Columns with the right answer, in order of preference; of verl's the ground truth.
TARGETS = ("answer", "solution", "reward_model")

_NUMBER = re.compile(
    r"""(?:[A-Za-z]\s*=\s*)?(?P<sign>[+-]?)\s*(?:
    (?P<decimal>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:[eE][+-]?\d{1,3})?|\.\d+)
        (?:\s*/\s*(?P<under>\d+))?
    |\\[dt]?frac(?:\{(?P<top>-?\d+)\}|(?P<top1>\d))(?:\{(?P<bottom>\d+)\}|(?P<bottom1>\d))
    )
    \s*%?\s*(?:\^\{?\\circ\}?)?\s*(?:\\(?:text|textrm|mathrm|mbox)\{[^{}]*\})?
    (?:(?<=\s)(?!pi\b|sqrt|sin\b|cos\b|tan\b|log\b|ln\b|exp\b)[A-Za-z]{2,}(?:\s+[A-Za-z]+)*)?\.?""",
    re.VERBOSE,
)
# Of LaTeX: its spaces, and the ways to set mathematics in a line.
_LEFT_OUT = re.compile(r"\\[!,;:()]|\\(?=[%$])|[$£€¥]")

# For one comparison. math-verify itself stops after five seconds, except inside arithmetic of very
# large numbers; so it runs apart, where it can be ended. Its process starts with the first.
SECONDS = 12.0
_comparisons = IsolatedProcess("hjax.rewards.math_answers:comparing", b"")


def reward(
    prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
) -> list[float]:
    """1.0 for a response whose answer is the data's, 0.0 for another or none.

    Raises:
      DataError: no column of TARGETS, a row without an answer, or one that needs math-verify.
    """
    said = [extract(response) for response in responses]
    return [
        float(answer is not None and same(target, answer))
        for answer, target in zip(said, targets(columns), strict=True)
    ]


def answers(responses: Sequence[str]) -> list[str | None]:
    """The answer of each response, numbers of one value in one spelling; None without one."""
    found = []
    for text in responses:
        answer = extract(text)
        value = None if answer is None else number(answer)
        found.append(re.sub(r"\s+", "", answer) if value is None and answer else _spelled(value))
    return found


def targets(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The right answer of each row.

    Raises:
      DataError: no column of TARGETS, a row without an answer, or one that needs math-verify.
    """
    name = next((name for name in TARGETS if name in columns), None)
    if name is None:
        raise DataError(
            f"math: no column has the right answers; it is one of {', '.join(TARGETS)}, and there "
            f"are {', '.join(columns) or 'none'}"
        )
    return [_target(value, f"math: {name} of row {i}") for i, value in enumerate(columns[name], 1)]


def extract(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or after the last `####`; None without either."""
    marked = text.rfind("####")
    begin = text.rfind(r"\boxed{")
    while begin > marked:
        if (inside := _braced(text, begin + len(r"\boxed"))) is not None:
            return inside.strip() or None
        begin = text.rfind(r"\boxed{", 0, begin)  # one that was cut off
    if marked < 0:
        return None
    lines = text[marked + len("####") :].strip().splitlines()
    return lines[0].strip() if lines else None


def number(text: str) -> Fraction | None:
    """The value of a text that is a number, as the module says; else None."""
    bare = _LEFT_OUT.sub("", text.replace("{,}", ",").replace("\\ ", " ")).strip("* \t")
    match = _NUMBER.fullmatch(bare)
    if match is None:
        return None
    if match["decimal"] is not None:
        above, under = Fraction(match["decimal"].replace(",", "")), int(match["under"] or 1)
    else:
        above = Fraction(match["top"] or match["top1"])
        under = int(match["bottom"] or match["bottom1"])
    if not under:
        return None
    return -above / under if match["sign"] == "-" else above / under


def same(target: str, answer: str) -> bool:
    """Whether an answer is the right one, as the module says.

    An expression that math-verify fails on, or that takes longer than ``SECONDS``, is not.

    Raises:
      RuntimeError: math-verify does not start.
    """
    right = number(target)
    if right is not None:
        return number(answer) == right
    try:
        return _comparisons.call(json.dumps([target, answer]).encode(), SECONDS) == b"true"
    except (DeadlineExceeded, ProcessDied):
        return False
    except TaskFailed as error:
        if error.at_start:
            raise RuntimeError(f"math-verify does not start: {error}") from None
        return False


def comparing(given: bytes) -> Callable[[bytes], bytes]:
    """What compares in math-verify's process: JSON of two expressions in, of a boolean out."""
    from math_verify import parse, verify

    def compare(request: bytes) -> bytes:
        right, answer = (parse(f"\\boxed{{{text}}}") for text in json.loads(request))
        return json.dumps(bool(verify(right, answer))).encode()

    return compare


def _target(value: Any, where: str) -> str:
    if isinstance(value, Mapping):
        value = value.get("ground_truth")
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where} is {value!r}; it must be text or a number")
    text = str(value)
    answer = extract(text) or text.strip()
    if not answer:
        raise DataError(f"{where} is empty; it must have the right answer")
    if number(answer) is None and importlib.util.find_spec("math_verify") is None:
        raise DataError(
            f"{where}: {answer[:60]!r} is no plain number, and to compare expressions math-verify "
            "must be installed: pip install 'hjax[math]'"
        )
    return answer


def _braced(text: str, begin: int) -> str | None:
    """What stands between the brace at ``begin`` and its partner; None without a partner."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def _spelled(value: Fraction | None) -> str | None:
    return None if value is None else str(value)


# What a majority is taken over, see ``hjax.rewards.graders``.
reward.answers = answers  # type: ignore[attr-defined]
