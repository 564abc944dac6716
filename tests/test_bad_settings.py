"""Settings and data that cannot teach: a clear line, or the outcome that the docs name."""

import math

import numpy as np
import pytest
from test_algorithms_dataflow import PROMPTS, REWARDS, ROWS, Dataflow

from hjax.algorithms import ALGORITHMS
from hjax.errors import ConfigError

NAN = [math.nan] * ROWS
# Those that Dataflow's workers can run, by what they compare a response with.
LEARNERS = ("PPO", "GRPO", "DAPO", "RLOO", "ReinforcePlusPlus", "GPG", "ReMax")


def flow(name, rewards, greedy=(0.0,) * PROMPTS, **keys):
    return Dataflow(ALGORITHMS[name], rewards, greedy=greedy, kl_coef=0.0, **keys)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "OPO", "ReinforcePlusPlusBaseline", "GDPO"])
def test_a_group_of_one_has_nothing_to_compare(name):
    algorithm = ALGORITHMS[name]
    config = algorithm.default_config()
    roles = dict.fromkeys(algorithm.roles)
    with pytest.raises(ConfigError, match="rollout.samples=1: .* compares .* 2 or more") as caught:
        algorithm(config, roles, samples=1, more_prompts=lambda first: {})
    assert "\n" not in str(caught.value)


def test_ppo_without_a_critic_is_named():
    groups = dict.fromkeys(("actor", "reference", "reward"))
    with pytest.raises(ConfigError, match="PPO needs a worker group for the role critic"):
        ALGORITHMS["PPO"](ALGORITHMS["PPO"].default_config(), groups)


@pytest.mark.parametrize("name", LEARNERS)
def test_without_any_score_a_step_teaches_nothing_and_says_so(name):
    keys = {"resample": 0} if name == "DAPO" else {}
    with flow(name, NAN, **keys) as run:
        batch, metrics = run.step()
        updates = run.updates()
    assert np.isfinite(batch["advantages"]).all() and not batch["advantages"].any()
    assert updates and all(not update["row_mask"].any() for update in updates)
    assert metrics["reward/unscored"] == 1.0


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "RLOO", "GPG"])
def test_equal_rewards_everywhere_are_exact_zeros(name):
    keys = {"resample": 0} if name == "DAPO" else {}
    with flow(name, [0.7] * ROWS, **keys) as run:
        batch, _ = run.step()
    assert not batch["advantages"].any()
    assert batch["row_mask"].any() == (not run.algorithm.config.filter)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_nan_of_a_reward_model_leaves_its_row_out(name):
    keys = {"resample": 0} if name == "DAPO" else {}
    with flow(name, [math.nan, *REWARDS[1:]], **keys) as run:
        batch, metrics = run.step()
    assert np.isfinite(batch["advantages"]).all() and not batch["advantages"][0].any()
    assert not batch["row_mask"][0]
    assert metrics["reward/unscored"] == pytest.approx(1 / ROWS)
