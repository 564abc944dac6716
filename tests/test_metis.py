"""METIS: judgements by hand, what is chosen, its loss and memory, resumes, generation ahead."""

import logging
import shutil

import numpy as np
import pytest
import scipy.stats
from helpers import ONE_DEVICE, computed, tiny_config, trainer_of
from test_ahead import AHEAD

from hjax.algorithms import METIS
from hjax.algorithms.metis import (
    COLLAPSED_AFTER,
    FIRST_SEQUENCE,
    JudgedPrompts,
    bin_of,
    judgement_metrics,
    judgement_of,
    judgement_rewards,
    reward_variances,
)
from hjax.data.tasks import get_task
from hjax.errors import ConfigError, RunError

TASK = get_task("mixed_reversal")
TINY = {
    "data.task": "mixed_reversal", "data.task_options.length": 3, "data.task_options.partial": 0.5,
    "algorithm.judge_example": "{prompt}?{bin};", "algorithm.judge_context": 24,
    "rollout.max_response_length": 4, "warm_start.steps": 5,
}  # fmt: skip


class Actor:
    """Writes judgements: by prompt text, or whatever `says` has."""

    def __init__(self, says):
        self.says, self.asked = says, []

    def generate_sequences(self, prompts, samples=None):
        assert samples == 1
        tokens, mask = prompts["prompts"], np.asarray(prompts["prompt_mask"], bool)
        texts = [TASK.tokenizer().decode(t[m].tolist()) for t, m in zip(tokens, mask, strict=True)]
        self.asked.append((texts, prompts))
        drawn = [TASK.tokenizer().encode(self.says(text), add_special=False) for text in texts]
        length = max(map(len, drawn))
        responses = np.array([[*x, *[0] * (length - len(x))] for x in drawn])
        mask = np.array([[1] * len(x) + [0] * (length - len(x)) for x in drawn], bool)
        return {"responses": responses, "response_mask": mask}


class Order:
    """Prompts 1|, 2|, ... in their order."""

    number = 4

    def __init__(self, version=0):
        self.version, self.at = version, 0

    def next(self, count):
        rows = list(range(self.at, self.at + count))
        self.at += count
        texts = [f"{row}|" for row in rows]
        prompts = np.array(rows)[:, None]
        columns = {"answer": list(map(str, rows))}
        made = {"prompts": prompts, "prompt_text": texts, "columns": columns, "step": 4}
        return made | {"choice": {"row": rows}}


def algorithm(says=lambda text: "3", samples=2, **keys):
    config = METIS.default_config()
    config.update({"judge_example": "{prompt}?{bin};", "judge_context": 20, **keys})
    roles = {"actor": Actor(says), "reference": None, "reward": None}
    return METIS(config, roles, samples=samples, max_response_length=8, tokenizer=TASK.tokenizer())


def answered(prompts, rewards):
    """The batch of answers to chosen prompts, two each."""
    twice = [i for i in range(len(prompts["prompt_text"])) for _ in range(2)]
    choice = {name: [values[i] for i in twice] for name, values in prompts["choice"].items()}
    mask = np.ones((len(twice), 1), bool)
    return {
        "response_mask": mask, "rewards": np.array(rewards, np.float32), "choice": choice,
        "prompt_text": [prompts["prompt_text"][i] for i in twice],
        "truncated": ~mask[:, 0], "logprobs": np.zeros(mask.shape, np.float32),
    }  # fmt: skip


def test_variances_judgements_and_their_rewards():
    found = reward_variances([1, 0, 1, 1, 0, 0, 0.1, 0.1, 0.5, np.nan, np.nan, np.nan], 2)
    np.testing.assert_array_equal(found, [0.25, 0, 0, 0, np.nan, np.nan])
    assert [bin_of(v) for v in (0, 0.0249, 0.026, 0.1875, 0.25)] == [0, 0, 1, 4, 5]
    assert [judgement_of(x) for x in ("3", "about 2, or 4;", "0")] == [0.15, 0.2, 0.0]
    assert np.isnan([judgement_of(x) for x in ("", "7", "x", "12", "0.25", "6")]).all()
    rewards = judgement_rewards(
        np.array([0.25, 0.0, np.nan, 0.1]), np.array([0.25, 0.25, 0, np.nan])
    )
    np.testing.assert_allclose(rewards, [1, 0, -1, np.nan])


