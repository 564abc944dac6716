"""An evaluator of Horn clauses in Prolog's syntax, with limits: no cut, no files, no other effects.

    program = parse_program("tax(X, T) :- income(X, I), T is I // 10.  income(ann, 700).")
    solutions(program, "tax(ann, T)", limits=HornLimits())   # [{"T": "70"}]

It knows `,`, `\\+`, `=`, `\\=`, `is`, comparisons of numbers, `true`, `fail`, and exact arithmetic
with + - * / // mod min max. What it does not know is an error and no silent failure.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from hjax.errors import DataError, short_repr

_TOKEN = re.compile(
    r"\s+|%[^\n]*|(?P<number>\d+(?:\.\d+)?)|(?P<variable>[A-Z_]\w*)|(?P<atom>[a-z]\w*)"
    r"|'(?P<quoted>[^'\n]*)'"
    r"|(?P<sign>:-|\?-|=:=|=\\=|=<|>=|\\=|\\\+|//|[-+*/<>=(),.])"
)
_COMPARE = {
    "=:=": lambda a, b: a == b, "=\\=": lambda a, b: a != b, "<": lambda a, b: a < b,
    ">": lambda a, b: a > b, "=<": lambda a, b: a <= b, ">=": lambda a, b: a >= b,
}  # fmt: skip
_INFIX = (*_COMPARE, "=", "\\=", "is")
_BUILT_IN = {*((sign, 2) for sign in _INFIX), ("\\+", 1), ("true", 0), ("fail", 0)}
_DEPTH = 40  # of terms, and of negations within each other


class HornError(DataError):
    """A program that cannot be read or run; ``kind`` is ``syntax``, ``error`` or ``limit``."""


@dataclasses.dataclass(frozen=True)
class HornLimits:
    """Where an evaluation ends.

    Attributes:
      steps: goals that are tried.
      characters: of a program.
      bits: of a number, above and below the fraction's line.
      answers: solutions that are looked for.
    """

    steps: int = 10_000
    characters: int = 20_000
    bits: int = 256
    answers: int = 2


@dataclasses.dataclass(eq=False)
class Variable:
    """A variable; ``value`` None: not bound."""

    name: str
    value: Any = None


# A term: a Fraction, a Variable, or (name, *arguments); an atom has none.
Term = Any


@dataclasses.dataclass(frozen=True)
class Clause:
    """A head, and the goals from which it follows."""

    head: tuple[Any, ...]
    body: tuple[Term, ...]


Program = Mapping[tuple[str, int], Sequence[Clause]]


class _Reader:
    """Reads clauses from text."""

    def __init__(self, text: str, limits: HornLimits):
        if len(text) > limits.characters:
            raise HornError(f"program of {len(text)} characters", kind="limit")
        self._limits = limits
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise HornError(f"cannot read {short_repr(text[at : at + 20])}", kind="syntax")
            if found.lastgroup is not None:
                self._tokens.append((found.lastgroup, found[found.lastgroup]))
            at = found.end()
        self._tokens.append(("end", ""))
        self._at = 0
        self._names: dict[str, Variable] = {}

    @property
    def next(self) -> str:
        """The next sign; empty where something else stands."""
        kind, text = self._tokens[self._at]
        return text if kind == "sign" or text in ("is", "mod") else ""

    @property
    def ended(self) -> bool:
        return self._tokens[self._at][0] == "end"

    def take(self, sign: str) -> None:
        if self.next != sign:
            shown = short_repr(self._tokens[self._at][1])
            raise HornError(f"{sign!r} is missing before {shown}", kind="syntax")
        self._at += 1

    def skip(self, sign: str) -> bool:
        found = self.next == sign
        self._at += found
        return found

    def clause(self) -> Clause:
        self._names = {}
        head = self.goal(0)
        if not isinstance(head, tuple) or (head[0], len(head) - 1) in _BUILT_IN:
            raise HornError(f"head {short_repr(show(head))} is no predicate", kind="syntax")
        body = self.goals() if self.skip(":-") else ()
        self.take(".")
        return Clause(head, body)

    def goals(self) -> tuple[Term, ...]:
        found = [self.goal(0)]
        while self.skip(","):
            found.append(self.goal(0))
        return tuple(found)

    def goal(self, depth: int) -> Term:
        if self.skip("\\+"):
            return "\\+", self.goal(self._deeper(depth))
        left = self.sum(depth)
        if self.next in _INFIX:
            sign = self.next
            self._at += 1
            return sign, left, self.sum(depth)
        return left

    def sum(self, depth: int) -> Term:
        made = self.product(depth)
        while self.next in ("+", "-"):
            sign = self.next
            self._at += 1
            made = sign, made, self.product(depth)
        return made

    def product(self, depth: int) -> Term:
        made = self.primary(depth)
        while self.next in ("*", "/", "//", "mod"):
            sign = self.next
            self._at += 1
            made = sign, made, self.primary(depth)
        return made

    def primary(self, depth: int) -> Term:
        depth = self._deeper(depth)
        if self.skip("-"):
            inner = self.primary(depth)
            return -inner if isinstance(inner, Fraction) else ("-", Fraction(0), inner)
        if self.skip("("):
            made = self.goal(depth)
            self.take(")")
            return made
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "number":
            if len(text) > self._limits.bits:  # ``int`` takes 4,300 digits
                raise HornError(f"a number of {len(text)} characters", kind="limit")
            return checked_number(Fraction(text), self._limits)
        if kind == "variable":
            fresh = Variable(text)
            return fresh if text == "_" else self._names.setdefault(text, fresh)
        if kind not in ("atom", "quoted"):
            raise HornError(f"a term is missing before {short_repr(text)}", kind="syntax")
        if not self.skip("("):
            return (text,)
        arguments = [self.goal(depth)]
        while self.skip(","):
            arguments.append(self.goal(depth))
        self.take(")")
        return (text, *arguments)

    def names(self) -> dict[str, Variable]:
        """Variables of the last clause or goals, but for those that begin with `_`."""
        return {name: v for name, v in self._names.items() if not name.startswith("_")}

    def _deeper(self, depth: int) -> int:
        if depth >= _DEPTH:
            raise HornError(f"terms nested deeper than {_DEPTH}", kind="limit")
        return depth + 1


def checked_number(value: Fraction, limits: HornLimits) -> Fraction:
    """The number, or HornError if it is too large."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > limits.bits:
        raise HornError(f"a number of more than {limits.bits} bits", kind="limit")
    return value


