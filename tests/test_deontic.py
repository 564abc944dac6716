"""Horn clauses, fee schedules, and DeonticBench's grader with all its traps."""

import collections
import json
import shutil

import numpy as np
import pytest

from hjax.data.tasks import get_task
from hjax.data.tasks.fee_schedule import proved_fee
from hjax.data.tasks.horn import HornError, HornLimits, parse_program, solutions
from hjax.errors import ConfigError, DataError
from hjax.rewards import deontic

PROGRAM = """
tax(X, T) :- income(X, I), T is I // 10.   % whole dollars
income(ann, 700). income(bob, 35). income('de Vries', 1.5).
free(X) :- income(X, _), \\+ rich(X).
rich(X) :- income(X, I), I >= 100.
even(0).  even(N) :- N > 0, M is N - 2, even(M).
loop(X) :- loop(X).
deep(X) :- deep(s(X)).
wide(X) :- wide(X), wide(X).
wide(X) :- wide(s(X)).
pair(X, Y) :- item(X), item(Y), X \\= Y.  item(a). item(b).
"""


@pytest.mark.parametrize(
    "query, found",
    [
        ("tax(ann, T)", [{"T": "70"}]),
        ("tax(bob, T), T > 3", []),
        ("free(X)", [{"X": "bob"}, {"X": "de Vries"}]),
        ("even(40)", [{}]),
        ("even(41)", []),
        ("pair(X, Y)", [{"X": "a", "Y": "b"}, {"X": "b", "Y": "a"}]),
        ("X is 7 mod 4 + 2 * (3 - 1) / 8", [{"X": "3.5"}]),
        ("X is -7 // 2", [{"X": "-3"}]),
        ("X is max(1, 2) - min(3, 4)", [{"X": "-1"}]),
        ("X = f(Y, b), Y = a", [{"X": "f(a,b)", "Y": "a"}]),
        ("X = f(X)", []),
        ("0.1 + 0.2 =:= 0.3", [{}]),
        ("\\+ fail, true", [{}]),
    ],
)
def test_horn_clauses(query, found):
    assert solutions(parse_program(PROGRAM), query) == found


@pytest.mark.parametrize(
    "query, kind",
    [
        ("loop(1)", "limit"), ("deep(1)", "limit"), ("wide(1)", "limit"),
        ("X is 99999999999 * 99999999999 * 99999999999 * 99999999999 * 99999999999 * 9999999999"
         " * 99999999999 * 999999999999", "limit"),
        ("X is 1 / 0", "error"), ("X is ann + 1", "error"), ("X is Y", "error"), ("X < 2", "error"),
        ("nobody(1)", "error"), ("halt", "error"), ("X is foo(1, 2)", "error"), ("X", "error"),
        ("tax(ann", "syntax"), ("tax(ann, T). x", "syntax"), ("!", "syntax"), ("", "syntax"),
        ("(" * 100, "limit"), ("f(" * 100, "limit"), ("-" * 100 + "1", "limit"),
    ],
)  # fmt: skip
def test_what_cannot_be_proved_is_said(query, kind):
    with pytest.raises(HornError) as error:
        solutions(parse_program(PROGRAM), query)
    assert error.value.kind == kind


def test_programs_have_limits():
    with pytest.raises(HornError, match="characters"):
        parse_program("a. " * 10, HornLimits(characters=20))
    for text in ("a :- b", "1.", "X :- a.", "a(1) :- .", "true.", "a = b."):
        with pytest.raises(HornError):
            parse_program(text)


