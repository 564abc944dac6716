"""Updates whose loss or gradient is not finite, and samples without a reward."""

import math

import numpy as np
import pytest
from helpers import ONE_DEVICE, read_rows, trainer_of

from hjax.errors import RunError

SPOILED = """
import hjax, numpy as np

class Spoiled(hjax.algorithms.GRPO):
    @classmethod
    def default_config(cls):
        config = super().default_config()
        config.first, config.last = 2, 2
        return config

    def compute_advantages(self, batch):
        batch = super().compute_advantages(batch)
        if self.config.first <= self.step_number <= self.config.last:
            batch["advantages"] = batch["advantages"] + np.float32(np.nan)
        return batch

def some(prompts, responses, **columns):
    return [None if i % 4 == 0 else float("nan") if i % 4 == 1 else 0.1 * i
            for i in range(len(responses))]
"""


@pytest.fixture
def spoiled(tmp_path):
    (tmp_path / "spoiled.py").write_text(SPOILED)
    return f"{tmp_path}/spoiled.py:Spoiled"


def test_an_update_that_is_not_finite_is_skipped_counted_and_kept(spoiled, tmp_path):
    changes = {"steps": 3, "actor.schedule": "linear"}
    with trainer_of(spoiled, changes, workdir=tmp_path / "run") as trainer:
        trainer.step()
        worker = trainer.roles.groups["actor"].worker
        before = np.asarray(worker.params["embedding"])
        second = trainer.step()
        np.testing.assert_array_equal(np.asarray(worker.params["embedding"]), before)
        third = trainer.step()
        assert (np.asarray(worker.params["embedding"]) != before).any()
        trainer.run()
    assert [row["actor/skipped"] for row in trainer.history] == [0, 1, 1]
    assert math.isnan(second["actor/loss"])
    # The schedule does not tick: 1e-3 falling to 0 over 3 updates, of which the second is repeated.
    rates = [row["actor/learning_rate"] for row in trainer.history]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 2e-3 / 3])
    rows = read_rows(tmp_path / "run")
    assert rows[1]["actor/loss"] is None and rows[2]["actor/loss"] == third["actor/loss"]
    assert [p.name for p in (tmp_path / "run" / "skipped").iterdir()] == ["step-2.npz"]
    with np.load(tmp_path / "run" / "skipped" / "step-2.npz") as kept:
        assert np.isnan(kept["advantages"]).any() and kept["responses"].shape == (16, 4)


def test_too_many_in_a_row_stop_the_run_and_keep_the_last_batch(spoiled, tmp_path):
    changes = {"steps": 9, "algorithm.last": 9, "algorithm.max_skipped": 2}
    with trainer_of(spoiled, changes | ONE_DEVICE, workdir=tmp_path / "run") as trainer:
        with pytest.raises(RunError, match="2 updates of the actor in a row were skipped") as error:
            trainer.run()
    assert "\n" not in str(error.value)
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [1, 2]
    kept = sorted(p.name for p in (tmp_path / "run" / "skipped").iterdir())
    assert kept == ["step-2.npz", "step-3.npz"]
    with np.load(tmp_path / "run" / "skipped" / "step-3.npz") as third:
        np.testing.assert_array_equal(third["responses"], trainer.batch["responses"])


def test_samples_without_a_reward_leave_the_step(spoiled, tmp_path):
    changes = {"reward.function": spoiled.replace("Spoiled", "some"), "steps": 2}
    changes["reward.max_unscored"] = 0.5
    with trainer_of("GRPO", changes | ONE_DEVICE, workdir=tmp_path / "run") as trainer:
        rows = trainer.run()
        batch = trainer.batch
    scored = [0.1 * i for i in range(16) if i % 4 > 1]
    for row in rows:
        assert row["reward/unscored"] == 0.5
        assert row["reward/mean"] == pytest.approx(np.mean(scored))
        assert row["reward/none"] == 4 and row["reward/nan"] == 4
        assert math.isfinite(row["actor/loss"]) and row["actor/skipped"] == 0
    assert not batch["advantages"][:2].any() and batch["advantages"][2:4].any()
    sample = read_rows(tmp_path / "run", "samples.jsonl")[0]
    assert sample["reward"] is None


@pytest.mark.extended  # test_errors has it too
def test_too_many_without_a_reward_stop_the_run(spoiled):
    changes = {"reward.function": spoiled.replace("Spoiled", "some"), "reward.max_unscored": 0.4}
    with trainer_of("GRPO", changes) as trainer:
        with pytest.raises(RunError, match=r"8 of 16 sequences have no reward \(none 4, nan 4\)"):
            trainer.run()
