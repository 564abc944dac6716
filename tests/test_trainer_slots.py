"""Sequences that follow each other in slots, or are guessed, make the run that all at once make."""

import pytest
from helpers import computed, trainer_of

from hjax.errors import ConfigError

# Most answers end early, some late: sizes of all kinds are met.
LONG = {"rollout.max_response_length": 90, "steps": 3, "eval.every": 2, "warm_start.steps": 0}
STAGES = {"model.layers": 2, "layout.actor.train.pipe": 2, "layout.actor.generate.pipe": 2}
CASES = {
    "slots": ("GRPO", {"rollout.slots": 16}),
    "critic, split": ("PPO", {"rollout.slots": 16, "placement": "split"}),
    "adapters": ("GRPO", {"rollout.slots": 32, "actor.lora.rank": 2}),
    "tensor": ("ReMax", {"rollout.slots": 16, "layout.actor.generate.tensor": 2,
                         "layout.actor.train.tensor": 2}),
    "packs": ("GRPO", {"rollout.slots": 16, "data.packing": 128}),
    "apart": ("PPO", {"rollout.slots": 16, "placement": "disaggregate"}),
    "guesses, slots": ("GRPO", {"rollout.speculative_tokens": 3, "rollout.slots": 16}),
    "guesses, adapters, packs": ("PPO", {"rollout.speculative_tokens": 2, "actor.lora.rank": 2,
                                         "data.packing": 128}),
    "guesses, devices": ("ReMax", {"rollout.speculative_tokens": 2,
                                   "layout.actor.generate.tensor": 2,
                                   "layout.actor.train.tensor": 2}),
    "guesses, ahead": ("GRPO", {"rollout.speculative_tokens": 2, "placement": "disaggregate"}),
    "parts": ("GRPO", {"rollout.slots": 16, "rollout.speculative_tokens": 2,
                       "placement": "disaggregate", "rollout.partial_tokens": 30,
                       "rollout.max_staleness": 1, "rollout.deterministic": True}),
    "stages": ("GRPO", STAGES | {"rollout.slots": 16}),
    "stages, guesses, parts": ("GRPO", {
        "rollout.slots": 8, "rollout.speculative_tokens": 2, "placement": "disaggregate",
        "model.layers": 2, "layout.rollout.train.pipe": 2, "rollout.partial_tokens": 30,
        "rollout.max_staleness": 1, "rollout.deterministic": True}),
}  # fmt: skip
EVERYDAY: tuple[str, ...] = ()  # those below have slots too


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_slots_change_no_metric(name, tmp_path):
    algorithm, changes = CASES[name]
    rows = {}
    plain = {"rollout.slots": 0, "rollout.speculative_tokens": 0}
    for name, ways in (("with", {}), ("without", plain)):
        with trainer_of(algorithm, LONG | changes | ways, workdir=tmp_path / name) as trainer:
            rows[name] = trainer.run()
    for one, other in zip(*rows.values(), strict=True):
        found = computed(one)
        right = found.pop("rollout/guesses_right", None)
        assert (right is not None and 0 <= right <= 1) == ("rollout.speculative_tokens" in changes)
        assert found == pytest.approx(computed(other), rel=1e-4, abs=1e-5)


@pytest.mark.extended
def test_shorter_responses_are_kept_of_more_than_are_asked_for(tmp_path):
    lengths = {}
    for surplus in (0, 4):
        keys = LONG | {"rollout.extra_samples": surplus, "steps": 1, "eval.every": 0}
        with trainer_of("GRPO", keys, workdir=tmp_path / str(surplus)) as trainer:
            lengths[surplus] = trainer.step()["response/length_mean"]
    assert lengths[4] < 0.7 * lengths[0]


@pytest.mark.slow
def test_a_run_with_stages_resumes_bit_for_bit(tmp_path):
    # All lengths are of one bucket.
    changes = LONG | STAGES | {"rollout.slots": 16, "checkpoint.every": 2, "steps": 4}
    changes |= {"rollout.max_response_length": 64}
    with trainer_of("GRPO", changes, workdir=tmp_path / "whole") as trainer:
        rows = trainer.run()
    counts = [row["compile/count"] for row in rows]
    assert counts[1:] == [counts[1]] * 3  # nothing after the second step
    with trainer_of("GRPO", changes, workdir=tmp_path / "parts") as trainer:
        for _ in range(3):  # the third is in no checkpoint
            trainer.step()
    with trainer_of("GRPO", changes, workdir=tmp_path / "parts") as trainer:
        resumed = trainer.run()
    assert [row["step"] for row in resumed] == [3, 4]
    assert [computed(row) for row in resumed] == [computed(row) for row in rows[2:]]


def test_surplus_samples_in_parts_are_refused(tmp_path):
    keys = {"rollout.max_staleness": 1, "placement": "disaggregate", "rollout.partial_tokens": 2}
    message = "rollout.extra_samples=8: of responses in parts .* use rollout.extra_samples=0"
    with (
        pytest.raises(ConfigError, match=message),
        trainer_of("GRPO", keys | {"rollout.extra_samples": 8}, workdir=tmp_path),
    ):
        pass
