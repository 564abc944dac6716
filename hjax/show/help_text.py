"""What ``--help`` prints, in lines that the terminal has room for."""

from __future__ import annotations

import re
import shutil
import textwrap

# As wide as such texts are written, and as narrow as they are made; characters.
WRITTEN, NARROWEST = 100, 50
# Descriptions beside a flag are no narrower; else they stand below it.
_DESCRIPTION = 24
_USAGE = "usage:     "


def print_help(text: str) -> None:
    """Print a text of flags and sentences, its lines folded where the terminal is narrower."""
    columns = shutil.get_terminal_size((WRITTEN, 24)).columns
    print(folded(text, min(max(columns, NARROWEST), WRITTEN)), end="")


def folded(text: str, width: int) -> str:
    """A text in lines of so many characters or fewer; what is beside a flag stays in its column.

    A line goes on in those below it that are indented further and name no flag; a sentence in those
    that begin where it does. Words are not cut.
    """
    made: list[str] = []
    lines = text.splitlines()
    while lines:
        taken = [lines.pop(0)]
        while lines and _goes_on(taken[0], lines[0]):
            taken.append(lines.pop(0))
        made += taken if max(map(len, taken)) <= width else _fold(taken, width)
    return "\n".join(made) + "\n"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _head(line: str) -> str:
    """A flag and the space behind it, where a description stands beside it; else the indent."""
    flag = re.match(r"\s+-\S.*?\s{2,}(?=\S)|\s*", line)
    return flag[0] if flag else ""


def _is_usage(line: str) -> bool:
    return line.startswith(("usage:", " " * len("usage: ") + "python"))


def _goes_on(first: str, line: str) -> bool:
    if not first.strip() or not line.strip():
        return False
    if line.lstrip().startswith("-"):  # a flag, unless a description names one
        return bool(_head(first).strip()) and _indent(line) == len(_head(first))
    if _is_usage(first):
        return _indent(line) > len("usage: ")
    if _head(first).strip() or first.lstrip().startswith("-"):
        return _indent(line) > _indent(first)
    return _indent(line) == _indent(first)


def _fold(lines: list[str], width: int) -> list[str]:
    head = _head(lines[0])
    hang = len(_USAGE) if _is_usage(lines[0]) else _indent(lines[1]) if lines[1:] else len(head)
    words = " ".join([lines[0][len(head) :], *(line.strip() for line in lines[1:])])
    above: list[str] = []
    if hang > width - _DESCRIPTION or len(head) > width - _DESCRIPTION:
        hang = min(hang, _indent(lines[0]) + 4)
        if head.strip():
            above, head = [head.rstrip()], " " * hang
    return above + textwrap.wrap(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
