"""Verifier of mathematical answers: extracts them from text and compares them with the dataset's.

`--reward=math` of the commands, and `reward.function=math_answers.py:reward` of a run. The answer
is the content of the last `\\boxed{...}` or the text after the last `####`, whichever comes later:
the formats of MATH (Hendrycks et al. 2021, arXiv:2103.03874) and GSM8K (Cobbe et al. 2021,
arXiv:2110.14168).

If the dataset's answer is a number, the response's must be a number of the same value: an integer,
decimal, with an exponent, or a fraction (`3/4`, `\\frac{3}{4}`). Thousands separators, currency and
percent signs, a variable before (`x =`) and units after are ignored. Other answers are compared by
math-verify (Hugging Face's, the extra `math`); they are refused if it is not installed, so that
scores do not depend on the installation.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hjax.errors import DataError
from hjax.isolated_process import DeadlineExceeded, IsolatedProcess, ProcessDied, TaskFailed

# Columns with the right answer, in order of preference; verl's `reward_model` and SkyRL's
# `reward_spec` have `ground_truth`.
TARGETS = ("answer", "solution", "reward_model", "reward_spec")

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
_LONGEST_NUMBER = 1000  # characters; ``int`` takes 4,300 digits
_BRACE = re.compile("[{}]")
# LaTeX spaces and inline-math delimiters, escapes, and currency signs.
_IGNORED = re.compile(r"\\[!,;:()]|\\(?=[%$])|[$£€¥]")

# Timeout of one comparison. math-verify's own timeout of five seconds does not interrupt arithmetic
# of very large numbers, so it runs in an isolated process, which starts with the first comparison.
COMPARISON_SECONDS = 12.0
_comparisons = IsolatedProcess("hjax.rewards.math_answers:make_comparer", b"")


def reward(
    prompts: Sequence[Any], responses: Sequence[str], **columns: Sequence[Any]
) -> list[float]:
    """1.0 for a response with the right answer, 0.0 for another answer or none.

    Raises:
      DataError: no column of TARGETS, a row without an answer, or one that needs math-verify.
    """
    found = [extract_answer(response) for response in responses]
    return [
        float(answer is not None and is_equivalent(target, answer))
        for answer, target in zip(found, targets(columns), strict=True)
    ]


def answers(responses: Sequence[str]) -> list[str | None]:
    """The answer of each response, equal numbers in one spelling; None without an answer."""
    found = []
    for text in responses:
        answer = extract_answer(text)
        value = None if answer is None else parse_number(answer)
        found.append(re.sub(r"\s+", "", answer) if value is None and answer else _spell(value))
    return found


def targets(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The right answer of each row.

    Raises:
      DataError: no column of TARGETS, a row without an answer, or one that needs math-verify.
    """
    name = next((name for name in TARGETS if name in columns), None)
    if name is None:
        raise DataError(
            f"math: no column with right answers, one of {', '.join(TARGETS)}; there are "
            f"{', '.join(columns) or 'none'}"
        )
    return [_target(value, f"math: {name} of row {i}") for i, value in enumerate(columns[name], 1)]


def extract_answer(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or the text after the last `####`; else None."""
    marked = text.rfind("####")
    if (inside := _last_boxed(text, max(marked, 0))) is not None:
        return inside.strip() or None
    if marked < 0:
        return None
    lines = text[marked + len("####") :].strip().splitlines()
    return lines[0].strip() if lines else None


def parse_number(text: str) -> Fraction | None:
    """The value of a text that is a number in the sense of this module; else None."""
    if len(text) > _LONGEST_NUMBER:
        return None
    bare = _IGNORED.sub("", text.replace("{,}", ",").replace("\\ ", " ")).strip("* \t")
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


def is_equivalent(target: str, answer: str) -> bool:
    """Whether an answer equals the target, in the sense of this module.

    False for an expression that math-verify fails on, or that takes longer than COMPARISON_SECONDS.

    Raises:
      RuntimeError: math-verify does not start.
    """
    right = parse_number(target)
    if right is not None:
        return parse_number(answer) == right
    try:
        return (
            _comparisons.call(json.dumps([target, answer]).encode(), COMPARISON_SECONDS) == b"true"
        )
    except (DeadlineExceeded, ProcessDied):
        return False
    except TaskFailed as error:
        if error.at_start:
            raise RuntimeError(f"math-verify does not start: {error}") from None
        return False


def make_comparer(payload: bytes) -> Callable[[bytes], bytes]:
    """Handler of the isolated process: JSON of two expressions in, JSON of a boolean out."""
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
    answer = extract_answer(text) or text.strip()
    if not answer:
        raise DataError(f"{where} is empty; it must have the right answer")
    if parse_number(answer) is None and importlib.util.find_spec("math_verify") is None:
        raise DataError(
            f"{where}: {answer[:60]!r} is not a plain number; comparing expressions needs "
            "math-verify: pip install 'hjax[math]'"
        )
    return answer


def _last_boxed(text: str, begin: int) -> str | None:
    """The content of the last ``\\boxed{...}`` from ``begin`` on that is not cut off; else None.

    One pass: a model may say ``\\boxed{`` thousands of times.
    """
    opened: list[int] = []
    last, end = -1, -1
    for brace in _BRACE.finditer(text, begin):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (at := opened.pop()) > last and text.endswith(r"\boxed", begin, at):
            last, end = at, brace.start()
    return None if last < 0 else text[last + 1 : end]


def _spell(value: Fraction | None) -> str | None:
    return None if value is None else str(value)


# For majority voting, see ``hjax.rewards.graders``.
reward.answers = answers  # type: ignore[attr-defined]
