"""DeonticBench (arXiv 2604.04443): rows, output rules, grader and reward of its five domains.

    python -m hjax.rewards.deontic FILE.jsonl --domain=airline     # grades the reference programs

A policy answers directly, or writes a program that SWI-Prolog runs in the sandbox. Its files are
not part of hjax. An answer is what a program prints, by its domain's rule; a line `Label: ...` is
never read, since reference programs print their label there whatever they have computed.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError, DataError, short_repr
from hjax.sandbox.local_sandbox import LocalSandbox, Sandbox, SandboxLimits
from hjax.user_input import parse_json, read_file

ABSTAINED = ""
# Of an answer that counts: beyond these nobody means a sum of money.
# Nothing in it is tried at many lengths: a response may be thousands of digits or spaces.
_NUMBER = r"(-?[\d,]{1,24}(?:\.\d{1,12})?)(?!\.*\d|[eE][+-]?\d)"
# Share of the reward of a program that cannot be executed.
ATTEMPT = 0.2


@dataclasses.dataclass(frozen=True)
class Domain:
    """A set of cases.

    Attributes:
      pattern: of the answer in what a program prints; its group is the answer.
      answers: how an answer that was printed, or a label, is written here, by its lower-case form;
        empty: a number, right within 1.
      direct: pattern of an answer in a response without a program.
    """

    pattern: str
    answers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    direct: str = ""


_YES_NO = {"yes": "yes", "no": "no"}
_CLAIM = {"entailment": "1", "contradiction": "0", "1": "1", "0": "0"}
_APPEAL = {"accepted": "Accepted", "dismissed": "Dismissed"}
DOMAINS = {
    "sara_numeric": Domain(rf"Tax result:\s*(?:\$\s*)?{_NUMBER}", direct=_NUMBER),
    "airline": Domain(rf"Total cost:\s*(?:\$\s*)?{_NUMBER}", direct=_NUMBER),
    "sara_binary": Domain(
        r"Result:\s*(Entailment|Contradiction)\b", _CLAIM, r"\b(Entailment|Contradiction|[01])\b"
    ),
    "housing": Domain(r"housing_answer\((yes|no)\)", _YES_NO, r"\b(yes|no)\b"),
    "uscis-aao": Domain(r"\b(Accepted|Dismissed)\b", _APPEAL, r"\b(Accepted|Dismissed)\b"),
}


def domain_of(name: Any) -> Domain:
    """The domain of a name; DataError lists what there is."""
    if name not in DOMAINS:
        raise DataError(f"domain={short_repr(name)}: must be one of {', '.join(DOMAINS)}")
    return DOMAINS[name]


def printed_answer(domain: str, output: str) -> str:
    """The answer in what a program printed; ``ABSTAINED`` without one, or with two that differ."""
    rules = domain_of(domain)
    lines = [line for line in output.splitlines() if not line.strip().lower().startswith("label:")]
    flags = 0 if domain == "uscis-aao" else re.IGNORECASE
    found = {_canonical(rules, each) for each in re.findall(rules.pattern, "\n".join(lines), flags)}
    return found.pop() if len(found) == 1 else ABSTAINED


def direct_answer(domain: str, response: str) -> str:
    """The last answer that a response without a program names; ``ABSTAINED`` without one."""
    rules = domain_of(domain)
    found = re.findall(rules.direct, response, re.IGNORECASE)
    return _canonical(rules, found[-1]) if found else ABSTAINED


def _canonical(rules: Domain, text: str) -> str:
    if rules.answers:
        return rules.answers.get(text.strip().lower(), ABSTAINED)
    digits = text.replace(",", "").replace("$", "").strip()
    try:
        return f"{float(digits):.10g}"
    except ValueError:
        return ABSTAINED


def is_right(domain: str, answer: str, label: Any) -> bool:
    """Whether an answer is the label: numbers within 1.

    Raises:
      DataError: a label that is no answer of the domain.
    """
    rules = domain_of(domain)
    wanted = _canonical(rules, str(label))
    if wanted == ABSTAINED:
        raise DataError(f"label={short_repr(label)}: no answer of the domain {domain}")
    if answer == ABSTAINED or rules.answers:
        return answer == wanted
    return abs(float(answer) - float(wanted)) <= 1


def program_of(response: str) -> str:
    """The program of a response: its last ```prolog fence, else its last fence, else all of it."""
    fences = re.findall(r"```([\w-]*)[^\n]*\n(.*?)```", response, re.DOTALL)
    own = [block for name, block in fences if name.lower() == "prolog"]
    return (own or [block for _, block in fences] or [response])[-1]


def predicates(program: str) -> set[tuple[str, int]]:
    """Signatures (name, arguments) of what a program defines, roughly: of text at line starts."""
    text = re.sub(r"%[^\n]*|/\*.*?\*/", "", program, flags=re.DOTALL)
    found = set()
    for name, arguments in re.findall(r"(?m)^\s*([a-z]\w*)\s*(\((?:[^()]|\([^()]*\))*\))?", text):
        inner = re.sub(r"\([^()]*\)|\[[^\]]*\]", "", arguments[1:-1])
        found.add((name, 0 if not arguments else inner.count(",") + 1))
    return found


def similarity(program: str, reference: str) -> float:
    """Jaccard's similarity of the predicates that two programs define, 0 to 1."""
    own, theirs = predicates(program), predicates(reference)
    return len(own & theirs) / max(len(own | theirs), 1)


@dataclasses.dataclass(frozen=True)
class ProgramAnswer:
    """What a program came to: ``answer``, and ``kind``: ``ok``, ``none`` (no or several answers),
    ``error``, ``timeout``."""

    answer: str
    kind: str


class PrologRunner:
    """Runs programs with SWI-Prolog in a sandbox.

    Raises:
      ConfigError: there is no `swipl` here, or its library cannot be loaded, so that programs
        would fail silently.
    """

    def __init__(self, sandbox: Sandbox | None = None, seconds: float = 10.0):
        found = shutil.which("swipl")
        if sandbox is None and found is None:
            raise ConfigError(
                "DeonticBench's programs need SWI-Prolog, and there is no swipl in PATH: install "
                "it (Debian: swi-prolog-nox), or answer directly (mode=direct)"
            )
        self._command = [found or "swipl", "-q", "-f", "program.pl"]
        self._sandbox = sandbox or LocalSandbox()
        self._limits = SandboxLimits(cpu_seconds=seconds, wall_seconds=3 * seconds)
        probe = ":- use_module(library(lists)).\n"
        probe += ":- member(X, [7]), format('Total cost: ~w~n', [X])."
        if (said := self.run(probe, "airline")).answer != "7":
            raise ConfigError(
                f"swipl does not find its library (member/2 of a list: {said.kind}): programs that "
                "use it would fail silently; reinstall SWI-Prolog"
            )

    def run(self, program: str, domain: str) -> ProgramAnswer:
        """Run a program, with nothing on its standard input."""
        name = self._sandbox.create()
        try:
            self._sandbox.write(name, "program.pl", program.encode("utf-8", "replace"))
            done = self._sandbox.exec(name, self._command, limits=self._limits)
        finally:
            self._sandbox.kill(name)
        if done.ended_by:
            late = done.ended_by in ("cpu", "wall")
            return ProgramAnswer(ABSTAINED, "timeout" if late else "error")
        answer = printed_answer(domain, done.stdout.decode("utf-8", "replace"))
        if answer != ABSTAINED:
            return ProgramAnswer(answer, "ok")
        return ProgramAnswer(ABSTAINED, "error" if done.stderr.strip() or done.status else "none")


@functools.cache
def _runner() -> PrologRunner:
    return PrologRunner()


def reward(
    prompts: Sequence[str], responses: Sequence[str], **columns: Sequence[Any]
) -> list[float]:
    """1 for the label. A program that cannot be executed: up to ``ATTEMPT``, by the similarity of
    its predicates to the reference's; a wrong answer or none: 0.

    Columns: ``domain``, ``label``, ``mode`` (`prolog`, else `direct`), ``reference_prolog``.
    """
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(responses))]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        return list(pool.map(_reward, responses, rows))


def _reward(response: str, row: Mapping[str, Any]) -> float:
    domain, label = row["domain"], row["label"]
    if row.get("mode", "prolog") == "direct":
        return float(is_right(domain, direct_answer(domain, response), label))
    program = program_of(response)
    said = _runner().run(program, domain)
    if said.kind == "error":
        return ATTEMPT * similarity(program, row.get("reference_prolog") or "")
    return float(is_right(domain, said.answer, label))


def read_rows(path: str | Path, domain: str, mode: str = "prolog") -> list[dict[str, Any]]:
    """Rows of a file of the benchmark as rows for ``data.path``; no prompt shows a reference.

    Args:
      path: a .json or .jsonl file of rows with ``question``, ``statutes`` and ``label``; most have
        ``text``, those of housing ``state``.
      mode: what the prompt asks for, ``prolog`` or ``direct``.

    Raises:
      DataError: a row that lacks one of these, or whose label is no answer of the domain.
    """
    if mode not in ("prolog", "direct"):
        raise DataError(f"mode={mode!r}: must be prolog or direct")
    content = read_file(Path(path))
    whole = content.lstrip().startswith(b"[")
    texts = [content] if whole else [line for line in content.splitlines() if line.strip()]
    rows = [parse_json(text, str(path)) for text in texts]
    rows = rows[0] if whole else rows
    made = []
    for number, row in enumerate(rows):
        row = row if isinstance(row, dict) else {}
        missing = [name for name in ("question", "statutes", "label") if row.get(name) is None]
        if missing:
            raise DataError(f"{path}, row {number}: there is no {missing[0]!r}")
        is_right(domain, ABSTAINED, row["label"])
        made.append(
            {
                "prompt": _prompt(row, domain, mode),
                "domain": domain,
                "mode": mode,
                "label": str(row["label"]),
                "reference_prolog": row.get("reference_prolog") or "",
                "id": row.get("id", number),
            }
        )
    return made


_FORMS = {
    "sara_numeric": "Tax result: N",
    "airline": "Total cost: N",
    "sara_binary": "Result: Entailment` or `Result: Contradiction",
    "housing": "housing_answer(yes).` or `housing_answer(no).",
    "uscis-aao": "Accepted` or `Dismissed",
}


def _prompt(row: Mapping[str, Any], domain: str, mode: str) -> str:
    parts = [f"Rules:\n{row['statutes']}"]
    parts += [f"State: {row['state']}"] if row.get("state") else []
    parts += [f"Case:\n{row['text']}"] if row.get("text") else []
    parts += [f"Question: {row['question']}"]
    wanted = f"`{_FORMS[domain]}`"
    if mode == "direct":
        return "\n\n".join([*parts, f"Answer in the form {wanted}."])
    task = f"Write a Prolog program in a ```prolog block that prints {wanted} when it is loaded."
    return "\n\n".join([*parts, task])