def test_fees_by_hand():
    facts = "n(17).t(8,3).r(5).m(60).w(g)."
    assert proved_fee(facts + "?fee(X)") == "60"  # 8 * 3 + 9 * 5 = 69, at most 60
    assert proved_fee(facts.replace("60", "99") + "?fee(X)") == "69"
    assert proved_fee(facts.replace("17", "7") + "?fee(X)") == "21"
    assert proved_fee(facts.replace("w(g)", "w(s)") + "?fee(X)") == "0"
    assert proved_fee(facts + "w(s).?fee(X)") == ""  # two answers
    assert proved_fee("n(17).?fee(X)") == "" == proved_fee("w(q).?fee(X)")
    # The rules stand, whatever a program says of them.
    assert proved_fee(facts + "fee(1).?fee(X)") == "60"
    for text in (facts, facts + "w(X):-w(X).?fee(X)"):
        with pytest.raises(HornError):
            proved_fee(text)


@pytest.mark.extended
def test_fee_schedules():
    task = get_task("fee_schedule", partial=0.2)
    records = task.examples("train", 3, 400)
    rng = np.random.default_rng(0)
    for record in records:
        schedule, case = record["prompt"].split(":")
        tier, rest = schedule.split("@")
        first, rest = rest.split("+")
        further, limit = rest.split("<")
        units = int(case[:-2])
        total = sum(int(first) if i < int(tier) else int(further) for i in range(units))
        fee = 0 if case[-2] == "s" else min(total, int(limit))
        assert record["answer"] == str(fee)
        assert task.is_correct(task.demonstration(record, rng), record)
        assert not task.is_correct(record["answer"], record)
        assert len(record["program"]) < task.response_length
    columns = {name: [record[name] for record in records] for name in ("answer", "program")}
    prompts = [record["prompt"] for record in records]

    def rewards(responses):
        return task.reward(prompts, responses, **columns)

    assert set(rewards(columns["program"])) == {1.0}
    most = collections.Counter(columns["answer"]).most_common(1)[0][0]
    assert np.mean(rewards([f"?X={most}"] * 400)) < 0.4  # a constant
    broken = [program.replace("?fee", "?fee(") for program in columns["program"]]
    assert rewards(broken) == pytest.approx([0.2] * 400)
    assert rewards(["w(X):-w(X).?fee(X)", "?X=1,X=2"] * 200) == [0.0] * 400
    direct = get_task("fee_schedule", mode="direct")
    assert direct.reward(prompts, columns["answer"], **columns) == [1.0] * 400


@pytest.mark.parametrize(
    "domain, output, answer",
    [
        ("airline", "Total cost: 1,234.50\n", "1234.5"),
        ("airline", "Total cost: $ 17", "17"),
        ("airline", "Total cost: 3\nTotal cost: 4", ""),
        ("airline", "Total cost: 3\nTotal cost: 3.0", "3"),
        ("airline", "Label: Total cost: 3\nTotal cost: 4", "4"),
        ("airline", "Total cost: inf", ""),
        ("airline", "Total cost: " + "9" * 400, ""),
        ("airline", "Total cost: 1e99", ""),
        ("sara_numeric", "Tax result: -0", "-0"),
        ("sara_binary", "Result: Entailment", "1"),
        ("sara_binary", "Result: Entailment\nResult: Contradiction", ""),
        ("housing", "housing_answer(no).", "no"),
        ("housing", "no", ""),
        ("uscis-aao", "The appeal is Dismissed", "Dismissed"),
        ("uscis-aao", "Label: Accepted", ""),
    ],
)
def test_printed_answers(domain, output, answer):
    assert deontic.printed_answer(domain, output) == answer


def test_labels_and_direct_answers():
    assert deontic.is_right("airline", "101", "100") and not deontic.is_right("airline", "102", 100)
    assert deontic.is_right("sara_binary", "1", "Entailment")
    assert not deontic.is_right("airline", "", "0")
    assert deontic.direct_answer("housing", "No, or rather: Yes.") == "yes"
    assert deontic.direct_answer("airline", "3 bags at 40 are $120") == "120"
    for domain, label in (("airline", "Accepted"), ("housing", "maybe"), ("tax", "1")):
        with pytest.raises(DataError, match="label|domain"):
            deontic.is_right(domain, "1", label)


