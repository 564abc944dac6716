"""Rewards while others are still generated, on a Ray cluster of real processes.

Each process that generates judges prompts of its own; together they judge every prompt once.
"""

import collections
import contextlib

import pytest
from helpers import computed, tiny_config

import hjax
from hjax.controller import ray_calls
from hjax.run.reward_check import ROWS as FIRST_CALL

STEPS, PROMPTS, SAMPLES, EVALUATED = 2, 8, 2, 16
KEYS = {
    "steps": STEPS, "rollout.prompts": PROMPTS, "rollout.samples": SAMPLES,
    "rollout.max_response_length": 90, "rollout.slots": 8, "data.eval_size": EVALUATED,
    "eval.every": STEPS, "warm_start.steps": 0, "cluster.devices_per_process": 1,
}  # fmt: skip
# Every day: one prompt after the other ends in a program or two.
SHORT = {"rollout.max_response_length": 6, "rollout.slots": 0, "eval.every": 0,
         "cluster.reward_processes": 1}  # fmt: skip
# Odd lengths are unscored, so that outcomes and the share of unscored rows travel too.
REWARD = """
import os, pathlib
HERE = pathlib.Path(__file__).parent

def reward(prompts, responses, prompt_tokens, response_tokens, **columns):
    with open(HERE / f"{os.getpid()}.txt", "a") as file:
        for tokens in prompt_tokens:
            file.write(f"{tokens}\\n")
    return [None if len(t) % 2 else float(len(t)) for t in response_tokens]
"""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray_calls.start_local_cluster(processes=6)
    yield
    ray_calls.end_here()


def run(folder, algorithm, changes):
    """Metrics of a run, who judged how many rows, and the processes of the pool that generates."""
    folder.mkdir()
    samples = 1 if algorithm == "ReMax" else SAMPLES
    (folder / "mine.py").write_text(REWARD)
    keys = KEYS | changes | {
        "reward.function": f"{folder}/mine.py:reward", "reward.max_unscored": 1.0,
        "rollout.samples": samples,
    }  # fmt: skip
    with contextlib.closing(hjax.Trainer(tiny_config(algorithm, keys))) as trainer:
        rows = [computed(row) for row in trainer.run()]
        executor = trainer.roles.generating
        pids = executor.pids() if hasattr(executor, "pids") else []
    judged = {int(file.stem): file.read_text().splitlines() for file in folder.glob("*.txt")}
    return rows, judged, pids


EVERY_DAY = ("GRPO", "colocate", 2)
SLOW = [
    ("GRPO", "colocate", 1),
    ("ReMax", "colocate", 2),
    ("PPO", "split", 2),
    ("PPO", "split", 4),
    ("GRPO", "disaggregate", 2),
    ("GRPO", "disaggregate", 4),
    ("GRPO", "disaggregate, in parts", 2),
]
CASES = [EVERY_DAY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("algorithm, placement, processes", CASES)
def test_each_prompt_is_judged_once_and_metrics_are_the_same(
    algorithm, placement, processes, tmp_path
):
    here = {"placement": placement, "cluster.address": "local", "cluster.processes": processes,
            "cluster.reward_processes": 2}  # fmt: skip
    alone = {"placement": placement, "cluster.devices_per_process": processes}
    # In a thread, so that what a function notes is under the process that generates.
    early = {"reward.while_generating": True, "reward.runs_in": "thread"}
    if placement.endswith("in parts"):
        parts = {"placement": "disaggregate", "rollout.partial_tokens": 30,
                 "rollout.max_staleness": 1, "rollout.deterministic": True}  # fmt: skip
        here, alone = here | parts, alone | parts
    if (algorithm, placement, processes) == EVERY_DAY:
        here, alone = here | SHORT, alone | SHORT
    rows, judged, pids = run(tmp_path / "early", algorithm, here | early)
    expected, once, _ = run(tmp_path / "late", algorithm, alone)
    assert len(rows) == len(expected) == STEPS
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)
    assert any(row.get("reward/unscored") for row in rows)  # it was looked at
    # Every row once, by the processes that generate, each of them its share.
    assert set(judged) == set(pids)
    told = collections.Counter(line for lines in judged.values() for line in lines)
    late = collections.Counter(line for lines in once.values() for line in lines)
    if placement.endswith("in parts"):
        # A batch may have been begun ahead when the run ended; who generates judged of it already.
        assert (told & late).total() >= STEPS * PROMPTS * SAMPLES + EVALUATED
        assert all(count % SAMPLES == 0 for count in (told - late).values())
        assert (told - late).total() <= PROMPTS * SAMPLES
        return
    # Beside a cluster the function is first called once, on some demonstrations.
    assert not told - late and (late - told).total() == FIRST_CALL
    shares = [len(lines) for lines in judged.values()]
    assert max(shares) == min(shares)
