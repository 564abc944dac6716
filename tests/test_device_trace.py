"""`--profile`: a trace of some steps, and what it says the devices' time went to."""

import json

import pytest
from helpers import ONE_DEVICE, computed, read_rows, tiny_config

import hjax
from hjax.errors import ConfigError
from hjax.launch.__main__ import parse
from hjax.run.device_trace import parse_step_range, summarize_trace
from hjax.show.report import write_report


def event(device: str, program: str, operation: str, run: int, start: float, end: float) -> dict:
    return dict(device=device, program=program, operation=operation, run=run, start=start, end=end)


def test_a_summary_by_hand():
    found = summarize_trace([
        event("a", "update", "while.1", 7, 1.0, 4.0),  # contains the next two
        event("a", "update", "dot.3", 7, 1.0, 2.5),
        event("a", "update", "fusion", 7, 2.5, 3.0),
        event("b", "update", "dot.3", 7, 1.0, 2.0),
        event("a", "update", "dot.3", 8, 6.0, 6.5),
        event("a", "generate", "sort", 9, 10.0, 11.0),
    ])  # fmt: skip
    # Busy is a's 3 and .5 and 1 seconds, b's 1 second; of `update` 3.5 and 1.
    assert found["seconds"] == 10.0 and found["busy_seconds"] == (4.5 + 1.0) / 2
    update, generate = found["programs"]
    assert (update["name"], update["runs"], update["seconds"]) == ("update", 2, 2.25)
    assert update["operations"] == [["dot.3", 3.0], ["fusion", 0.5]]
    assert (generate["name"], generate["runs"], generate["seconds"]) == ("generate", 1, 1.0)
    assert summarize_trace([])["programs"] == []


@pytest.mark.parametrize("text", ["", "x", "3-", "-3", "0", "0-2", "5-4", "1.5"])
def test_what_names_no_steps(text):
    with pytest.raises(ConfigError, match=f"--profile={text}: "):
        parse_step_range(text)


@pytest.mark.extended
def test_a_run_is_traced_and_is_the_same(tmp_path):
    keys = {**ONE_DEVICE, "algorithm.minibatch": 8, "algorithm.epochs": 3}
    rows = {}
    for name, profile in (("traced", range(2, 4)), ("plain", None)):
        config = tiny_config("PPO", keys)
        trainer = hjax.Trainer(config, workdir=tmp_path / name, profile=profile)
        trainer.run(4)
        trainer.close()
        rows[name] = [computed(row) for row in read_rows(tmp_path / name)]
    assert rows["traced"] == rows["plain"]
    record = json.loads((tmp_path / "traced" / "profile.json").read_text())
    runs = {program["name"]: program["runs"] for program in record["programs"]}
    # Of 16 sequences 2 mini-batches, 3 times, in 2 steps.
    assert (runs["actor_update"], runs["critic_update"], runs["generate"]) == (12, 12, 2)
    assert record["steps"] == [2, 3]
    assert 0 < record["busy_seconds"] <= record["seconds"]
    assert list((tmp_path / "traced" / "profile").rglob("*.xplane.pb"))
    page = write_report(tmp_path / "traced").read_text()
    assert "Traced programs" in page and "steps 2 to 3: devices were busy" in page
    assert "Traced programs" not in write_report(tmp_path / "plain").read_text()


def test_a_run_that_ends_before_says_so(tmp_path):
    said = []

    class Display:
        def __getattr__(self, name):
            return lambda *a, **k: said.append(a[0]) if name == "message" else None

    for steps in (range(9, 11), range(1, 8)):
        config = tiny_config("GRPO", ONE_DEVICE)
        trainer = hjax.Trainer(config, workdir=tmp_path / f"{steps[0]}", profile=steps)
        trainer.step()
        trainer.display = Display()
        trainer.close()
    assert said[0] == "profile: none of the steps 9 to 10 was taken"
    assert said[1].startswith(f"step 1 is traced in {tmp_path}/1/profile: ")


@pytest.mark.parametrize("more", ["--dry_run", "--config.steps=0"])
def test_without_steps_nothing_is_traced(more):
    with pytest.raises(ConfigError, match="--profile=2: no step is taken"):
        parse(["--config=ppo.py", "--profile=2", more])


def test_it_needs_a_workdir():
    with pytest.raises(ConfigError, match="it needs a workdir"):
        hjax.Trainer(tiny_config("GRPO", ONE_DEVICE), profile=range(1, 2))
    with pytest.raises(ConfigError, match="needs cluster.processes=1"):
        hjax.Trainer(
            tiny_config("GRPO", {"cluster.processes": 2}), workdir="x", profile=range(1, 2)
        )
