"""Table 2 of the paper in every case of up to 16 devices, compiled, run and counted.

Extended runs take the cases of up to 4 devices and the worked example, slow ones all.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SWEEP = """
import gc, json
import transition_page
from hjax.machine import simulated_devices
from transition_page import cases_table, measured_rows, transition_markdown
known = transition_page.cases
transition_page.cases = lambda devices: [
    case for case in known(devices) if case.devices <= WHOLE or case == transition_page.EXAMPLE
]
gc.freeze()  # each case collects; what was imported need not be looked through every time
rows = list(measured_rows(simulated_devices(max(WHOLE, 8))))
print(json.dumps({"rows": rows, "text": transition_markdown(rows), "table": cases_table(rows)}))
"""


# Cases of so many devices or fewer; of 4, and the worked example.
CASES = {4: 22, 8: 56, 16: 126}
EXAMPLE = (1, 4, 2, 1, 2)
ALL = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", params=[4, *(pytest.param(n, marks=ALL) for n in (8, 16))])
def sweep(request):
    """All rows, the page and the table of RESULTS.md, of cases of so many devices or fewer."""
    code = SWEEP.replace("WHOLE", str(request.param))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1100, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"devices": request.param}


def named(row):
    (p, t, d), (p_g, t_g) = row["train"], row["generate"]
    return p, t, d, p_g, t_g


def rows_of(sweep, *methods):
    return [(named(row), row) for row in sweep["rows"] if row["method"] in methods]


def grouped(case, place, keep):
    """Ranks whose places agree in these coordinates."""
    found = {}
    for rank in range(case[0] * case[1] * case[2]):
        at = place(rank, *case)
        found.setdefault(tuple(at[i] for i in keep), []).append(rank)
    return sorted(found.values())


# What the members of a group have in common, of a place (replica, pipe, tensor, micro).
IN_COMMON = {"tensor": (0, 1, 3), "pipe": (0, 2, 3), "micro_data": (0, 1, 2)}


def trained(rank, p, t, d, p_g, t_g):
    """Rank (D p + P) t + T: its D, P and T."""
    return rank // (p * t), rank // t % p, rank % t


def zero_redundancy(rank, p, t, d, p_g, t_g):
    """Tensor and pipeline groups at intervals t / t_g and p / p_g; micro groups consecutive."""
    replica, stage, part = trained(rank, p, t, d, p_g, t_g)
    wide, deep = t // t_g, p // p_g
    return replica, stage // deep, part // wide, (stage % deep) * wide + part % wide


def vanilla(rank, p, t, d, p_g, t_g):
    """Consecutive ranks form tensor groups, then pipelines."""
    q = rank % (p * t)
    return rank // (p * t), q // t_g % p_g, q % t_g, q // (t_g * p_g)


def test_every_case_is_there(sweep):
    sizes = [1, 2, 4, 8, 16]
    expected = {
        (p, t, d, p_g, t_g)
        for p in sizes for t in sizes for d in sizes for p_g in sizes for t_g in sizes
        if p * t * d <= sweep["devices"] and p_g <= p and t_g <= t
    } | {EXAMPLE}  # fmt: skip
    assert len(expected) == CASES[sweep["devices"]]
    for method in ("hybridflow", "vanilla", "gather_all"):
        assert {case for case, _ in rows_of(sweep, method)} == expected
    assert all(row["executed"] for row in sweep["rows"])


def test_received_bytes_are_the_formulas(sweep):
    for (p, t, d, p_g, t_g), row in rows_of(sweep, "hybridflow", "vanilla", "gather_all"):
        shards = {"hybridflow": p * t, "vanilla": p * t, "gather_all": p * t * d}[row["method"]]
        formula = (shards - 1) / shards
        if row["method"] == "hybridflow":
            formula = (t * p - t_g * p_g) / (t_g * p_g * t * p)
        assert row["measured"]["communication"] == pytest.approx(formula, rel=1e-12), row
        assert row["analytic"]["communication"] == pytest.approx(formula, rel=1e-12)
        assert row["back_bytes"] == 0


def test_plain_resharding_receives_what_is_missing_at_least_and_the_formula_s_at_most(sweep):
    """It knows no method; what a device lacks is by the shards that it holds before and after."""
    for (p, t, *_), row in rows_of(sweep, "hybridflow", "vanilla"):
        pairs = [(set(a), set(b)) for a, b in zip(*row["holdings"], strict=True)]
        missing = max(len(after - before) for before, after in pairs) / (p * t)
        outside = max(len(before - after) for before, after in pairs) / (p * t)
        plain, formula = row["resharded"], row["analytic"]["communication"]
        assert missing - 1e-9 <= plain["communication"] <= formula + 1e-9, row
        assert plain["redundancy"] == pytest.approx(outside)
        if row["method"] == "hybridflow":
            assert missing == pytest.approx(formula) and outside == 0
    for _, row in rows_of(sweep, "gather_all"):
        for what, share in row["resharded"].items():
            assert share <= row["analytic"][what] + 1e-9, row


def test_the_document_says_which_programs_were_written_to_the_formula(sweep):
    lines = sweep["text"].splitlines()
    (head,) = (n for n, line in enumerate(lines) if line.startswith("| to the shards of | by |"))
    rows = [[cell.strip() for cell in x.split("|")[1:-1]] for x in lines[head + 2 : head + 8]]
    kinds = [("hybridflow", "hjax's transition", "no"), ("vanilla", "gather and cut", "yes"),
             ("gather_all", "gather and cut", "yes")]  # fmt: skip
    kinds += [(method, "plain resharding", "no") for method, *_ in kinds]
    assert [tuple(row[:3]) for row in rows] == kinds
    number = CASES[sweep["devices"]]
    for (method, _, written), row in zip(kinds, rows, strict=True):
        how = "resharded" if row[1] == "plain resharding" else "measured"
        pairs = [(x[how]["communication"], x["analytic"]["communication"])
                 for _, x in rows_of(sweep, method)]  # fmt: skip
        same = sum(a == pytest.approx(b) for a, b in pairs)
        less = sum(a < b - 1e-9 for a, b in pairs)
        assert row[3:6] == [str(same), str(less), str(number - same - less)]
        if written == "yes":
            assert same == number


def test_arrays_not_split_over_all_of_training_are_named_apart(sweep):
    for (_, t, *_), row in rows_of(sweep, "hybridflow", "vanilla"):
        assert list(row["unsharded"]) == (["norm"] if t > 1 else []), row
        assert row["model_bytes"] == 4 * 16 * 2 * 16 * 4 + (16 * 2 * 4 if t == 1 else 0)


def test_nothing_is_redundant_but_in_the_other_methods(sweep):
    for (p, t, d, *_), row in rows_of(sweep, "hybridflow", "vanilla", "gather_all"):
        parts = {"hybridflow": float("inf"), "vanilla": p * t, "gather_all": p * t * d}
        expected = 1 / parts[row["method"]]
        assert (
            row["measured"]["redundancy"]
            == pytest.approx(expected)
            == row["analytic"]["redundancy"]
        ), row


def test_the_peak_is_the_generation_shard_and_a_bucket(sweep):
    for (p, t, _, p_g, t_g), row in rows_of(sweep, "hybridflow"):
        bucket = row["bucket_bytes"] / row["model_bytes"]
        assert row["analytic"]["peak"] == 1 / (p_g * t_g)
        assert row["measured"]["peak"] <= 1 / (p_g * t_g) + bucket, row
        # Of four buckets the last is moved with its source; nothing else is there twice.
        moved = (p, t) != (p_g, t_g)
        assert row["measured"]["peak"] <= 1 / (p_g * t_g) + moved / (p * t) / 4 + 1e-9, row


def test_the_others_hold_the_whole_model(sweep):
    for (p, t, d, p_g, t_g), row in rows_of(sweep, "vanilla", "gather_all"):
        kept = 1 / (p * t) if row["method"] == "vanilla" else 1 / (p * t * d)
        most = max(1 + kept / 4, 1 / (p_g * t_g) + kept + 1 / 4, kept + 1 / (p_g * t_g))
        assert 1 <= row["measured"]["peak"] <= most + 1 / 4 + 1e-9, row


def test_training_groups_are_the_papers(sweep):
    keep = {"tensor": (0, 1), "pipe": (0, 2), "data": (1, 2)}
    for case, row in rows_of(sweep, "hybridflow", "vanilla", "gather_all"):
        expected = {kind: grouped(case, trained, same) for kind, same in keep.items()}
        assert row["train_groups"] == expected, case


@pytest.mark.parametrize(
    "place, methods",
    [(zero_redundancy, ["hybridflow"]), (vanilla, ["vanilla", "gather_all"])],
    ids=["hybridflow", "vanilla"],
)
def test_generation_groups_are_the_papers(sweep, place, methods):
    for case, row in rows_of(sweep, *methods):
        expected = {kind: grouped(case, place, same) for kind, same in IN_COMMON.items()}
        assert row["groups"] == expected, case


def test_the_worked_example(sweep):
    """8 devices, 1-4-2 to 1-2-2-2, from the paper's 1-based figure."""
    rows = dict((row["method"], row) for case, row in rows_of(sweep, "hybridflow", "vanilla")
                if case == EXAMPLE)  # fmt: skip
    assert rows["hybridflow"]["groups"]["tensor"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rows["hybridflow"]["groups"]["micro_data"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows["hybridflow"]["train_groups"]["tensor"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    before, after = rows["vanilla"]["holdings"]
    apart = [r for r in range(8) if not set(before[r]) & set(after[r])]
    assert apart == [1, 2, 5, 6]  # 2, 3, 6, 7 of the paper


def test_a_generation_shard_contains_the_training_shard(sweep):
    for (p, t, _, p_g, t_g), row in rows_of(sweep, "hybridflow"):
        before, after = row["holdings"]
        for rank, (train, generate) in enumerate(zip(before, after, strict=True)):
            assert train == [rank % (p * t)]
            assert set(train) <= set(generate) and len(generate) == p * t // (p_g * t_g), row


def test_the_document_is_up_to_date(sweep):
    written = (ROOT / "docs" / "transition.md").read_text()
    table = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    again = "run python docs/generate/transition_page.py"
    if sweep["devices"] == 16:
        assert written == sweep["text"], again
        assert sweep["table"] in table, again
    cases = {line for line in sweep["table"].splitlines() if " → " in line}
    assert len(cases) == CASES[sweep["devices"]]
    assert cases <= set(table.splitlines()), again