def test_programs_and_their_similarity():
    assert deontic.program_of("a\n```python\nx\n```\n```prolog\np.\n```") == "p.\n"
    assert deontic.program_of("```\nq.\n```") == "q.\n" and deontic.program_of("r.") == "r."
    reference = "cost(X, Y) :- bag(X).\nbag(a).\nbag(b).\n% old(1)\n"
    assert deontic.predicates(reference) == {("cost", 2), ("bag", 1)}
    assert deontic.similarity("bag(c).\nnew.\n", reference) == pytest.approx(1 / 3)


def test_an_abstention_counts_as_the_other_class():
    assert deontic.macro_f1(["1", "0", "", "1"], ["1", "0", "1", "1"]) == pytest.approx(
        (2 * 2 / (2 + 3) + 2 * 1 / (2 + 1)) / 2
    )


def test_rows_are_read_and_show_no_reference(tmp_path):
    row = {
        "id": 7, "text": "Ann flies.", "question": "What does it cost?", "statutes": "A bag is 40.",
        "label": 40, "reference_prolog": ":- format('Label: 40').",
    }  # fmt: skip
    path = tmp_path / "airline.jsonl"
    path.write_text(json.dumps(row) + "\n")
    for mode in ("prolog", "direct"):
        [found] = deontic.read_rows(path, "airline", mode)
        assert "Total cost: N" in found["prompt"] and "Label" not in found["prompt"]
        assert (found["label"], found["mode"]) == ("40", mode)
    assert deontic.reward(
        [""], ["It is $40"], domain=["airline"], label=["40"], mode=["direct"]
    ) == [1]
    path.write_text(json.dumps([{**row, "question": None}]))
    with pytest.raises(DataError, match="row 0.*question"):
        deontic.read_rows(path, "airline")


def test_without_swi_prolog_it_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="swi-prolog-nox"):
        deontic.PrologRunner()


TRAPS = {
    ":- format('Total cost: 12~n').": ("12", "ok"),
    ":- halt.\n:- format('Total cost: 12~n').": ("", "none"),
    ":- writeln('Label: 3'), writeln('Total cost: 4').": ("4", "ok"),
    ":- writeln('Total cost: 3'), writeln('Total cost: 4').": ("", "none"),
    ":- writeln('Total cost: $1,234.50').": ("1234.5", "ok"),
    ":- nobody(1).": ("", "error"),
    "this is no program": ("", "error"),
    "p :- p.\n:- p.": ("", "timeout"),
}


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("swipl"), reason="SWI-Prolog is not here")
def test_swi_prolog_in_the_sandbox():
    runner = deontic.PrologRunner(seconds=4)
    found = {program: runner.run(program, "airline") for program in TRAPS}
    assert {program: (x.answer, x.kind) for program, x in found.items()} == TRAPS


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("swipl"), reason="SWI-Prolog is not here")
def test_the_command_grades_references(tmp_path, capsys):
    row = {"question": "?", "statutes": "", "text": ""}
    programs = {"12": ":- format('Total cost: 12~n').", "13": ":- format('Label: 13').", "5": ""}
    lines = [{**row, "label": k, "reference_prolog": v} for k, v in programs.items()]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    deontic.main([str(tmp_path / "a.jsonl"), "--domain=airline"])
    said = json.loads(capsys.readouterr().out)
    assert (said["references"], said["right"], said["kinds"]) == (2, 1, {"ok": 1, "none": 1})
    assert said["others"] == [{"id": 1, "label": "13", "answer": "", "kind": "none"}]
    answers = [f"```prolog\n{programs['12']}\n```", "nothing here"]
    columns = {"domain": ["airline"] * 2, "label": ["12"] * 2, "reference_prolog": [""] * 2}
    assert deontic.reward(["", ""], answers, **columns) == [1.0, 0.0]
