"""`eval.samples`: several sampled answers per held-out prompt."""

import math

import numpy as np
import pytest
from helpers import ONE_DEVICE, episode_keys, tiny_config, trainer_of

import hjax
from hjax.errors import ConfigError
from hjax.run import evaluation

KEYS = {**ONE_DEVICE, "eval.every": 1, "eval.prompts": 11, "eval.samples": 4}


def test_they_are_scored_by_their_prompts(monkeypatch):
    """The answers' own text, scored anew by the task's verifier."""
    seen = []
    answers = evaluation._answers

    def watched(indices, rows, **options):
        batch = answers(indices, rows, **options)
        seen.append((options.get("samples", 0), list(indices), dict(batch)))
        return batch

    monkeypatch.setattr(evaluation, "_answers", watched)
    with trainer_of("GRPO", KEYS) as trainer:
        metrics = trainer.evaluate(3)
        task, held_out = trainer.inputs.task, trainer.inputs.held_out
    sampled = [(indices, batch) for samples, indices, batch in seen if samples]
    assert [i for indices, _ in sampled for i in indices] == list(range(11))
    rewards, right, texts = [], [], []
    for indices, batch in sampled:
        expected = [held_out.prompt_text[i] for i in indices for _ in range(4)]
        assert list(batch["prompt_text"]) == expected
        texts += batch["response_text"]
        rewards += list(batch["rewards"])
        columns = batch["columns"]
        right += list(task.correct(batch["prompt_text"], batch["response_text"], **columns))
    assert len(set(texts)) > 20  # they are drawn, and each by itself
    rewards, right = np.reshape(rewards, (11, 4)), np.reshape(right, (11, 4))
    assert metrics["eval/reward_mean@4"] == pytest.approx(rewards.mean())
    assert metrics["eval/reward_best@4"] == pytest.approx(rewards.max(axis=1).mean())
    assert metrics["eval/accuracy_mean@4"] == pytest.approx(right.mean())
    for k in (1, 2, 4):
        each = [1 - math.comb(4 - c, k) / math.comb(4, k) for c in right.sum(axis=1)]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(each))
    assert metrics["eval/reward_best@4"] > metrics["eval/reward_mean@4"]


def test_training_is_the_same_and_draws_follow_from_the_step():
    rows = {}
    for samples in (1, 3):
        with trainer_of("GRPO", {**KEYS, "eval.samples": samples}) as trainer:
            rows[samples] = trainer.run(2)
            again = [trainer.evaluate(step) for step in (2, 2, 5)]
    for one, three in zip(rows[1], rows[3]):
        for name in ("reward/mean", "actor/loss", "eval/reward"):
            assert one[name] == three[name]
        assert "eval/reward_mean@3" in three and "eval/pass@2" in three
        assert not any("@" in name for name in one)
    assert again[0] == again[1]
    assert again[0]["eval/reward_mean@3"] != again[2]["eval/reward_mean@3"]


class Own(hjax.algorithms.GRPO):
    """Answers in a way of its own, as before there were samples."""

    def answer(self, prompts, greedy=False):
        return super().answer(prompts, greedy)


def test_what_does_not_go_together():
    with pytest.raises(ConfigError, match="the shortest answers alone would be scored"):
        tiny_config("GRPO", {**KEYS, "rollout.extra_samples": 1})
    with trainer_of(f"{__file__}:Own", {**KEYS, "eval.samples": 1}) as trainer:
        assert "eval/reward" in trainer.evaluate(1)
    with trainer_of(f"{__file__}:Own", KEYS) as trainer:
        with pytest.raises(ConfigError, match="Own.answer takes no argument `samples`; add it"):
            trainer.evaluate(1)


@pytest.mark.extended
def test_episodes_are_played_several_times_too(tmp_path):
    keys = {**KEYS, **episode_keys(tmp_path), "eval.prompts": 5, "eval.samples": 3}
    with trainer_of("GRPO", keys) as trainer:
        metrics = trainer.evaluate(1)
        again = trainer.evaluate(1)
    assert metrics["eval/reward_best@3"] >= metrics["eval/reward_mean@3"]
    assert metrics == again
