"""Sequences that follow each other in slots make the run that all at a time make."""

import pytest
from helpers import computed, trainer_of

from hjax.errors import ConfigError

# Most answers end early, some late: sizes of all kinds are met.
LONG = {"rollout.max_response_length": 90, "steps": 3, "eval.every": 2, "warm_start.steps": 0}
CASES = {
    "slots": ("GRPO", {"rollout.slots": 16}),
    "critic, split": ("PPO", {"rollout.slots": 16, "placement": "split"}),
    "adapters": ("GRPO", {"rollout.slots": 32, "actor.lora.rank": 2}),
    "tensor": ("ReMax", {"rollout.slots": 16, "layout.actor.generate.tensor": 2,
                         "layout.actor.train.tensor": 2}),
    "packs": ("GRPO", {"rollout.slots": 16, "data.packing": 128}),
    "apart": ("PPO", {"rollout.slots": 16, "placement": "disaggregate"}),
}  # fmt: skip
EVERYDAY = ("slots",)


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_slots_change_no_metric(name, tmp_path):
    algorithm, changes = CASES[name]
    rows = {}
    for slots in (0, changes["rollout.slots"]):
        keys = LONG | changes | {"rollout.slots": slots}
        with trainer_of(algorithm, keys, workdir=tmp_path / f"slots{slots}") as trainer:
            rows[slots] = trainer.run()
    for one, other in zip(*rows.values(), strict=True):
        assert computed(one) == pytest.approx(computed(other), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"rollout.max_staleness": 1, "placement": "disaggregate", "rollout.partial_tokens": 2},
            "rollout.slots=8: responses in parts .* use rollout.slots=0",
        ),
        (
            {"model.layers": 2, "layout.actor.train.pipe": 2, "layout.actor.generate.pipe": 2},
            "rollout.slots=8: with stages .*pipe=1 for generation",
        ),
    ],
)
def test_slots_that_cannot_be_are_refused(changes, message, tmp_path):
    keys = changes | {"rollout.slots": 8}
    with pytest.raises(ConfigError, match=message), trainer_of("GRPO", keys, workdir=tmp_path):
        pass
