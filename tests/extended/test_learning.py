"""The shipped configs learn, as the command line runs them. Too long for every run."""

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train(config: str, workdir: pathlib.Path, *overrides: str) -> list[dict]:
    """The rows of metrics.jsonl of a run of a shipped config, at its own device count."""
    command = [sys.executable, "-m", "hjax.launch", f"--config={config}", f"--workdir={workdir}"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("config", ["ppo.py", "grpo.py", "remax.py"])
def test_held_out_accuracy_rises_from_below_half_to_nine_tenths(config, seed, tmp_path):
    rows = train(config, tmp_path / "run", f"--config.seed={seed}")
    assert rows[0]["eval/accuracy"] < 0.5
    assert rows[-1]["eval/accuracy"] >= 0.9


@pytest.mark.parametrize(
    "config, seed", [*(("grpo.py", seed) for seed in range(5)), ("ppo.py", 0)]
)
@pytest.mark.parametrize("staleness", [1, 4])
def test_it_rises_as_high_with_rollouts_of_older_weights(config, staleness, seed, tmp_path):
    changes = {
        "seed": seed,
        "placement": "disaggregate",
        "cluster.devices_per_process": 2,
        "rollout.max_staleness": staleness,
        "algorithm.correction": "decoupled",
    }
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    rows = train(config, tmp_path / "run", *overrides)
    assert rows[0]["eval/accuracy"] < 0.5
    assert rows[-1]["eval/accuracy"] >= 0.9
    assert max(row["rollout/staleness"] for row in rows) <= staleness
    assert sum(row["rollout/staleness"] for row in rows) / len(rows) > 0.5


def test_no_shipped_config_compiles_after_its_second_step(tmp_path):
    rows = train("ppo.py", tmp_path / "run", "--config.steps=60", "--config.eval.every=20")
    assert len({row["compile/count"] for row in rows[1:]}) == 1


def test_safe_rlhf_ends_below_its_cost_limit_and_above_its_first_reward(tmp_path):
    rows = train("safe_rlhf.py", tmp_path / "run")
    last = rows[-10:]
    assert sum(row["cost/mean"] for row in last) / len(last) < 0.1
    assert rows[0]["cost/mean"] > 0.3
    assert rows[-1]["eval/reward"] > rows[0]["eval/reward"]
    assert len({row["cost/multiplier"] for row in rows}) > 10
    assert "multiplier" in (tmp_path / "run" / "report.html").read_text().lower()


def test_sft_lowers_the_loss(tmp_path):
    rows = train("sft.py", tmp_path / "run")
    assert rows[-1]["actor/loss"] < 0.5 * rows[0]["actor/loss"]
