"""Kinds of learning, seen within seconds; and the command that looks at all of them."""

import json
import pathlib
import sys
import xml.etree.ElementTree as ElementTree

import learning
import pytest
from helpers import trainer_of
from learning import HELD_OUT, LEARNS, Measure

from hjax.errors import ConfigError
from hjax.settings.config_loading import config_names, load_config

ROOT = pathlib.Path(__file__).parents[2]

EVENS = f"{ROOT / 'tests' / 'evens_reward.py'}:evens"
# Algorithm -> keys, the metric, and by how much it is to rise.
KINDS = {
    "PPO": ({"reward.function": EVENS, "actor.learning_rate": 1e-2}, "reward/mean", 0.25),
    "RLOO": ({"reward.function": EVENS, "actor.learning_rate": 1e-2}, "reward/mean", 0.25),
    "DPO": ({"actor.learning_rate": 1e-2, "warm_start.batch": 32}, "actor/margin", 0.15),
}


@pytest.mark.parametrize("name", ["PPO", "DPO", pytest.param("RLOO", marks=pytest.mark.slow)])
def test_it_learns(name):
    keys, metric, rise = KINDS[name]
    with trainer_of(name, {"steps": 20, **keys}) as trainer:
        rows = trainer.run()
    values = [row[metric] for row in rows]
    assert sum(values[-4:]) / 4 > sum(values[:4]) / 4 + rise, values


def rows_of(*values, metric="eval/accuracy"):
    return [{"step": n, metric: value} for n, value in enumerate(values, 1)]


def test_what_a_measure_says_by_hand():
    held_out = Measure("eval/accuracy", rise=0.2)
    rows = rows_of(0.2, None, 0.9, 0.45)
    assert held_out.change(rows) == (0.2, 0.45)
    assert held_out.met(0.2, 0.41) and not held_out.met(0.2, 0.39)
    # Of what every step has the mean of the last ten, and a start may be given.
    cost = Measure("cost/mean", rise=-0.3, below=0.1)
    rows = rows_of(0.5, *[0.3] * 5, *[0.05] * 10, metric="cost/mean")
    assert cost.change(rows) == (0.5, pytest.approx(0.05))
    assert cost.met(0.5, 0.05) and not cost.met(0.5, 0.15) and not cost.met(0.3, 0.05)
    assert Measure("x", start=0.5).change(rows_of(0, 1, metric="x")) == (0.5, 0.5)


def test_configs_say_what_they_learn_by():
    said = {name: learning.measures(name.removesuffix(".py")) for name in config_names()}
    shipped = LEARNS.keys() - set(learning.STAGED)
    assert {f"{learning.config_of(name)[0]}.py" for name in shipped} <= said.keys()
    assert said["grpo.py"] == HELD_OUT and said["stories.py"] == said["ppo_llama_7b.py"] == ()
    assert [m.metric for m in said["safe_rlhf.py"]] == ["eval/reward", "cost/mean"]
    assert said["safe_rlhf.py"][1].below == load_config("safe_rlhf.py").algorithm.cost_limit


def test_runs_of_stages_are_told_by_what_all_stages_do_and_their_data():
    told = learning.settings("lookup", 7)
    assert told["sft.seed"] == told["grpo.seed"] == 7
    assert told["grpo.actor.path"] == "{workdir}/sft" and "environment" not in str(
        learning.settings("lookup_alone", 7)
    )
    assert told["data"] != learning.settings("recovery", 7)["data"]
    assert told == learning.settings("lookup", 7) != learning.settings("lookup", 8)
    assert "tool_tasks.py:lookup" in learning.arguments("lookup", 7)[0]
    assert set(learning.STAGED) <= LEARNS.keys() and learning._task("lookup_alone") == "lookup"


@pytest.fixture
def command(monkeypatch, tmp_path):
    """The command with runs made up instead of trained; what it trained."""
    trained = []

    def train(config, seed, folder):
        trained.append((config, seed))
        folder.mkdir(parents=True, exist_ok=True)
        rows = rows_of(0.25, 0.5, 0.75 + 0.1 * seed)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(lines)
        facts = {"seconds": 60.0 + seed, "processor_seconds": 90.0, "other_cores": 0.5}
        facts |= {"commit": "abc", "cpu": "a <fast> one", "cores": 2, "python": "3", "jax": "0"}
        facts |= {"settings": learning.settings(config, seed), "code": learning.code_hash()}
        (folder / learning.DONE).write_text(json.dumps(facts))
        return learning.Run(rows, facts)

    def run(*flags):
        trained.clear()
        folders = [f"--workdir={tmp_path / 'runs'}", f"--pages={tmp_path / 'pages'}"]
        monkeypatch.setattr(sys, "argv", ["learning.py", *folders, *flags])
        learning.main()
        return list(trained)

    monkeypatch.setattr(learning, "train", train)
    return run


