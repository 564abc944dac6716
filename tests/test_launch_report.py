"""report.html: self-contained, escaped, and there for runs at any stage."""

import html.parser
import json
import re

import pytest
from written_run import write_rows, written_run

from hjax.show.report import write_report


class Checker(html.parser.HTMLParser):
    """Collects tags, text and attributes; every opened tag must be closed."""

    VOID = {"meta", "br", "link", "img", "input"}

    def __init__(self):
        super().__init__()
        self.open, self.text, self.attributes, self.tags = [], [], [], set()

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(path):
    checker = Checker()
    checker.feed(path.read_text())
    assert checker.open == []
    return checker, " ".join(checker.text)


@pytest.fixture
def run(tmp_path):
    return written_run(tmp_path)


def test_report_holds_every_part(run):
    _, text = read(write_report(run))
    for part in (
        "SafeRLHF on harvest", "4 steps", "Learning curves", "Multiplier", "Warm start loss",
        "own/metric", "limit", "Held-out prompts, before and after", "answer 1", "answer 4",
        "unscored", "+1.00", "Timeline of the last steps", "left", "right", "Placement",
        "Config", "algorithm.cost_limit", "TPU v9", "Some CPU", "def", "jax 9.8",
        "How rewards are spread", "equal pair", "a.jsonl:7, a.jsonl:9",
    ):  # fmt: skip
        assert part in text, part


def test_headline_is_first_to_last(run):
    _, text = read(write_report(run))
    flat = " ".join(text.split())
    assert "Held-out reward 0.750 from 0.250 +0.500" in flat
    assert "Cost 0.125 from 0.500 −0.375" in flat


def test_text_of_models_is_escaped(run):
    page = write_report(run).read_text()
    assert "&lt;b&gt;&amp;prompt" in page and "<b>&prompt" not in page


# Ends whatever stands around it, and is no template's business either.
EVIL = """</script></title></style>"'><evil evil="yes" onload=e()>{{7*1999}}{% evil %}&lt;\x1b"""


def test_no_text_of_a_run_becomes_markup(run):
    """Prompts, responses, keys, values, metrics, roles, pools, calls and the folder's own name."""
    for path in run.glob("*.json*"):
        rows = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(evil(json.loads(row))) + "\n" for row in rows))
    folder = run.rename(run.with_name("<evil evil=yes>"))
    checker, text = read(write_report(folder))
    attributes = {name for name, _ in checker.attributes}
    assert "evil" not in checker.tags and {"evil", "onload"}.isdisjoint(attributes)
    shown = EVIL.replace("\x1b", "·")
    # In the title, a metric's name, a config key, a sample, a role, a limit, a span's tip.
    assert text.count(shown) > 20 and "13993" not in text
    assert any(value and shown in value for name, value in checker.attributes if name == "data-tip")


def evil(value, key=""):
    """A run's data with every text, and every name that is the run's own, turned evil."""
    if isinstance(value, dict):
        own = ("own/metric", "actor", "critic", "harvest", "generate", "train")
        return {EVIL + k if k in own else k: evil(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [evil(v) for v in value]
    fixed = ("kind", "ph") or ()
    if isinstance(value, str) and key not in fixed and value != "process_name":
        return EVIL + value
    return value


def test_a_step_that_compiles_does_not_flatten_the_times(run):
    checker, text = read(write_report(run))
    charts = [json.loads(v) for k, v in checker.attributes if k == "data-chart"]
    step = next(c for c in charts if c["series"][0]["name"] == "time/step")
    assert step["clipped"] == [1] and step["series"][0]["values"] == [10.0, 1.0, 1.0, 1.0]
    assert "mean of 3 steps" in text and "steps that compile are cut off" in text


def test_a_users_own_metrics_stand_beside_the_algorithms(run):
    page = write_report(run).read_text()
    folded = page.index("<details>")
    assert page.index("<h3>own/metric</h3>") < folded < page.index("<h3>time/generate</h3>")


def test_report_needs_no_network(run):
    checker, _ = read(write_report(run))
    assert not [v for _, v in checker.attributes if v and re.match(r"(https?:)?//", v)]
    page = (run / "report.html").read_text()
    assert "@import" not in page and "url(" not in page and "prefers-color-scheme: dark" in page


def test_hovering_knows_the_values(run):
    checker, _ = read(write_report(run))
    charts = [json.loads(v) for k, v in checker.attributes if k == "data-chart"]
    rewards = next(c for c in charts if c["series"][0]["name"] == "reward/mean")
    assert rewards["series"][0]["steps"] == [1, 2, 3, 4]
    assert rewards["series"][0]["values"][1] == 0.4
    assert rewards["series"][0]["seconds"] == [10.0, 11.0, 12.0, 13.0]
    assert rewards["series"][1]["steps"] == [1, 4]  # held-out: two evaluations
    kl = next(c for c in charts if c["series"][0]["name"] == "kl/reference")
    assert kl["series"][0]["steps"] == [1, 2, 4]  # null at step 3


@pytest.mark.parametrize("missing", ["metrics", "samples", "warm_start", "plan", "timeline"])
def test_partial_runs(run, missing):
    for path in run.glob(f"{missing}.json*"):
        path.unlink()
    read(write_report(run))


def test_a_run_that_has_only_begun(run):
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.json", "plan.json"):
        (run / name).unlink()
    _, text = read(write_report(run))
    assert "step 0 of 4, not finished" in text and "Warm start loss" in text


def test_one_step_and_a_torn_line(run):
    write_rows(run / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5, "actor/loss": 0.0}])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "rew')
    _, text = read(write_report(run))
    assert "step 1 of 4" in text


def test_an_empty_directory(tmp_path):
    _, text = read(write_report(tmp_path))
    assert "No step has been taken yet" in text


def test_episodes_are_shown_as_conversations(run):
    turns = [
        {"action": "up <b>", "observation": "a wall\x1b", "reward": 0.0, "valid": False,
         "fresh": True},
        {"action": "left", "observation": "home", "reward": -0.5, "valid": True},
    ]  # fmt: skip
    kinds = [("train", "done", -0.5), ("eval", "timeout", None)]
    write_rows(run / "samples.jsonl", [
        {"step": 4, "index": 1, "kind": kind, "prompt": "a maze", "response": "x", "reward": reward,
         "truncated": False, "stop_reason": reason, "turns": turns}
        for kind, reason, reward in kinds
    ])  # fmt: skip
    path = write_report(run)
    _, text = read(path)
    flat = " ".join(text.split())
    shown = "up <b> invalid history replaced a wall· left reward -0.50 home"
    assert f"a maze {shown} reward -0.50 2 turns, done" in flat
    assert f"{shown} reward unscored 2 turns, timeout" in flat and "Episodes" in text
    assert path.read_text().count('class="text drawn"') == 4  # of what the policy said alone
    [kept] = re.findall(r'id="samples">(.*?)</script>', path.read_text())
    assert json.loads(kept)["eval"]["rows"][0][0]["return"] is None
    assert json.loads(kept)["train"]["rows"][0][0]["turns"][1]["action"] == "left"


def test_without_episodes_there_is_nothing_to_choose_of_them(run):
    assert "data-episodes" not in write_report(run).read_text().partition("<script")[0]