def parse_program(
    text: str, limits: HornLimits = HornLimits()
) -> dict[tuple[str, int], list[Clause]]:
    """Clauses by name and number of arguments, in their order.

    Raises:
      HornError: it cannot be read, or is too long.
    """
    reader, found = _Reader(text, limits), dict[tuple[str, int], list[Clause]]()
    while not reader.ended:
        clause = reader.clause()
        found.setdefault((clause.head[0], len(clause.head) - 1), []).append(clause)
    return found


def solutions(
    program: Program, query: str, limits: HornLimits = HornLimits()
) -> list[dict[str, str]]:
    """The first solutions of a query: values by variable, as text; equal ones once.

    Args:
      query: goals, such as `fee(X), X > 2`.

    Raises:
      HornError: the query cannot be read; a predicate or function that does not exist, arithmetic
        with what is no number, a division by 0; more steps than there may be.
    """
    reader = _Reader(query, limits)
    goals = reader.goals()
    if not reader.ended:
        raise HornError("the query goes on behind its goals", kind="syntax")
    found: list[dict[str, str]] = []
    for _ in _Machine(program, limits).solve(goals, 0):
        values = {name: show(variable) for name, variable in reader.names().items()}
        if values not in found:
            found.append(values)
        if len(found) >= limits.answers:
            break
    return found


