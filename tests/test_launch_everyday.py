"""Everyday use of the command: evaluation alone, a fresh start, versions, what a notebook shows."""

import importlib.metadata
import json
import signal

import pytest
from helpers import TINY, command, read_rows, save_model, write_config

import hjax
from hjax.launch.__main__ import main
from hjax.progress import progress_listener
from hjax.settings.config_loading import (
    check_config,
    default_config,
    load_config,
    setting_origins,
    settings_without_effect,
)
from hjax.show.live import Display
from hjax.show.memory_table import DROP_ORDER, memory_table
from hjax.show.notebook import in_notebook, small_curve


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    kept = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_versions(capsys):
    assert main(["--version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"hjax {hjax.__version__} (jax {importlib.metadata.version('jax')}, ")


def test_a_run_begun_gone_on_with_evaluated_and_begun_anew(tmp_path, capsys):
    file = write_config(tmp_path / "tiny.py", TINY | {"eval.every": 9, "display.enabled": True})
    own = {"steps": 1, "algorithm.name": "GRPO", "checkpoint.every": 1}
    run = [f"--config={file}", f"--workdir={tmp_path / 'run'}", *command(own)]
    idle = {"critic.learning_rate": 0.002, "actor.learning_rate": 0.001}
    run += command(idle)
    assert main(run) == 0
    said = capsys.readouterr().out
    assert "--config.critic.learning_rate=0.002 has no effect: GRPO has no critic here" in said
    assert "actor.learning_rate" not in said
    assert main([*run, "--config.steps=2", "--json"]) == 0
    said = capsys.readouterr().out
    assert f"going on after step 1, from {tmp_path / 'run' / 'checkpoints' / '1'}" in said
    trained = json.loads(said.splitlines()[-1])["metrics"]

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    assert main([*run, "--config.steps=0", "--config.seed=0", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    # The same weights, prompts and greedy answers as the evaluation after the last step.
    assert measured == {key: trained[key] for key in ("eval/reward", "eval/accuracy")}
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before

    assert main([*run, "--config.seed=5"]) == 2  # another run's
    assert "config.seed=0, now 5" in capsys.readouterr().err
    assert main([*run, "--config.seed=5", "--overwrite"]) == 0
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["seed"] == 5


def test_overwriting_needs_a_workdir(capsys):
    assert main(["--config=ppo.py", "--overwrite"]) == 2
    assert "--overwrite needs --workdir=DIR" in capsys.readouterr().err


def test_what_won_over_what(tmp_path):
    name = "dapo.py"
    given = ["--config.algorithm.kl_coef=0.1", "--config.data.task=addition", "--config.steps=300"]
    rows = setting_origins(name, check_config(load_config(name, given)))
    found = {
        row["key"]: row for row in setting_origins(name, check_config(load_config(name, given)))
    }

    def of(key):
        row = found[key]
        return row["value"], row["set by"], row["instead of"]

    assert of("algorithm.kl_coef") == ("0.1", "the command", "0.0 (DAPO's default)")
    assert of("algorithm.epochs") == ("2", "dapo.py", "1 (DAPO's default)")
    assert of("data.task") == ("'addition'", "the command", "'sorting' (dapo.py)")
    assert of("rollout.max_response_length") == ("4", "the data", "0 (default)")
    assert of("steps")[1] == "dapo.py"  # what the command repeats
    length = check_config(load_config(name, [*given, "--config.rollout.max_response_length=16"]))
    found = {row["key"]: row for row in setting_origins(name, length)}
    assert of("rollout.max_response_length") == ("16", "the command", "0 (default)")
    assert length.rollout.max_response_length == 16  # as it was
    assert "seed" not in found and "data.task_options.length" not in found
    own = load_config(name, {"algorithm.epochs": 3})
    rows = setting_origins(name, check_config(own))
    row = next(r for r in rows if r["key"] == "algorithm.epochs")
    assert row["instead of"] == "1 (DAPO's default), 2 (dapo.py)"
    idle = ["--config.critic.lora.rank=4", "--config.teacher.path=models/large"]
    rows = setting_origins(name, check_config(load_config(name, idle)))
    said = {row["key"]: row["instead of"] for row in rows if row["set by"] == "the command"}
    assert said["critic.lora.rank"] == "no effect: DAPO has no critic here"
    assert said["teacher.path"] == "no effect: DAPO has no teacher here"
    assert settings_without_effect(name, check_config(load_config(name, given))) == []


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_memory_table_fits_with_whole_cells(width):
    import io

    from rich.console import Console

    record = {
        "role": "reference", "program": "compute_ref_log_prob", "runs": 4, "held_bytes": {"a": 2e9},
        "argument_bytes": 1.7e9, "output_bytes": 3072, "temporary_bytes": 5.5e9, "code_bytes": 1e6,
        "peak_bytes": 9e9, "sum_bytes": 9.3e9,
    }  # fmt: skip
    out = io.StringIO()
    Console(file=out, width=width).print(memory_table([record], 10**10, width))
    lines = out.getvalue().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines) and "…" not in out.getvalue()
    text = "\n".join(lines)
    assert "reference.compute_ref_log_prob ×4" in text and "8.7 GiB" in text
    stay = [name for name in DROP_ORDER if name in lines[0]]
    assert stay == list(DROP_ORDER[len(DROP_ORDER) - len(stay) :]), "columns leave in their order"


def test_loading_says_how_far_it_is(tmp_path, monkeypatch):
    import io

    from hjax.models.parameter_counts import parameter_count

    config = save_model(tmp_path / "model", layers=2)
    told = []
    with progress_listener(lambda *progress: told.append(progress)):
        hjax.load_model(tmp_path / "model")
    hjax.load_model(tmp_path / "model")  # nobody listens
    assert {what for what, _, _ in told} == {"loading model"}
    assert [done for _, done, _ in told] == sorted({done for _, done, _ in told})
    assert told[0][1:] == (0, parameter_count(config)) and told[-1][1] == told[-1][2]

    out, clock = io.StringIO(), iter([0.0, 0.0, 0.0, 6.0, 6.0, 6.0, 24.0, 24.0])
    display = Display(default_config(), 3, out)
    monkeypatch.setattr("hjax.show.live.time.monotonic", lambda: next(clock, 24.0))
    for done in (0, 25, 100):
        display.loading("loading model", done, 100)
    assert out.getvalue() == "loading model 25%   0:06 gone, 0:18 left\n"


class Handle:
    """What IPython gives for a display that can be updated."""

    def __init__(self):
        self.shown = []

    def update(self, html):
        self.shown.append(html.data)


def test_a_notebook_gets_a_table_curves_and_messages(monkeypatch):
    pytest.importorskip("IPython")
    import xml.etree.ElementTree as ElementTree

    import IPython
    import IPython.display

    assert not in_notebook()
    handle = Handle()
    monkeypatch.setattr(IPython, "get_ipython", lambda: type("Shell", (), {"kernel": 1})())
    monkeypatch.setattr(IPython.display, "display", lambda html, display_id: handle)
    display = Display(default_config(), 20)
    display.start("PPO <b>")
    display.warm_start(1, 2, 3.5)
    for step in range(1, 21):
        with display.phase("generate"):
            row = {"step": step, "reward/mean": step / 20, "reward/std": 0.5, "time/step": 1.0}
            display.step(row | ({"eval/accuracy": 0.5} if step % 10 == 0 else {}))
    display.samples([{"prompt": "<i>", "response": "x", "reward": 1.0}])
    display.message("step 3: <warning>")
    display.close()
    page = handle.shown[-1]
    assert len(handle.shown) < 20, "not drawn for every step"
    tree = ElementTree.fromstring(page)  # well-formed, nothing of the texts is markup
    texts = "".join(tree.itertext())
    for part in ("PPO <b>", "step 20/20", "1.000 ±0.500", "step 3: <warning>", "<i> → x"):
        assert part in texts, (part, texts)
    lines = tree.findall(".//polyline")
    assert [len(line.get("points").split()) for line in lines] == [20, 2]
    first, *_, last = lines[0].get("points").split()
    (left, low), (right, high) = (map(float, p.split(",")) for p in (first, last))
    assert left < right and low > high, "a reward that rises, in SVG's coordinates"


@pytest.mark.parametrize("points", [[(1, 2.0)], [(1, 1.0), (2, float("nan"))]])
def test_a_curve_of_one_value_is_none(points):
    assert small_curve("loss", points) is None
