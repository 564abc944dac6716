"""Built-in task: fees by a schedule of tiers and limits, as a number or as a program."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np

from hjax.data.tasks.horn import HornError, Program, parse_program, solutions
from hjax.data.tasks.task import Task, choice, option, register

# What every program is read with: the schedule's rules, of the facts that a program states.
RULES = """
fee(0) :- w(s).
fee(F) :- w(g), n(N), t(T, A), r(B), m(M), sum(N, T, A, B, S), F is min(S, M).
sum(N, T, A, _, S) :- N =< T, S is N * A.
sum(N, T, A, B, S) :- N > T, S is T * A + (N - T) * B.
"""
_MOST_TIER, _MOST_RATE, _LIMITS = 9, 9, range(20, 100)


@register
@dataclasses.dataclass(frozen=True)
class FeeSchedule(Task):
    """Fees by rules, as DeonticBench asks for: "8@3+5<60:17g=" is a schedule and a case. The first
    8 units cost 3 each and further ones 5, at most 60 in all; a guest (g) takes 17 units; staff
    (s) pays nothing. With the mode `program` a response states facts and asks, such as
    "n(17).t(8,3).r(5).m(60).w(g).?fee(X)", and an evaluator of clauses (`hjax.data.tasks.horn`)
    proves the answer; with `direct` it is the number. A program with two answers or none is wrong.

    Options:
      mode: `program` or `direct`.
      units: most units of a case (10 to 99).
      staff: share of the cases of staff (0 to 0.9).
      partial: paid for programs that cannot be run, times the similarity of their predicates to
        the right ones (DeonticBench: 0.2); of the mode `direct` for right digits (see Task).
    """

    name: ClassVar[str] = "fee_schedule"

    mode: str = choice("program", "direct")
    units: int = option(30, 10, 99)
    staff: float = option(0.2, 0.0, 0.9)

    alphabet = "0123456789@+<:gs=ntrmwfeX().,?"

    @property
    def size(self) -> int:
        return 2**63

    @property
    def response_length(self) -> int:
        return len("n(99).t(9,9).r(9).m(99).w(g).?fee(X)") + 1 if self.mode == "program" else 4

    def record(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        case: dict[str, Any] = {
            "tier": int(rng.integers(1, _MOST_TIER + 1)),
            "first": int(rng.integers(1, _MOST_RATE + 1)),
            "further": int(rng.integers(1, _MOST_RATE + 1)),
            "limit": int(rng.choice(_LIMITS)),
            "units": int(rng.integers(1, self.units + 1)),
            "who": "s" if rng.random() < self.staff else "g",
        }
        below = min(case["units"], case["tier"])
        total = below * case["first"] + (case["units"] - below) * case["further"]
        fee = 0 if case["who"] == "s" else min(total, case["limit"])
        prompt = "{tier}@{first}+{further}<{limit}:{units}{who}=".format(**case)
        program = "n({units}).t({tier},{first}).r({further}).m({limit}).w({who}).?fee(X)"
        return {"prompt": prompt, "answer": str(fee), "program": program.format(**case)}

    def demonstration(self, record: dict[str, Any], rng: np.random.Generator) -> str:
        return record["program"] if self.mode == "program" else record["answer"]

    def is_correct(self, response: str, record: dict[str, Any]) -> bool:
        if self.mode == "direct":
            return response == record["answer"]
        try:
            return proved_fee(response) == record["answer"]
        except HornError:
            return False

    def closeness(self, response: str, record: dict[str, Any]) -> float:
        if self.mode == "direct":
            return super().closeness(response, record)
        try:
            proved_fee(response)
        except HornError as error:
            if error.kind == "limit":
                return 0.0
            own, theirs = (_stated(text) for text in (response, record["program"]))
            return len(own & theirs) / len(own | theirs)
        return 0.0  # it can be run, and is wrong


def proved_fee(response: str) -> str:
    """The one answer of a program and its query; empty where there are several or none.

    Raises:
      HornError: it cannot be read or run.
    """
    facts, sign, query = response.rpartition("?")
    if not sign:
        raise HornError("there is no query", kind="syntax")
    program: dict[tuple[str, int], Any] = parse_program(facts)
    rules: Program = parse_program(RULES)
    # What is nowhere stated is not so; the rules cannot be changed.
    asked = dict.fromkeys((("n", 1), ("t", 2), ("r", 1), ("m", 1), ("w", 1)), ())
    found = solutions({**asked, **program, **rules}, query)
    values = {value for each in found for value in each.values()}
    return values.pop() if len(values) == 1 else ""


def _stated(text: str) -> set[tuple[str, int]]:
    """Predicates of the facts that can be read on their own."""
    found: set[tuple[str, int]] = set()
    for part in text.rpartition("?")[0].split("."):
        try:
            found |= set(parse_program(f"{part}.")) if part else set()
        except HornError:
            continue
    return found
