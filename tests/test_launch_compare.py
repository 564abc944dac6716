"""`hjax.launch.compare`: one page on several runs."""

import json

import pytest
from test_launch_report import EVIL, evil, read
from written_run import written_run

from hjax.launch.compare import main


@pytest.fixture
def runs(tmp_path):
    """Two runs, of which the second has another seed, better rewards and a metric of its own."""
    paths = []
    for seed, name in enumerate(("first", "second")):
        (tmp_path / name).mkdir()
        paths.append(written_run(tmp_path / name, seed))
    metrics = paths[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows:
        row |= {"reward/mean": row["reward/mean"] + 1, "only/here": row["step"]}
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def test_a_page_on_two_runs(runs, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main([*map(str, runs), f"--output={page}"]) == 0
    assert "2 runs" in capsys.readouterr().out
    checker, text = read(page)
    flat = " ".join(text.split())
    for part in ("first", "second", "Configs: what differs", "seed", "answer 4", "TPU v9"):
        assert part in flat, part
    assert "algorithm.cost_limit" not in flat  # it does not differ
    charts = [json.loads(v) for k, v in checker.attributes if k == "data-chart"]
    by_first = {tuple(s["name"] for s in c["series"]): c for c in charts}
    rewards = charts[0]["series"]
    assert [s["name"] for s in rewards] == ["first", "second"]
    assert [s["values"][-1] for s in rewards] == pytest.approx([0.8, 1.8])
    assert rewards[0]["color"] != rewards[1]["color"]
    assert ("second",) in by_first  # a metric of one run alone


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["first"], "1 runs are given"),
        (["first", "first"], "is given twice"),
        (["first", "nowhere"], "no run is here"),
        (["first", "second", "--output=first/config.json/x.html"], "--output="),
        (["first", "second", "--outputs=x"], "outputs"),
    ],
)
def test_wrong_input_is_one_line(runs, given, said, monkeypatch, capsys):
    monkeypatch.chdir(runs[0].parent)
    assert main(given) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_no_text_of_a_run_becomes_markup(runs, tmp_path):
    for path in [file for run in runs for file in run.glob("*.json*")]:
        rows = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(evil(json.loads(row))) + "\n" for row in rows))
    page = tmp_path / "page.html"
    assert main([*map(str, runs), f"--output={page}"]) == 0
    checker, text = read(page)
    assert "evil" not in checker.tags and EVIL.replace("\x1b", "·") in text