def macro_f1(answers: Sequence[str], labels: Sequence[str]) -> float:
    """Mean F1 of the two classes of ``labels``; an abstention counts as the opposite class (the
    paper; its script counts accuracy)."""
    classes = sorted(set(labels))
    scores = []
    for own in classes:
        said = [a == own or (a == ABSTAINED and y != own) for a, y in zip(answers, labels)]
        hits = sum(s and y == own for s, y in zip(said, labels, strict=True))
        scores.append(2 * hits / max(sum(said) + sum(y == own for y in labels), 1))
    return sum(scores) / max(len(scores), 1)


def grade_references(path: str | Path, domain: str, at_once: int = 2) -> dict[str, Any]:
    """Run the reference programs of a file: counts, accuracy, and which do not give their label."""
    rows = [row for row in read_rows(path, domain) if row["reference_prolog"]]
    runner = PrologRunner()
    with ThreadPoolExecutor(at_once) as pool:
        said = list(pool.map(lambda row: runner.run(row["reference_prolog"], domain), rows))
    right = [is_right(domain, each.answer, row["label"]) for each, row in zip(said, rows)]
    labels = [_canonical(domain_of(domain), row["label"]) for row in rows]
    kinds = collections.Counter(each.kind for each in said)
    return {
        "domain": domain,
        "references": len(rows),
        "right": sum(right),
        "accuracy": sum(right) / max(len(rows), 1),
        "macro_f1": macro_f1([each.answer for each in said], labels)
        if domain_of(domain).answers
        else None,
        "kinds": dict(kinds),
        "others": [
            {"id": row["id"], "label": row["label"], "answer": each.answer, "kind": each.kind}
            for row, each, good in zip(rows, said, right, strict=True)
            if not good
        ],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: prints one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m hjax.rewards.deontic", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--domain", choices=sorted(DOMAINS), required=True)
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(grade_references(options.file, options.domain)))
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
