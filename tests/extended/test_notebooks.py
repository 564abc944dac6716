"""The notebooks run from top to bottom, and are committed as they ran, with their figures."""

import json
import pathlib
import re

import nbclient
import nbformat
import pytest
from references import peft, torch

# It trains; with other work on the cores that takes a while.
pytestmark = pytest.mark.timeout(600)

NOTEBOOKS = pathlib.Path(__file__).parents[2] / "notebooks"

# A cell of the test's own at the end: what was drawn, and what the run wrote, as JSON.
LOOK = """
axes = plot_run(first, "again").axes
rows = [json.loads(line) for line in open("first/metrics.jsonl")]
print(json.dumps({
    "drawn": axes[0].lines[0].get_ydata().tolist(),
    "accuracy": axes[1].lines[0].get_ydata().tolist(),
    "rows": rows,
}))
"""


def cells(notebook, kind="code"):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def outputs(notebook, kind):
    return [o for cell in cells(notebook) for o in cell.outputs if o.output_type == kind]


def figures(notebook):
    return [o for o in outputs(notebook, "display_data") if "image/png" in o.data]


def execute(notebook, folder, **environment):
    """Runs all cells, with temporary files in a folder."""
    client = nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"TMPDIR": folder, **environment}.items():
            patch.setenv(name, str(value))
        patch.chdir(NOTEBOOKS)
        client.execute()


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The quickstart, executed, and what its run wrote."""
    notebook = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    (at,) = [i for i, c in enumerate(notebook.cells) if "PPO learns to sort" in c.source]
    keep = nbformat.v4.new_code_cell("first = trainer.history")
    notebook.cells.insert(at + 1, keep)
    notebook.cells.append(nbformat.v4.new_code_cell(LOOK))
    execute(notebook, tmp_path_factory.mktemp("notebook"))
    return notebook, json.loads(notebook.cells[-1].outputs[0].text)


def test_quickstart_runs_without_an_error(quickstart):
    notebook, _ = quickstart
    assert outputs(notebook, "error") == []
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []


def test_quickstart_plots_the_rewards_of_its_run(quickstart):
    notebook, seen = quickstart
    steps = [row["step"] for row in seen["rows"]]
    assert steps == list(range(1, 41))
    assert seen["drawn"] == pytest.approx([row["reward/mean"] for row in seen["rows"]])
    evaluated = [row["eval/accuracy"] for row in seen["rows"] if "eval/accuracy" in row]
    assert seen["accuracy"] == pytest.approx(evaluated) and len(evaluated) == 5
    # Sorting and its accuracy, the other reward, the timeline; and the test's own.
    assert len(figures(notebook)) == 4


def test_quickstart_learns(quickstart):
    _, seen = quickstart
    rewards = [row["reward/mean"] for row in seen["rows"]]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.05
    assert seen["accuracy"][-1] > seen["accuracy"][0]


def test_quickstart_draws_do_not_depend_on_the_batch(quickstart):
    notebook, _ = quickstart
    (cell,) = [c for c in cells(notebook) if "together" in c.source]
    assert cell.outputs[0].text.strip() == "True"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The hybrid engine's notebook, executed, and what its cells found."""
    notebook = nbformat.read(NOTEBOOKS / "02_hybrid_engine.ipynb", as_version=4)
    look = """
print(json.dumps({
    "apart": apart, "noted": [int(n) for n in noted],
    "measured": {method: row["measured"] for method, row in rows.items()},
    "cost": [cost.received, cost.source, cost.target, cost.peak],
    "steps": [row["step"] for row in metrics],
    "errors": [row["rollout/token_prob_error"] for row in metrics],
    "same": jax.tree.all(same),
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell("import json\n" + look))
    execute(notebook, tmp_path_factory.mktemp("engine"))
    return notebook, json.loads(notebook.cells[-1].outputs[0].text)


def test_engine_runs_without_an_error(engine):
    notebook, _ = engine
    assert outputs(notebook, "error") == []
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []
    assert len(figures(notebook)) == 3


def test_engine_draws_the_papers_example(engine):
    _, seen = engine
    assert seen["apart"] == {"hybridflow": [], "vanilla": [1, 2, 5, 6]}
    received = {method: row["communication"] for method, row in seen["measured"].items()}
    assert received == {"hybridflow": 1 / 4, "vanilla": 3 / 4, "gather_all": 7 / 8}
    redundant = {method: row["redundancy"] for method, row in seen["measured"].items()}
    assert redundant == {"hybridflow": 0, "vanilla": 1 / 4, "gather_all": 1 / 8}


def test_engine_moves_real_parameters_and_trains(engine):
    _, seen = engine
    received, source, target, peak = seen["cost"]
    # Norms are whole on every device; the rest is a quarter before and half after.
    assert received == target - source
    assert [seen["noted"][0], seen["noted"][-1]] == [source, source]
    assert max(seen["noted"]) == peak < target + source / 4
    assert seen["same"] and seen["steps"] == [1, 2, 3]
    assert max(seen["errors"]) < 1 + 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The notebook of a model of one's own, executed, and what its cells found."""
    for reference in (torch, peft):
        assert reference.__version__
    notebook = nbformat.read(NOTEBOOKS / "04_bring_your_model.ipynb", as_version=4)
    look = """
import json
print(json.dumps({
    "rewards": [row["reward/mean"] for row in history],
    "difference": float(difference),
    "apart": [float(np.abs(logits_of(m) - expected).max()) for m in (adapted, merged)],
    "changed": float(np.abs(logits_of(merged) - np.asarray(
        hjax.load_model("base").logits(tokens))).max()),
    "texts": [text.replace(" ", ""), "31524>" + same.text],
    "sizes": [count("run/checkpoints/30/actor.params"), count("base/model.safetensors")],
    "saved": saved,
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path_factory.mktemp("model"))
    return notebook, json.loads(notebook.cells[-1].outputs[0].text)


@pytest.mark.slow
def test_a_model_of_transformers_learns_by_adapters_and_goes_back(model):
    notebook, seen = model
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    assert seen["difference"] < 1e-4 and max(seen["apart"]) < 1e-4 and seen["changed"] > 0.1
    rewards = seen["rewards"]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert seen["texts"][0] == seen["texts"][1]
    assert seen["saved"] == ["actor.optimizer", "actor.params", "controller.json"]
    # Fixed parts of a checkpoint's files weigh much where the arrays are so small.
    assert seen["sizes"][0] < seen["sizes"][1]


@pytest.mark.slow
def test_a_new_algorithm_of_few_lines_learns(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "05_new_algorithm.ipynb", as_version=4)
    (written,) = [c.source for c in cells(notebook) if c.source.startswith("%%writefile")]
    lines = [line for line in written.splitlines()[1:] if line.strip()]
    assert len(lines) < 15 and "class Extremes(hjax.algorithms.GRPO)" in written
    look = """
