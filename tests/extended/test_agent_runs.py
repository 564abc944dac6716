"""Whole runs whose episodes an agent plays."""

import json
import pathlib

import numpy as np
import pytest
from helpers import computed, trainer_of
from serving_double import byte_tokenizer

TESTS = pathlib.Path(__file__).parent.parent
AGENT = f"{TESTS}/agents_double.py:two_questions"


def agent_keys(folder):
    """Keys of runs behind ``two_questions``, from scratch."""
    byte_tokenizer().save(folder / "tokenizer")
    rows = "".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(6))
    (folder / "rows.jsonl").write_text(rows)
    return {
        "data.task": "",
        "data.path": f"{folder}/rows.jsonl",
        "data.eval_path": f"{folder}/rows.jsonl",
        "data.eval_size": 2,
        "tokenizer.path": f"{folder}/tokenizer",
        "model.max_length": 64,
        "rollout.max_prompt_length": 24,
        "rollout.max_response_length": 40,
        "warm_start.steps": 0,
        "agent.function": AGENT,
    }


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """As ``agent_keys``, on one device."""
    one = {"cluster.devices_per_process": 1, "eval.every": 2, "checkpoint.every": 1}
    return agent_keys(tmp_path_factory.mktemp("agents")) | one


@pytest.fixture(scope="module")
def run(keys, tmp_path_factory):
    """Two steps of an agent: the metrics, and the first batch."""
    changes = {**keys, "steps": 2}
    with trainer_of("GRPO", changes, tmp_path_factory.mktemp("run") / "run") as trainer:
        first = trainer.step()
        batch = trainer.batch
        return [first, *trainer.run()][-2:], batch


def test_an_agent_trains_and_the_first_updates_ratios_are_one(run):
    metrics, batch = run
    assert metrics[0]["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
    assert metrics[0]["episode/calls"] == 2 and metrics[0]["episode/stop_done"] == 1
    assert metrics[0]["episode/roots"] == 1  # each episode is one row
    assert "eval/reward" in metrics[1]
    for row, records in enumerate(batch["turn_records"]):
        drawn = sum(record["tokens"] for record in records)
        assert batch["response_mask"][row].sum() == drawn > 0


def test_the_same_episodes_by_an_environment_are_the_same_batch(run, keys, tmp_path):
    _, batch = run
    changes = {
        **keys, "agent.function": "", "data.chat": True, "steps": 1, "eval.every": 0,
        "environment.function": f"{TESTS}/two_questions.py:TwoQuestions",
        "environment.turn_tokens": 6, "environment.processes": 1,
    }  # fmt: skip
    with trainer_of("GRPO", changes, tmp_path / "environment") as trainer:
        trainer.step()
        other = trainer.batch
    for name in ("prompts", "responses", "response_mask", "turn", "logprobs", "token_rewards"):
        assert np.array_equal(batch[name], other[name]), name
    assert np.array_equal(batch["rewards"], other["rewards"])


def test_a_run_that_goes_on_is_the_same(run, keys, tmp_path):
    metrics, _ = run
    changes = {**keys, "steps": 1}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
    with trainer_of("GRPO", {**changes, "steps": 2}, tmp_path / "run") as trainer:
        *_, last = trainer.run()
    gone_on, whole = computed(last), computed(metrics[1])
    times = ("episode/seconds",)
    assert {k: v for k, v in gone_on.items() if k not in times} == {
        k: v for k, v in whole.items() if k not in times
    }


def test_ahead_of_learning_no_sessions_weights_change(keys, tmp_path):
    """Calls are drawn as they come, and all of a session by one version."""
    changes = {
        **keys, "placement": "disaggregate", "rollout.max_staleness": 1, "steps": 3,
        "cluster.devices_per_process": 2, "eval.every": 0, "checkpoint.every": 0,
    }  # fmt: skip
    seen = set()
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        for step in range(1, 4):
            assert trainer.step()["episode/calls"] == 2
            versions = np.ma.array(trainer.batch["versions"])
            versions.mask = ~trainer.batch["response_mask"]
            assert (versions.min(axis=1) == versions.max(axis=1)).all()
            seen |= set(versions.compressed().tolist())
            assert step - 2 <= versions.min() <= versions.max() < step
    assert len(seen) > 1  # else nothing was tested


def test_a_constrained_run_learns_from_the_choices_alone(keys, tmp_path):
    """Its ratios are one: they are of the policy's own distribution, and of what it chose."""
    pytest.importorskip("llguidance")
    changes = {
        **keys, "agent.function": AGENT.replace("two_questions", "forced_call"), "steps": 1,
        "eval.every": 0, "agent.constrained": True, "rollout.max_response_length": 232,
        "model.max_length": 256,
    }  # fmt: skip
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        metrics, batch = trainer.step(), trainer.batch
    assert metrics["reward/mean"] >= 1 and metrics["episode/constrained_calls"] == 1
    assert metrics["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
    assert metrics["episode/forced_tokens"] > 20
    drawn = [sum(record["tokens"] for record in records) for records in batch["turn_records"]]
    forced = drawn - batch["response_mask"].sum(axis=1)
    assert forced.mean() == pytest.approx(metrics["episode/forced_tokens"])
