"""A KL coefficient in the loss that moves: it reaches the update, however the batch is cut."""

import numpy as np
import pytest
from helpers import computed, save_model, trainer_of

KEYS = {
    "steps": 3,
    "algorithm.kl_in": "loss",
    "algorithm.kl_coef": 0.5,
    # Of 16 sequences a step, with a KL far from the target: 20 % up or down at once.
    "algorithm.kl_target": 1e-4,
    "algorithm.kl_horizon": 16,
    "algorithm.minibatch": 8,
    "actor.learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def rows():
    with trainer_of("GRPO", KEYS) as trainer:
        return trainer.run()


@pytest.mark.extended
def test_the_coefficient_moves_by_the_measured_kl(rows):
    expected = 0.5
    for row in rows:
        error = min(max(row["kl/reference"] / 1e-4 - 1, -0.2), 0.2)
        expected *= 1 + error
        assert row["kl/coefficient"] == pytest.approx(expected)
    # The first step is on-policy: a KL of 0 lowers the coefficient to 0.4.
    assert rows[0]["kl/coefficient"] == pytest.approx(0.4)


@pytest.mark.extended
def test_the_update_takes_the_coefficient_of_the_batch(rows):
    with trainer_of("GRPO", KEYS | {"algorithm.kl_target": 0.0}) as trainer:
        fixed = trainer.run()
    # The same coefficient in the first step, another in the second.
    assert rows[0]["actor/loss"] == pytest.approx(fixed[0]["actor/loss"], rel=1e-5, abs=1e-7)
    assert abs(rows[1]["actor/loss"] - fixed[1]["actor/loss"]) > 1e-4
    with trainer_of("GRPO", KEYS | {"algorithm.kl_target": 0.0, "algorithm.kl_coef": 0.4}) as other:
        other.step()
        assert other.algorithm.kl.coef == 0.4


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            {"actor.micro_batch": 4, "layout.actor.train.data": 4, "layout.actor.train.tensor": 2},
            id="micro-batches",
        ),
        pytest.param(
            {"layout.actor.train.data": 4, "layout.actor.train.pipe": 2},
            id="pipeline",
            marks=pytest.mark.slow,
        ),
    ],
)
@pytest.mark.extended
def test_the_coefficient_reaches_every_micro_batch(layout, tmp_path):
    # Another model is the reference, so that there is a KL before the first update.
    save_model(tmp_path / "reference", seed=5)
    changes = {"steps": 1, "model.layers": 2, "algorithm.minibatch": 0}
    changes["reference.path"] = str(tmp_path / "reference")
    found = []
    for own in ({}, layout):
        with trainer_of("GRPO", KEYS | changes | own) as trainer:
            found.append(trainer.step())
            batch = trainer.batch
    whole, cut = found
    for key in ("actor/loss", "actor/kl", "actor/grad_norm", "kl/coefficient"):
        np.testing.assert_allclose(whole[key], cut[key], rtol=1e-4, atol=1e-6)
    # On-policy the advantages of a group cancel; what is left is 0.5 times the mean over
    # sequences of their mean k3.
    difference, mask = batch["old_logprobs"] - batch["ref_logprobs"], batch["response_mask"]
    k3 = np.where(mask, np.exp(-difference) - 1 + difference, 0).sum(axis=1) / mask.sum(axis=1)
    assert cut["actor/loss"] == pytest.approx(0.5 * k3.mean(), rel=1e-3) and k3.mean() > 1e-3


@pytest.mark.extended
def test_a_resumed_run_takes_the_coefficient_where_it_was(rows, tmp_path):
    with trainer_of("GRPO", KEYS | {"checkpoint.every": 1}, tmp_path / "run") as trainer:
        trainer.run(2)
    with trainer_of("GRPO", KEYS | {"checkpoint.every": 1}, tmp_path / "run") as trainer:
        (last,) = trainer.run()
    assert computed(last) == computed(rows[-1])