@pytest.mark.parametrize("reward", [1.5, -0.1])
def test_rewards_beyond_0_and_1_are_refused(reward):
    with pytest.raises(RunError, match="from 0 to 1"):
        reward_variances([0.5, reward], 2)


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(3)
    estimates, variances = rng.integers(0, 6, 40) / 20, rng.integers(0, 4, 40) / 16
    estimates[:3] = np.nan
    found = judgement_metrics(estimates, variances)
    wanted = scipy.stats.spearmanr(estimates[3:], variances[3:]).statistic
    assert found["rank_correlation"] == pytest.approx(wanted, abs=1e-12)
    assert "rank_correlation" not in judgement_metrics(np.full(4, 0.1), np.arange(4) / 16)


def test_the_largest_estimates_are_taken_and_some_of_the_rest():
    """Of 40 prompts 30 to 39 are judged 5, 0 to 9 not at all: nine of the ten, one of the rest."""
    made = algorithm(lambda text: "5" if text[-4:-3] == "3" else "" if len(text) == 3 else "1")
    chosen = made.choose(Order(), 10)["choice"]
    best = [r for r, u in zip(chosen["row"], chosen["uniform"], strict=True) if not u]
    assert len(best) == 9 and set(best) < set(range(30, 40)) and len(chosen["row"]) == 10
    assert made.choose(Order(), 10)["choice"]["row"] == chosen["row"]  # ties by a seed
    (texts, asked), *_ = made.actor.asked
    assert texts[:2] == ["0|?", "1|?"] and asked["first"] == FIRST_SEQUENCE and asked["step"] == 4
    assert asked["prompts"].shape == (40, 20)


def test_without_an_estimate_prompts_are_taken_uniformly():
    rows = [algorithm(lambda text: "").choose(Order(), 4)["choice"] for _ in range(1)]
    assert rows[0]["failed"] == [1.0] * 4 and len(set(rows[0]["row"])) == 4


def test_memory_is_of_what_the_weights_have_learned_from():
    made = algorithm(judge_memory=2, judge_pool=1)
    for step, rewards in ((1, [1, 0, 1, 1]), (2, [0, 0, 1, 0.5])):
        prompts = made.choose(Order(step - 1), 2)
        made.step_number = step
        batch = made.compute_advantages(answered(prompts, rewards))
        made.remember(batch)
    made.choose(Order(1), 2)
    assert made.actor.asked[-1][0] == ["0|?5;1|?0;0|?", "0|?5;1|?0;1|?"]
    again = algorithm(judge_memory=2, judge_pool=1)
    again.restore(made.state())
    for each in (made, again):
        each.choose(Order(2), 1)
        assert each.actor.asked[-1][0] == ["0|?0;1|?1;0|?"]
    short = algorithm(judge_memory=2, judge_pool=1, judge_context=9)
    short.restore(made.state())
    short.choose(Order(2), 1)
    assert short.actor.asked[-1][0] == ["1|?1;0|?"]  # what fits


def test_the_judgements_batch_by_hand():
    made = algorithm(lambda text: "35"[int(text[0]) % 2], judge_pool=1, judge_baseline=0.5)
    prompts = made.choose(Order(), 3)
    made.compute_advantages(answered(prompts, [1, 0, 1, 1, 0, np.nan]))
    found = made.pretraining_batch()
    # v .25 and 0 of estimates .15 and .25: rewards 1 - .4^2 = .84 and 1 - 1 = 0; mean .42.
    np.testing.assert_allclose(found["advantages"][:, 0], [0.42, -0.42, 0], atol=1e-6)
    assert found["row_mask"].tolist() == [True, True, False]
    assert found["response_mask"].sum(axis=1).tolist() == [1, 1, 0]
    assert found["coefficient"] == np.float32(0.01)
    made.compute_advantages(answered(prompts, [1, 1, 1, 1, 0, 0]))
    # Rewards 1 - .6^2 = .64, 0, .64 against the first mean, .42.
    found = made.pretraining_batch()["advantages"][:, 0]
    np.testing.assert_allclose(found, [0.22, -0.42, 0.22], atol=1e-6)
    mean = (0.64 + 0 + 0.64) / 3
    assert made.state()["judge"]["baseline"] == pytest.approx(0.5 * 0.42 + 0.5 * mean)
    assert algorithm(judge_weight=0.0).pretraining_batch() is None


