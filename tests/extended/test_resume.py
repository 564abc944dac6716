"""A run that was stopped or killed goes on as if nothing had happened, bit for bit."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import TINY, computed, launch, read_rows, tiny_config, trainer_of, write_config

import hjax
from hjax.errors import ConfigError, DataError

# All that decides the next step beside parameters: an adaptive KL, mini-batches drawn anew,
# a schedule, demonstrations.
STATEFUL = {
    "steps": 6,
    "checkpoint.every": 2,
    "eval.every": 3,
    "warm_start.steps": 2,
    "algorithm.minibatch": 8,
    "algorithm.epochs": 2,
    "actor.schedule": "cosine",
}
ADAPTIVE = STATEFUL | {"algorithm.kl_target": 0.01, "algorithm.kl_horizon": 100}
COSTLY = STATEFUL | {"algorithm.pretraining_coef": 0.1, "algorithm.cost_window": 3}
# Prompts drawn anew within a step: most groups of a model that knows nothing are all wrong.
DRAWN = STATEFUL | {"algorithm.resample": 2, "data.task_options.partial": 0.0}
# What shows, by algorithm, that more than parameters has moved in each step.
MOVES = {"PPO": "kl/coefficient", "SafeRLHF": "cost/multiplier", "DAPO": "actor/learning_rate"}
THREE = {"steps": 3, "checkpoint.every": 1, "checkpoint.keep": 3}


def content(workdir):
    """What must be equal: the computed metrics and everything sampled."""
    rows = [computed(row) for row in read_rows(workdir)]
    return rows, read_rows(workdir, "samples.jsonl"), read_rows(workdir, "warm_start.jsonl")


def run(algorithm, changes, workdir, steps=None):
    with trainer_of(algorithm, changes, workdir) as trainer:
        if steps is None:
            return trainer.run()
        return [trainer.step() for _ in range(steps)]


@pytest.fixture(scope="module")
def whole_ppo(tmp_path_factory):
    """The workdir of a PPO that was left alone."""
    workdir = tmp_path_factory.mktemp("ppo") / "whole"
    run("PPO", ADAPTIVE, workdir)
    return workdir


@pytest.fixture(scope="module")
def whole_safe_rlhf(tmp_path_factory):
    """The same of Safe-RLHF."""
    workdir = tmp_path_factory.mktemp("safe_rlhf") / "whole"
    run("SafeRLHF", COSTLY, workdir)
    return workdir


@pytest.fixture(scope="module")
def whole_dapo(tmp_path_factory):
    """The same of DAPO."""
    workdir = tmp_path_factory.mktemp("dapo") / "whole"
    run("DAPO", DRAWN, workdir)
    rows = read_rows(workdir)
    assert any(row["rollout/groups_drawn"] > row["rollout/groups_kept"] for row in rows)
    return workdir


@pytest.fixture(scope="module")
def whole_grpo(tmp_path_factory):
    """Three steps of GRPO with a checkpoint after each; copy it before changing anything."""
    workdir = tmp_path_factory.mktemp("grpo") / "whole"
    run("GRPO", THREE, workdir)
    return workdir


def copy_until(step, workdir, copy):
    """A copy of a workdir as if its later checkpoints had not been written."""
    shutil.copytree(workdir, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    return copy


@pytest.mark.parametrize(
    "algorithm, changes, undisturbed",
    [
        ("PPO", ADAPTIVE, "whole_ppo"),
        pytest.param("SafeRLHF", COSTLY, "whole_safe_rlhf", marks=pytest.mark.slow),
        pytest.param("DAPO", DRAWN, "whole_dapo", marks=pytest.mark.slow),
    ],
    ids=["PPO", "SafeRLHF", "DAPO"],
)
def test_a_stopped_run_continues_bit_for_bit(algorithm, changes, undisturbed, tmp_path, request):
    undisturbed = request.getfixturevalue(undisturbed)
    # Three steps, of which the last is in no checkpoint; then to the end.
    run(algorithm, changes, tmp_path / "parts", steps=3)
    assert [row["step"] for row in read_rows(tmp_path / "parts")] == [1, 2, 3]
    resumed = run(algorithm, changes, tmp_path / "parts")
    assert [row["step"] for row in resumed] == [3, 4, 5, 6]  # from checkpoint 2
    whole, parts = content(undisturbed), content(tmp_path / "parts")
    assert parts == whole
    assert [row["step"] for row in parts[0]] == [1, 2, 3, 4, 5, 6]
    # Nothing is compiled after the second step, with mini-batches and all.
    counts = [row["compile/count"] for row in read_rows(undisturbed)]
    assert counts[1:] == [counts[1]] * 5
    assert len({row[MOVES[algorithm]] for row in whole[0]}) == 6  # it did move
    assert len({row["actor/learning_rate"] for row in whole[0]}) == 6


def test_a_run_stopped_by_request_saves_and_continues(tmp_path, whole_ppo):
    changes = ADAPTIVE | {"checkpoint.every": 0}
    with trainer_of("PPO", changes, tmp_path / "parts") as trainer:
        trainer.step()
        trainer.stop_requested = signal.SIGTERM
        assert trainer.run() == []
    assert [p.name for p in (tmp_path / "parts" / "checkpoints").iterdir()] == ["1"]
    run("PPO", changes, tmp_path / "parts")
    assert content(tmp_path / "parts") == content(whole_ppo)  # whatever its checkpoints


def test_rows_after_the_restored_checkpoint_are_dropped(tmp_path, whole_grpo):
    workdir = copy_until(2, whole_grpo, tmp_path / "run")
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert max(row["step"] for row in read_rows(workdir, name)) == 3
    with trainer_of("GRPO", THREE, workdir) as trainer:
        trainer.prepare()
        assert trainer.step_number == 2
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert max(row["step"] for row in read_rows(workdir, name)) == 2


def test_layout_placement_and_steps_may_change(tmp_path, whole_grpo):
    copy_until(2, whole_grpo, tmp_path / "parts")
    other = THREE | {"steps": 4, "placement": "split", "layout.actor.train.fsdp": 2}
    row, last = run("GRPO", other, tmp_path / "parts")
    assert last["step"] == 4
    expected = computed(read_rows(whole_grpo)[-1])
    for key in ("reward/mean", "actor/loss", "kl/reference"):
        assert row[key] == pytest.approx(expected[key], abs=1e-5)
    plan = json.loads((tmp_path / "parts" / "plan.json").read_text())
    assert plan["parallelism"]["actor"]["train"]["fsdp"] == 2


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"actor.learning_rate": 0.1}, {"algorithm.epochs": 2}]
)
def test_another_changed_key_is_refused_by_name(change, whole_grpo):
    before = sorted(p.name for p in whole_grpo.rglob("*"))
    (key,) = change
    with pytest.raises(ConfigError, match=f"config.{key}=.*, now .*give the old value") as caught:
        hjax.Trainer(tiny_config("GRPO", THREE | change), workdir=whole_grpo)
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in whole_grpo.rglob("*")) == before


def test_other_data_under_the_same_name_is_refused(tmp_path):
    def write(count):
        rows = [{"prompt": f"{i}>", "answer": "1"} for i in range(count)]
        (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))

    (tmp_path / "reward.py").write_text("def one(p, r, **c): return [1.0] * len(r)\n")
    from hjax.data.tasks import get_task

    get_task("sorting").tokenizer().save(tmp_path / "tokenizer")
    changes = {
        "steps": 1,
        "data.path": f"{tmp_path}/data.jsonl",
        "tokenizer.path": f"{tmp_path}/tokenizer",
        "reward.function": f"{tmp_path}/reward.py:one",
        "rollout.max_prompt_length": 5,
    }
    write(20)
    run("GRPO", changes, tmp_path / "run")
    write(30)
    with pytest.raises(ConfigError, match="prompt order has size 20, this run's data size 30"):
        run("GRPO", changes | {"steps": 2}, tmp_path / "run")


@pytest.mark.parametrize(
    "item",
    ["actor.params", *(pytest.param(n, marks=pytest.mark.slow)
                       for n in ("actor.optimizer", "controller.json"))],
)  # fmt: skip
def test_a_truncated_checkpoint_gets_its_line(item, tmp_path, whole_grpo):
    workdir = copy_until(2, whole_grpo, tmp_path / "run")
    checkpoint = workdir / "checkpoints" / "2"
    for file in (checkpoint / item, *(checkpoint / item).rglob("*")):
        if file.is_file():
            with open(file, "rb+") as opened:
                opened.truncate(file.stat().st_size // 2)
    with pytest.raises(DataError, match="checkpoints/2: this checkpoint cannot be read") as caught:
        run("GRPO", THREE, workdir)
    message = str(caught.value)
    assert "\n" not in message and f"({item} is not what was saved" in message
    assert "with --repair goes on from the last sound one" in message and len(message) < 600


# The command in a process of its own

RUN = TINY | {
    "steps": 12,
    "cluster.devices_per_process": 1,
    "eval.every": 5,
    "checkpoint.every": 1,
    "warm_start.steps": 3,
    "algorithm.kl_target": 0.01,
    "algorithm.kl_horizon": 100,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config of a tiny PPO, and its undisturbed run."""
    folder = tmp_path_factory.mktemp("runs")
    write_config(folder / "tiny.py", RUN)
    done = launch("tiny.py", "--workdir=whole", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def start(folder, workdir, **changes):
    arguments = [f"--config.{key}={value}" for key, value in changes.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "hjax.launch", "--config=tiny.py", f"--workdir={workdir}"]
        + arguments,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rows_so_far(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at_random(process, metrics, rng):
    """Kill -9 at some moment from Python's first lines to some rows on; whether it still ran."""
    rows = rng.randint(0, 4)
    end = rows_so_far(metrics) + rows
    if rows:
        while process.poll() is None and rows_so_far(metrics) < end:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1))
    else:
        time.sleep(rng.uniform(0, 6))
    ran = process.poll() is None
    process.kill()
    process.communicate()
    return ran


def kill_and_rerun(folder, workdir, kills, seed):
    """Kill the run so often, then let it end; how many of the kills came before its end."""
    rng, metrics = random.Random(seed), folder / workdir / "metrics.jsonl"
    done = sum(kill_at_random(start(folder, workdir), metrics, rng) for _ in range(kills))
    last = launch("tiny.py", f"--workdir={workdir}", cwd=folder)
    assert last.returncode == 0, last.stderr
    assert content(folder / workdir) == content(folder / "whole")
    return done


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_ten_times_and_run_again(folder, seed):
    assert kill_and_rerun(folder, f"killed_ten_{seed}", kills=10, seed=seed) >= 3