import json
print(json.dumps({
    "accuracy": {name: [r["eval/accuracy"] for r in rows if "eval/accuracy" in r]
                 for name, rows in runs.items()},
    "read": batch["row_mask"].tolist(), "rewards": batch["rewards"].tolist(),
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    seen = json.loads(notebook.cells[-1].outputs[0].text)
    for accuracy in seen["accuracy"].values():
        assert max(accuracy) > accuracy[0] + 0.2, seen["accuracy"]
    # Each group has the best and the worst among what is learned from, and nothing between.
    for start in range(0, len(seen["rewards"]), 8):
        group, read = seen["rewards"][start : start + 8], seen["read"][start : start + 8]
        extremes = {min(group), max(group)} if min(group) < max(group) else set()
        assert read == [reward in extremes for reward in group]


def test_an_agent_learns_to_read_what_it_is_told(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "06_agents.ipynb", as_version=4)
    (written,) = [c.source for c in cells(notebook) if c.source.startswith("%%writefile")]
    lines = [line for line in written.splitlines()[1:] if line.strip()]
    assert len(lines) <= 20 and "class Guess(hjax.Environment)" in written
    look = """
import json
batch = trainer.batch
print(json.dumps({
    "returns": [row["episode/return"] for row in history],
    "greedy": [row["eval/reward"] for row in history if "eval/reward" in row],
    "compiled": [row["compile/count"] for row in history],
    "drawn": batch["response_mask"].tolist(),
    "text": [batch["prompt_text"], batch["response_text"]],
    "turns": batch["turn_records"], "rewards": batch["rewards"].tolist(),
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []
    seen = json.loads(notebook.cells[-1].outputs[0].text)
    # Three guesses of seven digits that are not told anything win at most 3 of 7 games.
    assert sum(seen["returns"][:5]) / 5 < 3 / 7 < sum(seen["returns"][-10:]) / 10 - 0.1
    assert seen["greedy"][-1] > max(seen["greedy"][0], 3 / 7) + 0.1
    assert seen["compiled"][-1] == seen["compiled"][1]  # nothing is compiled after the second step
    for row, turns in enumerate(seen["turns"]):
        assert sum(seen["drawn"][row]) == len(turns) <= 3
        assert seen["rewards"][row] == sum(turn["reward"] for turn in turns)
        said = "".join(turn["action"] + turn["observation"] for turn in turns)
        assert said.startswith(seen["text"][1][row]) and seen["text"][0][row] == "?"


def test_a_network_of_forty_lines_learns(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "07_any_network.ipynb", as_version=4)
    (written,) = [c.source for c in cells(notebook) if c.source.startswith("%%writefile")]
    lines = [line for line in written.splitlines()[1:] if line.strip()]
    assert len(lines) < 40 and "class Classifier(hjax.workers.NetworkWorker)" in written
    look = """
import json
right = inside == ((grid**2).sum(axis=1) < 1).reshape(121, 121)
print(json.dumps({
    "accuracy": [row["actor/accuracy"] for row in rows], "right": float(right.mean()),
    "returns": [row["reward/mean"] for row in played], "held_out": played[-1]["eval/reward"],
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []
    seen = json.loads(notebook.cells[-1].outputs[0].text)
    assert seen["accuracy"][0] < 0.8 and seen["right"] > 0.9
    assert seen["returns"][0] < 60 and seen["held_out"] > 150


def test_a_loop_of_calls_learns(tmp_path):
    notebook = nbformat.read(NOTEBOOKS / "08_training_by_calls.ipynb", as_version=4)
    look = "import json; print(json.dumps([greedy, rewards, again.step]))"
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []
    greedy, rewards, steps = json.loads(notebook.cells[-1].outputs[0].text)
    assert greedy[-1] > greedy[0] + 0.1 and sum(rewards[-10:]) > sum(rewards[:10]) + 1
    assert steps == 61  # one step on demonstrations, then sixty


def test_a_model_learns_behind_an_agent_of_ten_lines(tmp_path):
    pytest.importorskip("openai")
    notebook = nbformat.read(NOTEBOOKS / "09_train_an_agent.ipynb", as_version=4)
    written = next(c.source for c in cells(notebook) if c.source.startswith("%%writefile"))
    body = [line for line in written.partition("async def")[2].splitlines()[1:] if line.strip()]
    assert len(body) <= 10
    look = """
import json
print(json.dumps({
    "returns": [row["episode/return"] for row in history],
    "greedy": [row["eval/reward"] for row in history if "eval/reward" in row],
    "roots": [row["episode/roots"] for row in history],
    "error": first["rollout/token_prob_error"],
    "calls": calls,
}))
"""
    notebook.cells.append(nbformat.v4.new_code_cell(look))
    execute(notebook, tmp_path)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 1
    assert [o.text for o in outputs(notebook, "stream") if o.name == "stderr"] == []
    seen = json.loads(notebook.cells[-1].outputs[0].text)
    # Two guesses of two digits that do not look back win at most 3 of 4 games.
    assert sum(seen["returns"][:5]) / 5 < 3 / 4 < sum(seen["returns"][-10:]) / 10 - 0.05
    assert seen["greedy"][-1] > max(seen["greedy"][0], 3 / 4) + 0.1
    assert set(seen["roots"]) == {1} and seen["error"] == pytest.approx(1, abs=1e-5)
    # A sample that was not gone on from, and two branches of the other.
    first, second, *branches = seen["calls"]
    kept, dropped = (first, second) if second["label"] == "discarded" else (second, first)
    assert dropped["label"] == "discarded" and dropped["row"] is None
    assert [call["parent"] for call in branches] == [kept["number"]] * 2
    assert [call["row"] for call in (kept, *branches)] == [0, 0, 1]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_committed_notebook_shows_a_clean_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "not executed from top to bottom"
    assert outputs(notebook, "error") == []
    assert "pip" in cells(notebook)[0].source and figures(notebook)
    # Nothing of the machine that ran it: no folder of its own, no kernel's or user's.
    shown = json.dumps([cell.outputs for cell in cells(notebook)])
    assert re.findall(r"/(?:home|root|tmp|var|work|Users|content)/[\w.-]*", shown) == []
    assert set(notebook.metadata) == {"kernelspec", "language_info"}


def test_notebook_links_lead_somewhere():
    for path in NOTEBOOKS.glob("*.ipynb"):
        text = "".join(c.source for c in cells(nbformat.read(path, as_version=4), "markdown"))
        links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
        assert links and [link for link in links if not (path.parent / link).is_file()] == []


@pytest.mark.slow
def test_auto_mapping_runs_and_its_plan_is_the_one_that_ran(tmp_path_factory, calibrated):
    notebook = nbformat.read(NOTEBOOKS / "03_auto_mapping.ipynb", as_version=4)
    # The cache spares a calibration of the same devices.
    execute(notebook, tmp_path_factory.mktemp("notebook"), XDG_CACHE_HOME=calibrated)
    assert outputs(notebook, "error") == [] and len(figures(notebook)) == 3
    texts = [o.text for o in outputs(notebook, "stream") if o.name == "stdout"]
    # Five candidates, fastest first.
    totals = [float(line.split(" s ")[0]) for line in texts[0].strip().splitlines()]
    assert len(totals) == 5 and totals == sorted(totals)
    assert "actor" in texts[-1] and "predicted" in texts[-1] and "measured" in texts[-1]