def test_first_steps_are_shown_what_came_out():
    made = algorithm(judge_warm_start=1)
    prompts = made.choose(Order(0), 2)
    assert prompts["choice"]["row"] == [0, 1] and not made.actor.asked
    made.compute_advantages(answered(prompts, [1, 0, 0, 0]))
    found, tokenizer = made.pretraining_batch(), TASK.tokenizer()
    wanted = [[*tokenizer.encode(x, add_special=False), tokenizer.eos_id] for x in "50"]
    assert found["responses"][:, :2].tolist() == wanted and found["coefficient"] == 1
    assert made.choose(Order(1), 2)["choice"]["estimate"] == [0.15] * 2


def test_a_collapse_is_said(caplog):
    made = algorithm(judge_pool=1)
    prompts = made.choose(Order(), 2)
    with caplog.at_level(logging.WARNING):
        for _ in range(2 * COLLAPSED_AFTER):
            made.compute_advantages(answered(prompts, [1, 0, 1, 1]))
    [record] = caplog.records
    assert "collapsed" in record.getMessage()


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"algorithm.judge_example": "{bin} of {prompt}"}, "judge_example"),
        ({"algorithm.judge_pool": 0}, "judge_pool"),
        ({"rollout.samples": 1}, "rollout.samples=1"),
        ({"algorithm.pretraining_coef": 0.1}, "pretraining_coef"),
    ],
)
def test_what_makes_no_sense_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said):
        with trainer_of("METIS", TINY | ONE_DEVICE | keys):
            pass


def test_the_task_has_all_lengths():
    records = TASK.examples("train", 0, 300)
    assert {len(each["answer"]) for each in records} >= set(range(4, 13))
    assert all(each["prompt"][:-1] == each["answer"][::-1] for each in records)
    with pytest.raises(ConfigError, match="shortest"):
        get_task("mixed_reversal", shortest=9, length=3)


@pytest.mark.extended
@pytest.mark.parametrize("apart", [False, True], ids=["synchronous", "ahead"])
def test_a_run_resumes_bit_for_bit(apart, tmp_path):
    changes = TINY | {"steps": 4, "checkpoint.every": 2, "algorithm.judge_warm_start": 1}
    changes |= {**AHEAD, "steps": 4, "checkpoint.every": 2} if apart else ONE_DEVICE
    changes.pop("reward.function", None)
    with trainer_of("METIS", changes, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
        versions = [row["choice/version"] for row in rows]
    assert versions == ([0, 0, 2, 2] if apart else [0, 1, 2, 3])
    assert all("actor/pretrain_loss" in row for row in rows)
    assert all(row["choice/tokens"] > 0 for row, at in zip(rows, versions, strict=True) if at)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/4")
    with trainer_of("METIS", changes, tmp_path / "again") as trainer:
        assert [computed(row) for row in trainer.run()] == rows[2:]


@pytest.mark.extended
def test_it_goes_over_any_algorithm_and_an_oracle_judges(tmp_path):
    (tmp_path / "judged.py").write_text(
        "from hjax.algorithms import PPO\n"
        "from hjax.algorithms.metis import JudgedPrompts\n"
        "class Judged(JudgedPrompts, PPO):\n"
        "    pass\n"
    )
    name = f"{tmp_path}/judged.py:Judged"
    changes = TINY | ONE_DEVICE | {"steps": 2}
    with trainer_of(name, changes) as trainer:
        assert isinstance(trainer.algorithm, JudgedPrompts)
        rows = trainer.run()
    assert all(np.isfinite(row["critic/loss"]) and "judge/reward" in row for row in rows)
    with trainer_of(name, changes | {"algorithm.judge": "rollouts"}) as trainer:
        rows = trainer.run()
    # Most prompts of a step whose estimate is 0 have a variance of 0 then.
    assert all(row["judge/estimate_std"] >= 0 and row["choice/tokens"] > 0 for row in rows)


def test_the_config_of_a_run_is_checked():
    config = tiny_config("METIS", TINY)
    assert METIS.longest_prompt(config.algorithm, 5) == 24
    config.algorithm.judge = "rollouts"
    assert METIS.longest_prompt(config.algorithm, 5) == 5
