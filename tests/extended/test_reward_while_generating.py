"""``reward.while_generating``: the same rewards, sooner."""

import threading
import time

import numpy as np
import pytest
from helpers import computed, trainer_of

from hjax.errors import RunError
from hjax.rewards.concurrent_rewards import ConcurrentScorer, PendingReward, PromptResponses
from hjax.rewards.function import RewardFunction
from hjax.run.reward_check import TRIAL_ROWS as FIRST_CALL

LONG = {"rollout.max_response_length": 90, "steps": 2, "eval.every": 2, "warm_start.steps": 0}
CASES = {
    "function": ("GRPO", {}),
    "cost, slots": ("SafeRLHF", {"rollout.slots": 16}),
    "greedy, guesses": ("ReMax", {"rollout.speculative_tokens": 2}),
    "packs": ("PPO", {"data.packing": 128}),
    "apart": ("GRPO", {"placement": "disaggregate"}),
    "ahead": ("GRPO", {"placement": "disaggregate", "rollout.max_staleness": 1,
                       "rollout.deterministic": True}),
    "stages": ("GRPO", {"model.layers": 2, "layout.actor.train.pipe": 2,
                        "layout.actor.generate.pipe": 2, "rollout.slots": 16}),
    "parts": ("GRPO", {"placement": "disaggregate", "rollout.max_staleness": 1,
                       "rollout.deterministic": True, "rollout.partial_tokens": 30}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_metrics_are_the_same(name, tmp_path):
    algorithm, changes = CASES[name]
    rows = []
    for early in (True, False):
        keys = LONG | changes | {"reward.while_generating": early}
        with trainer_of(algorithm, keys, workdir=tmp_path / str(early)) as trainer:
            rows.append(trainer.run())
    for one, other in zip(*rows, strict=True):
        found, expected = computed(one), computed(other)
        found.pop("rollout/guesses_right", None), expected.pop("rollout/guesses_right", None)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_answers_are_judged_before_all_have_ended(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import threading\n"
        "calls = []\n"
        "def reward(prompts, responses, **columns):\n"
        "    calls.append((len(responses), threading.current_thread().name, columns))\n"
        "    return [float(len(t)) for t in columns['response_tokens']]\n"
    )
    keys = LONG | {
        "reward.function": f"{tmp_path}/mine.py:reward", "reward.while_generating": True,
        "reward.runs_in": "thread", "steps": 2, "eval.every": 0, "rollout.slots": 16,
        "rollout.prompts": 16,
        "rollout.samples": 4,
    }  # fmt: skip
    with trainer_of("GRPO", keys, workdir=tmp_path / "run") as trainer:
        row = trainer.step()
        function = trainer.roles.builds["reward"].options["function"].function
        calls = function.__globals__["calls"]
        worker = trainer.roles.groups["reward"].worker
        worker.function.function = lambda prompts, responses, **columns: [7.0] * len(responses)
        assert trainer.step()["reward/mean"] == 7.0  # the same function judges early
    assert row["reward/mean"] == pytest.approx(row["response/length_mean"])
    assert calls.pop(0)[0] == FIRST_CALL  # before the training, on demonstrations
    # Whole groups, several times, each row once, all with the same columns.
    assert sum(count for count, *_ in calls) == 64 and len(calls) > 1
    assert all(count % 4 == 0 for count, *_ in calls)


def test_what_waits_is_judged_together_and_failures_are_each_ones():
    begun, go_on, sizes = threading.Event(), threading.Event(), []

    def reward(prompts, responses, **columns):
        sizes.append(len(responses))
        begun.set()
        assert go_on.wait(60)
        if "bad" in responses:
            raise ValueError("a bad one")
        return [None if r == "none" else float(c) for r, c in zip(responses, columns["more"])]

    judge = ConcurrentScorer(RewardFunction(reward))

    def answers(*responses):
        count = len(responses)
        return PromptResponses(["p"] * count, responses, {"more": [1, 2][:count]}, [[1]] * count,
                       [[2]] * count)  # fmt: skip

    first = judge.submit(answers("a", "b"))
    assert begun.wait(60)
    second, third = judge.submit(answers("c", "none")), judge.submit(answers("d"))
    go_on.set()
    result = PendingReward.gathered([*third, *reversed(second), *first])
    assert sizes == [2, 3]
    np.testing.assert_array_equal(result.rewards, [1, np.nan, 1, 1, 2])
    assert result.row_outcomes == ("ok", "none", "ok", "ok", "ok")
    assert result.first_traceback is None
    bad = PendingReward.gathered(judge.submit(answers("bad", "a")))
    assert np.isnan(bad.rewards).all() and bad.outcomes["exception"] == 2
    assert "a bad one" in bad.first_traceback
    deadline = time.monotonic() + 60
    while any(t.name == "judge" for t in threading.enumerate()):  # none is left behind
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_function_that_fails_ends_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("def reward(prompts, responses, **_): raise ValueError(1)\n")
    keys = LONG | {
        "reward.function": f"{tmp_path}/mine.py:reward", "reward.while_generating": True,
    }  # fmt: skip
    with (
        pytest.raises(RunError, match="fails on 4 demonstrations, before training.*ValueError: 1"),
        trainer_of("GRPO", keys, workdir=tmp_path / "run") as trainer,
    ):
        trainer.run()
