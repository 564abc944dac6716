"""Numbers worked by hand, in one process, on processes of a Ray cluster, and after a resume."""

import json

import numpy as np
import pytest
from helpers import ONE_DEVICE, computed, read_rows, trainer_of
from safetensors.numpy import load_file, save_file
from test_ray_runs import cluster, on_cluster  # noqa: F401  (a fixture of the whole file)

SAMPLES = 8
# Of each group of eight the first answer is right, and the others have the form.
TWO_REWARDS = """
def reward(prompts, responses, **columns):
    math = [float(i % 8 == 0) for i in range(len(responses))]
    return {"math": math, "format": [1.0 - x for x in math]}
"""
# Seven rewards alike to the last bit of float32, and a zero.
NEARLY_CONSTANT = """
def reward(prompts, responses, **columns):
    return [0.95 * (i % 8 > 0) for i in range(len(responses))]
"""
WHERE = {
    "one process": ONE_DEVICE,
    "Ray": {**on_cluster(2, each=1), "placement": "split"},
}
RUN = {"steps": 2, "rollout.prompts": 4, "rollout.samples": SAMPLES, "checkpoint.every": 1}


def first_row_and_others(advantages, mask):
    """The advantages of each group: of its first answer, and of the seven others."""
    rows = np.where(mask, advantages, 0).sum(axis=1) / mask.sum(axis=1)
    groups = rows.reshape(-1, SAMPLES)
    return groups[:, 0], groups[:, 1:]


def assert_advantages(algorithm, changes, expected, tmp_path):
    """In the first step, and in the second one after a resume."""
    for _ in range(2):
        with trainer_of(algorithm, RUN | changes, tmp_path / "run") as trainer:
            row, batch = trainer.step(), trainer.batch
        mask = np.asarray(batch["response_mask"], bool)
        first, others = first_row_and_others(np.asarray(batch["advantages"]), mask)
        np.testing.assert_allclose(first, expected[0], rtol=2e-3)
        np.testing.assert_allclose(others, expected[1], rtol=2e-3)
        assert row["actor/grad_norm"] < 100
    assert row["step"] == 2


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    "weights", [(1.0, 0.0), {"format": 0.0, "math": 1.0}], ids=["order", "name"]
)
def test_rewards_are_weighed_by_their_names(weights, where, tmp_path):
    """`math` of a group has the mean 1/8 and the deviation sqrt(1/8): the right answer is 7/8 above
    it, 2.4749 deviations, the others -.35355. Over all 32 rows the sum of squares is 4 x 7, the
    deviation sqrt(28/31) = .95038: 2.6041 and -.37201. In the order of the names these would be
    `format`'s, -2.6041."""
    (tmp_path / "two.py").write_text(TWO_REWARDS)
    changes = {"reward.function": f"{tmp_path / 'two.py'}:reward", "algorithm.weights": weights}
    assert_advantages("GDPO", changes | WHERE[where], (2.6041, -0.37201), tmp_path)


@pytest.mark.parametrize("where", WHERE)
def test_equal_rewards_of_the_others_are_no_deviation(where, tmp_path):
    """The others of the first answer are all .95: it is .95 below them, over no deviation. Those of
    the seventh are 0 and six times .95: mean .814286, deviation .359066 of n - 1."""
    (tmp_path / "near.py").write_text(NEARLY_CONSTANT)
    changes = {
        "reward.function": f"{tmp_path / 'near.py'}:reward",
        "algorithm.baseline": "others",
        "algorithm.normalise": "std",
    }
    expected = -0.95, (0.95 - 0.814286) / 0.359066
    assert_advantages("GRPO", changes | WHERE[where], expected, tmp_path)


@pytest.mark.parametrize("where", WHERE)
def test_the_reference_is_the_policy_that_training_starts_from(base, where, tmp_path):
    """With adapters that are not zero: no KL in the first step, and the same reference afterwards,
    whether the run goes on or starts again."""
    lora = {"actor.lora.rank": 2, "actor.learning_rate": 0.01, "algorithm.kl_coef": 0.1}
    keys = RUN | lora | WHERE[where]
    with trainer_of("GRPO", RUN | lora | ONE_DEVICE | {"actor.path": base}) as trainer:
        trainer.prepare()
        trainer.export(tmp_path / "adapter", adapter=True)
    file = tmp_path / "adapter/adapter_model.safetensors"
    rng = np.random.default_rng(0)
    drawn = {k: rng.normal(0, 0.3, x.shape).astype(x.dtype) for k, x in load_file(file).items()}
    save_file(drawn, file, metadata={"format": "pt"})
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["r"] == 2
    keys |= {"actor.path": str(tmp_path / "adapter")}
    with trainer_of("GRPO", keys, tmp_path / "whole") as trainer:
        whole = [computed(row) for row in trainer.run()]
    assert abs(whole[0]["kl/reference"]) < 1e-5 < abs(whole[1]["kl/reference"])
    for _ in range(2):
        with trainer_of("GRPO", keys, tmp_path / "parts") as trainer:
            trainer.step()
    parts = [computed(row) for row in read_rows(tmp_path / "parts")]
    assert parts[1]["kl/reference"] == pytest.approx(whole[1]["kl/reference"], rel=1e-5)


# A role on the host writes a line for each call and keeps their number; so does one with devices.
LEDGER = """
import os
import hjax, numpy as np

class Ledger(hjax.workers.Worker):
    calls = 0
    @hjax.protocol("ALL_TO_ALL", reads=("rewards",))
    def entered(self, batch):
        self.calls += 1
        with open({path!r}, "a") as file:
            file.write(f"{{self.context.role}} {{self.calls}} {{len(batch['rewards'])}}\\n")
        return {{"sum": np.float32(batch["rewards"].sum())}}
    def state(self):
        return {{"calls": {{"number": np.int32([self.calls])}}}}
    def restore(self, state):
        self.calls = int(state["calls"]["number"][0])

class Audited(hjax.algorithms.GRPO):
    workers = {{"ledger": hjax.Role(Ledger, host=True)}}
    roles = (*hjax.algorithms.GRPO.roles, "ledger")
    def compute_advantages(self, batch):
        said = self.ledger.entered(batch)
        assert float(hjax.controller.join(said)["sum"]) == np.asarray(batch["rewards"]).sum()
        return super().compute_advantages(batch)
"""


@pytest.mark.parametrize("where", WHERE)
def test_what_a_role_on_the_host_does_happens_once(where, tmp_path):
    lines = tmp_path / "lines.txt"
    (tmp_path / "audit.py").write_text(LEDGER.format(path=str(lines)))
    for _ in range(2):  # the second time after a resume
        with trainer_of(f"{tmp_path}/audit.py:Audited", RUN | WHERE[where], tmp_path / "run") as t:
            t.step()
            assert "ledger" not in t.roles.layouts
    assert lines.read_text().splitlines() == ["ledger 1 32", "ledger 2 32"]