class _Machine:
    """Depth-first search with a trail; its stack is its own, so that no program exhausts
    Python's."""

    def __init__(self, program: Program, limits: HornLimits):
        self._program, self._limits = program, limits
        self._steps = 0
        self._trail: list[Variable] = []

    def solve(self, goals: Sequence[Term], negations: int) -> Iterator[None]:
        """Yields once for each solution, whose bindings hold until it goes on."""
        rest: Any = None
        for goal in reversed(goals):
            rest = goal, rest
        # What is left to prove, the trail's length before it, and the clauses still to be tried.
        choices: list[tuple[Any, int, Iterator[Clause] | None]] = [(rest, len(self._trail), None)]
        while choices:
            left, mark, clauses = choices.pop()
            self._undo(mark)
            if left is None:
                yield
                continue
            goal, after = left
            goal = value_of(goal)
            if clauses is None:
                self._step()
                name = _name(goal)
                if name in _BUILT_IN:
                    if self._built_in(goal, negations):
                        choices.append((after, len(self._trail), None))
                    continue
                if name not in self._program:
                    raise HornError(f"there is no predicate {name[0]}/{name[1]}", kind="error")
                clauses = iter(self._program[name])
            clause = next(clauses, None)
            if clause is None:
                continue
            choices.append(((goal, after), mark, clauses))
            head, body = _renamed(clause)
            if self._unify(goal, head):
                for each in reversed(body):
                    after = each, after
                choices.append((after, len(self._trail), None))

    def _step(self) -> None:
        self._steps += 1
        if self._steps > self._limits.steps:
            raise HornError(f"more than {self._limits.steps} steps", kind="limit")

    def _undo(self, mark: int) -> None:
        while len(self._trail) > mark:
            self._trail.pop().value = None

    def _built_in(self, goal: tuple[Any, ...], negations: int) -> bool:
        name, *arguments = goal
        if name == "\\+":
            if negations >= _DEPTH:
                raise HornError(f"negations nested deeper than {_DEPTH}", kind="limit")
            mark = len(self._trail)
            proved = next((True for _ in self.solve(arguments, negations + 1)), False)
            self._undo(mark)
            return not proved
        if name in _COMPARE:
            return bool(_COMPARE[name](*(self._number(each, 0) for each in arguments)))
        if name == "is":
            return self._unify(arguments[0], self._number(arguments[1], 0))
        if name == "=":
            return self._unify(*arguments)
        if name == "\\=":
            mark = len(self._trail)
            same = self._unify(*arguments)
            self._undo(mark)
            return not same
        return bool(name == "true")

    def _unify(self, left: Term, right: Term) -> bool:
        pairs = [(left, right)]
        while pairs:
            self._step()
            a, b = map(value_of, pairs.pop())
            if a is b:
                continue
            if isinstance(a, Variable) or isinstance(b, Variable):
                variable, other = (a, b) if isinstance(a, Variable) else (b, a)
                if _occurs(variable, other):
                    return False
                variable.value = other
                self._trail.append(variable)
            elif isinstance(a, Fraction) or isinstance(b, Fraction):
                if a != b:
                    return False
            elif a[0] != b[0] or len(a) != len(b):
                return False
            else:
                pairs.extend(zip(a[1:], b[1:]))
        return True

    def _number(self, term: Term, depth: int) -> Fraction:
        self._step()
        term = value_of(term)
        if isinstance(term, Fraction):
            return term
        if isinstance(term, Variable) or len(term) != 3 or depth > 4 * _DEPTH:
            raise HornError(f"{short_repr(show(term))} is no number", kind="error")
        sign, a, b = term[0], self._number(term[1], depth + 1), self._number(term[2], depth + 1)
        whole = a.denominator == b.denominator == 1
        if sign in ("/", "//", "mod") and b == 0:
            raise HornError("division by 0", kind="error")
        if sign in ("//", "mod") and not whole:
            raise HornError(f"{sign} of numbers that are not whole", kind="error")
        found = {
            "+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b,
            "//": lambda: Fraction(int(a / b)), "mod": lambda: a % b,
            "min": lambda: min(a, b), "max": lambda: max(a, b),
        }.get(sign)  # fmt: skip
        if found is None:
            raise HornError(f"there is no function {sign}/2", kind="error")
        return checked_number(found(), self._limits)


def value_of(term: Term) -> Term:
    """The term that a variable is bound to, or itself."""
    while isinstance(term, Variable) and term.value is not None:
        term = term.value
    return term


def show(term: Term, depth: int = 0) -> str:
    """A term as text; a number that is not whole as a decimal of at most 10 places, and what is
    nested deeper than terms of programs as `...`."""
    term = value_of(term)
    if depth > _DEPTH:
        return "..."
    if isinstance(term, Variable):
        return "_"
    if isinstance(term, Fraction):
        return str(term.numerator) if term.denominator == 1 else f"{float(term):.10g}"
    name, *arguments = term
    inner = ",".join(show(each, depth + 1) for each in arguments)
    return f"{name}({inner})" if arguments else str(name)


def _name(goal: Term) -> tuple[str, int]:
    if not isinstance(goal, tuple):
        raise HornError(f"{short_repr(show(goal))} cannot be proved", kind="error")
    return goal[0], len(goal) - 1


def _occurs(variable: Variable, term: Term) -> bool:
    waiting = [term]
    while waiting:
        each = value_of(waiting.pop())
        if each is variable:
            return True
        if isinstance(each, tuple):
            waiting.extend(each[1:])
    return False


def _renamed(clause: Clause) -> tuple[Term, tuple[Term, ...]]:
    """The clause with variables of its own."""
    known: dict[int, Variable] = {}

    def fresh(term: Term) -> Term:
        if isinstance(term, Variable):
            return known.setdefault(id(term), Variable(term.name))
        return (term[0], *map(fresh, term[1:])) if isinstance(term, tuple) else term

    return fresh(clause.head), tuple(map(fresh, clause.body))
