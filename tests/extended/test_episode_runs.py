"""Whole runs on episodes: what is compiled, the first update, resumes, and lost processes."""

import functools
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import (
    DIGITS,
    TINY,
    computed,
    episode_keys,
    launch,
    read_rows,
    trainer_of,
    write_config,
)

from hjax.controller import join
from hjax.errors import RunError
from hjax.run import episode_rollout
from hjax.run.inputs import prompt_batch

ONE = {"cluster.devices_per_process": 1}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Keys of a run on episodes of one row."""
    return episode_keys(tmp_path_factory.mktemp("episodes"))


def fresh(keys, **more):
    return {**keys, "environment.function": f"{DIGITS}:Fresh", **more}


def run(algorithm, changes, workdir=None):
    with trainer_of(algorithm, changes, workdir) as trainer:
        return [computed(row) for row in trainer.run()]


def content(workdir):
    """What must be equal: the computed metrics and everything sampled."""
    return [computed(row) for row in read_rows(workdir)], read_rows(workdir, "samples.jsonl")


@pytest.mark.parametrize(
    "algorithm, changes",
    [
        ("GRPO", {"eval.every": 2}),
        ("GiGPO", {}),
        (
            "PPO",
            {"environment.function": f"{DIGITS}:Fresh", "algorithm.minibatch": 8, "eval.every": 3},
        ),
        pytest.param(
            "DAPO",
            {
                "environment.function": f"{DIGITS}:Fresh",
                "algorithm.resample": 1,
                "algorithm.minibatch": 4,
                "cluster.devices_per_process": 2,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_nothing_is_compiled_after_the_second_step(algorithm, changes, keys, tmp_path):
    """Not for episodes of other numbers of turns and rows either, and nor after a resume."""
    changes = {**keys, **ONE, **changes, "steps": 7, "checkpoint.every": 5}
    sizes = set()
    with trainer_of(algorithm, changes, tmp_path / "run") as trainer:
        counts = []
        for _ in range(7):
            counts.append(trainer.step()["compile/count"])
            batch = trainer.batch
            sizes.add(int((batch["episode"] >= 0).sum()))
            assert len(batch["episode"]) % 16 == 0
    assert len(sizes) > (4 if "Fresh" in changes["environment.function"] else 0)
    assert 0 < counts[1] == counts[-1], counts


def test_schedules_count_prompts_and_not_rows(keys):
    """A cosine over six steps of two updates, by its formula, however many rows a step has."""
    cosine = {"actor.schedule": "cosine", "actor.learning_rate": 0.01, "algorithm.minibatch": 8}
    rows = run("GRPO", fresh(keys, **ONE, **cosine, steps=6))
    rates = [0.005 * (1 + math.cos(math.pi * update / 12)) for update in range(12)]
    wanted = [(rates[2 * i] + rates[2 * i + 1]) / 2 for i in range(6)]
    assert [row["actor/learning_rate"] for row in rows] == pytest.approx(wanted, rel=1e-5)


LAYOUTS = {
    "packs": {"data.packing": 72},
    "chosen packs": {"data.packing": "auto"},
    "micro-batches": {"actor.micro_batch": 4},
    "packs in passes": {"data.packing": 72, "actor.micro_batch": 4},
    "data 2": {"cluster.devices_per_process": 2},
    "tensor 2": {
        "cluster.devices_per_process": 2,
        "layout.actor.train.data": 1,
        "layout.actor.train.tensor": 2,
        "layout.actor.generate.tensor": 2,
    },
    "packs on two devices": {"cluster.devices_per_process": 2, "data.packing": 72},
}


def first_update(changes):
    """Ratios of all drawn tokens before the first update, by row, and the metrics of a step."""
    with trainer_of("GRPO", {**changes, "steps": 1}) as trainer:
        trainer.prepare()
        inputs, algorithm = trainer.inputs, trainer.algorithm
        prompts = prompt_batch(inputs.train.rows(np.arange(8)), inputs.prompt_length, 1)
        batch = join(algorithm.collect(prompts))
        again = join(algorithm.actor.compute_log_prob(batch))["old_logprobs"]
        ratios = np.where(batch["response_mask"], np.exp(again - batch["policy_logprobs"]), 1.0)
        assert (batch["response_mask"].any(axis=1) == (batch["episode"] >= 0)).all()
        assert (batch["response_mask"].sum(axis=1) < batch["response_lengths"]).any()
        return ratios, computed(trainer.step())


@pytest.fixture(scope="module")
def padded(keys):
    """The first update of padded rows on a device, by the environment's class."""
    return functools.cache(
        lambda name: first_update({**keys, **ONE, "environment.function": f"{DIGITS}:{name}"})
    )


USUAL = {"Digits": ["packs on two devices"], "Fresh": ["packs in passes", "data 2", "tensor 2"]}