def test_finished_runs_are_kept_and_the_pages_say_what_they_reached(command, tmp_path, capsys):
    assert command("--configs=grpo,rloo", "--seeds=1") == [("grpo", 0), ("rloo", 0)]
    assert command("--configs=grpo,rloo", "--seeds=2") == [("grpo", 1), ("rloo", 1)]
    assert command("--configs=grpo,rloo", "--seeds=2") == []
    text = (tmp_path / "pages" / "RESULTS.md").read_text()
    # Ends of .75 and .85, from .25: differences of .5 and .6, whose deviation is .1 / sqrt(2).
    cells = ["`grpo.py`", "sorting", "`eval/accuracy`", "0.250", "0.800", "+0.550", "0.071", "0-1"]
    assert f"| {' | '.join(cells)} | 60 (90) | 2 of 2 (+0.2) |" in text
    drawn = ElementTree.parse(tmp_path / "pages" / "curves" / "grpo.svg").getroot()
    kinds = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert kinds.count("polyline") == 2 and kinds.count("circle") == 6
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert shown["rloo"]["1"]["eval/accuracy"] == [0.25, 0.85]
    # Another machine, which has the pages alone, goes on from them.
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    assert command("--configs=grpo", "--seeds=3") == [("grpo", 2)]
    assert "| `rloo.py` |" in (tmp_path / "pages" / "RESULTS.md").read_text()
    # A run of another config than today's is no result of today's.
    path = tmp_path / "pages" / learning.KEPT
    lines = path.read_text().splitlines(keepends=True)
    assert [json.loads(line)["config"] for line in lines] == ["grpo"] * 3 + ["rloo"] * 2
    lines[-1] = lines[-1].replace('"steps": 800', '"steps": 8')
    path.write_text("".join(lines))
    assert command("--configs=grpo,rloo", "--seeds=2", "--kept") == []
    today, _, earlier = (tmp_path / "pages" / "RESULTS.md").read_text().partition("Runs of earlier")
    assert "| +0.500 | – | 0 |" in today and "| `rloo.py` |" in earlier


def test_runs_of_other_code_are_not_shown_as_todays(command, monkeypatch, tmp_path):
    assert command("--configs=grpo", "--seeds=100-101") == [("grpo", 100), ("grpo", 101)]
    monkeypatch.setattr(learning, "code_hash", lambda: "other")
    assert command("--configs=grpo", "--seeds=101-102") == [("grpo", 101), ("grpo", 102)]
    text = (tmp_path / "pages" / "RESULTS.md").read_text()
    today, _, earlier = text.partition("## Runs of earlier code")
    assert "| 101-102 |" in today and "| 100 |" in earlier
    assert "other" in today


def test_hash_of_code_leaves_out_docstrings_and_comments(monkeypatch, tmp_path):
    monkeypatch.setattr(learning.hjax, "__file__", str(tmp_path / "__init__.py"))
    file = tmp_path / "workers" / "update.py"
    file.parent.mkdir()
    found = []
    for text in (
        "def f(x):\n    'Doubles.'\n    return 2 * x\n",
        "def f(x):\n    # Twice.\n    return 2 * x\n",
        "def f(x):\n    return x * 2\n",
    ):
        file.write_text(text)
        learning.code_hash.cache_clear()
        found.append(learning.code_hash())
    learning.code_hash.cache_clear()
    assert found[0] == found[1] != found[2]


def test_a_run_that_does_not_learn_is_named(command, monkeypatch):
    monkeypatch.setattr(learning, "measures", lambda config: (Measure("eval/accuracy", rise=0.7),))
    with pytest.raises(SystemExit, match="does not show that it learns: grpo.py, seed 0"):
        command("--configs=grpo", "--seeds=1")
    with pytest.raises(ConfigError, match="no such file"):
        command("--configs=grop", "--seeds=1")


def test_runs_that_todays_code_repeats_count_as_todays(command, monkeypatch, tmp_path):
    command("--configs=sft", "--seeds=2")
    pages = tmp_path / "pages"
    monkeypatch.setattr(learning, "prepare_jax", lambda config: "")
    here = {"cpu": "a <fast> one", "cores": 2, "python": "3", "commit": "abd"}
    monkeypatch.setattr(learning.machine, "describe", lambda: here)
    assert (
        learning.repeat("sft", pages)
        == "sft.py: no runs of other code, or without their first steps"
    )
    monkeypatch.setattr(learning, "code_hash", lambda: "other")
    taken = []

    class Trainer:
        def __init__(self, config):
            assert config.seed == 0 and config.algorithm.name == "SFT"
            self.steps = 0

        def step(self):
            self.steps += 1
            return {"step": self.steps, "eval/accuracy": taken.pop(0), "time/step": 7.0}

        def close(self):
            pass

    def kept():
        lines = map(json.loads, (pages / learning.KEPT).read_text().splitlines())
        return [(line["facts"]["code"], line["facts"].get("repeated_steps")) for line in lines]

    old = kept()[0][0]
    monkeypatch.setattr(learning.hjax, "Trainer", Trainer)
    # The kept run has .25, .5, .75; a difference of the last bits counts on the same processor.
    taken[:] = [0.25, 0.5, 0.7500001]
    assert learning.repeat("sft", pages) == "sft.py: step 3 differs in eval/accuracy"
    assert kept() == [(old, None)] * 2
    here["cpu"], taken[:] = "another", [0.25, 0.51, 0.75]
    assert learning.repeat("sft", pages) == "sft.py: step 2 differs in eval/accuracy"
    taken[:] = [0.25, 0.5, 0.7500001]
    said = learning.repeat("sft", pages)
    assert said == "sft.py: the same first 3 steps, so 2 runs are today's"
    assert kept() == [("other", 3)] * 2
    assert command("--configs=sft", "--seeds=2") == []  # they are not run again
    page = (pages / "RESULTS.md").read_text()
    assert "Of 2 runs of earlier code today's took the same first 3 steps" in page
    assert "Runs of earlier code" not in page