@pytest.mark.parametrize(
    "environment, name",
    [
        pytest.param(environment, name, marks=[pytest.mark.slow] * (name not in usual))
        for environment, usual in USUAL.items()
        for name in LAYOUTS
    ],
)
def test_the_first_update_is_on_policy(environment, name, keys, padded, monkeypatch):
    """And its loss and gradient are those of padded rows on a device."""
    monkeypatch.setattr("hjax.workers.packer.MIN_PASS_PLACES", 1)
    changes = {**keys, **ONE, "environment.function": f"{DIGITS}:{environment}", **LAYOUTS[name]}
    ratios, row = first_update(changes)
    expected_ratios, expected = padded(environment)
    assert ratios.shape == expected_ratios.shape
    assert np.abs(ratios - 1).max() < 1e-5 and np.abs(expected_ratios - 1).max() < 1e-5
    assert row["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
    row.pop("actor/padding", None), row.pop("reference/padding", None)
    assert row["actor/grad_norm"] > 0.01
    assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


# Resumes

RESUMED = {"steps": 5, "checkpoint.every": 2, "eval.every": 2, "algorithm.minibatch": 8}


AHEAD = {
    "cluster.devices_per_process": 2,
    "placement": "disaggregate",
    "rollout.max_staleness": 1,
    "rollout.deterministic": True,
}


@pytest.mark.parametrize(
    "environment, more",
    [("Digits", {}), ("Fresh", {}), pytest.param("Fresh", AHEAD, marks=pytest.mark.slow)],
)
def test_a_stopped_run_continues_whatever_its_environments_take(
    environment, more, keys, tmp_path, monkeypatch
):
    changes = {**keys, **ONE, **RESUMED, **more}
    changes["environment.function"] = f"{DIGITS}:{environment}"
    run("GRPO", changes, tmp_path / "whole")
    monkeypatch.setenv("HJAX_TEST_SLEEP", "0.02")
    with trainer_of("GRPO", changes, tmp_path / "parts") as trainer:
        for _ in range(3):  # of which the last is in no checkpoint
            trainer.step()
    monkeypatch.setenv("HJAX_TEST_SLEEP", "0.05")
    more = {"environment.processes": 3}
    assert [row["step"] for row in run("GRPO", changes | more, tmp_path / "parts")] == [3, 4, 5]
    whole, parts = content(tmp_path / "whole"), content(tmp_path / "parts")
    assert parts == whole and len({row["reward/mean"] for row in whole[0]}) == 5


def test_killed_environments_change_nothing(keys, monkeypatch):
    """Ended by SIGKILL while others draw, their episodes are played again. Not at each draw: an
    episode that ends two processes in a row is lost, as it may be its own doing."""
    changes = fresh(keys, **ONE, steps=3)
    expected = run("GRPO", changes)
    draws, killed, draw = [], [], episode_rollout._draw

    def kill_and_draw(actor, step, greedy, requests):
        draws.append(step)
        if len(requests) > 1 and len(draws) % 4 == 0:
            pids = trainer.algorithm.environment._players.close.__self__.pids()
            os.kill(pids[len(killed) % len(pids)], signal.SIGKILL)
            killed.append(step)
        return draw(actor, step, greedy, requests)

    monkeypatch.setattr(episode_rollout, "_draw", kill_and_draw)
    with trainer_of("GRPO", changes) as trainer:
        found = [computed(row) for row in trainer.run()]
    assert found == expected and len(killed) >= 3
    assert all(row["episode/stop_done"] == 1.0 for row in found)


def test_failed_episodes_are_counted_as_episodes(keys, monkeypatch):
    """Not by the rows that they or others have."""
    monkeypatch.setenv("HJAX_TEST_FAILS", "2>")
    changes = fresh(keys, **ONE, steps=3)
    with trainer_of("GRPO", {**changes, "reward.max_unscored": 1.0}) as trainer:
        rows, batches = [], []
        for _ in range(3):
            rows.append(trainer.step())
            batches.append(trainer.batch)
    shares = [row.get("episode/stop_exception", 0.0) for row in rows]
    assert max(shares) > 0 and [row["reward/unscored"] for row in rows] == shares
    for batch, row in zip(batches, rows, strict=True):
        failed = np.array([reason == "exception" for reason in batch["stop_reason"]])
        assert not batch["row_mask"][failed].any() and np.isfinite(row["actor/loss"])
        assert len(set(batch["episode"][failed].tolist())) / 16 == row.get(
            "episode/stop_exception", 0
        )
    limit = max(shares) - 0.01
    with trainer_of("GRPO", {**changes, "reward.max_unscored": limit}) as trainer:
        with pytest.raises(RunError) as caught:
            trainer.run()
    count = round(16 * max(shares))
    assert f"failed in {count} of 16 episodes (exception {count}); the share" in str(caught.value)
    assert "raise that key. The first failure: ValueError: of the env" in str(caught.value)


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(keys, tmp_path):
    folder = tmp_path
    tiny = {key: x for key, x in TINY.items() if not key.startswith("data.task_options.")}
    changes = tiny | fresh(keys, **ONE, **RESUMED) | {"steps": 8, "checkpoint.every": 1}
    write_config(folder / "tiny.py", changes | {"algorithm.name": "GRPO"})
    done = launch("tiny.py", "--workdir=whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "hjax.launch", "--config=tiny.py", "--workdir=parts"]
    metrics = folder / "parts" / "metrics.jsonl"
    for rows in (2, 4):
        process = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"HJAX_TEST_SLEEP": "0.1"},
        )  # fmt: skip
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < rows:
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
    done = launch("tiny.py", "--workdir=parts", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert content(folder / "parts") == content(folder / "whole")
