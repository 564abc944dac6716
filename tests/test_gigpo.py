"""GiGPO by hand and by its formulas, what it refuses, and what it says of anchors."""

import logging
import shutil

import numpy as np
import pytest
from helpers import computed, tiny_config, trainer_of

from hjax.algorithms import GiGPO
from hjax.algorithms.gigpo import FEW_SHARED, SAID_AFTER, Turns
from hjax.errors import ConfigError, RunError

MAZE = {
    "data.task": "maze", "data.task_options.side": 3, "data.task_options.distance": 1,
    "environment.max_turns": 6, "rollout.max_response_length": 30, "environment.processes": 1,
    "warm_start.steps": 4, "cluster.devices_per_process": 1,
}  # fmt: skip


def algorithm(samples=2, **keys):
    config = GiGPO.default_config()
    config.update({"kl_coef": 0.0, **keys})
    roles = dict.fromkeys(("actor", "reference", "reward"), None)
    return GiGPO(config, roles, samples=samples)


def batch_of(episodes):
    """A batch of episodes, each a list of turns (state, reward, valid): a turn has two tokens, and
    an observation of one token follows it."""
    length = 3 * max(map(len, episodes))
    turn, anchor = (np.full((len(episodes), length), -1) for _ in range(2))
    invalid, rewards = np.zeros(turn.shape, bool), np.zeros(turn.shape, np.float32)
    for row, turns in enumerate(episodes):
        for number, (state, reward, valid) in enumerate(turns):
            own = slice(3 * number, 3 * number + 2)
            turn[row, own], anchor[row, own], invalid[row, own] = number, state, not valid
            rewards[row, own.stop - 1] = reward
    mask = turn >= 0
    return {
        "response_mask": mask, "turn": turn, "anchor": anchor, "invalid_action": invalid,
        "token_rewards": rewards, "rewards": rewards.sum(axis=1),
        "truncated": np.zeros(len(episodes), bool), "logprobs": np.zeros(turn.shape, np.float32),
    }  # fmt: skip


def advantages(episodes, samples=2, rewards=None, **keys):
    """Those of each turn, as lists by episode; equal on a turn's tokens, 0 off them."""
    batch = batch_of(episodes)
    if rewards is not None:
        batch["rewards"] = np.array(rewards, np.float32)
    found = algorithm(samples, **keys).compute_advantages(batch)["advantages"]
    made = []
    for row, turns in zip(found, episodes, strict=True):
        parts = row.reshape(-1, 3)[: len(turns)]
        assert (parts[:, 0] == parts[:, 1]).all() and not parts[:, 2].any()
        assert not row[3 * len(turns) :].any()
        made.append(parts[:, 0].tolist())
    return made


def test_the_hand_case():
    """A = [s0, s1] with rewards 0, 10; B = [s0, s2] with 0, 0: the second term is 5, 0, -5, 0."""
    episodes = [[(0, 0, True), (1, 10, True)], [(0, 0, True), (2, 0, True)]]
    both = advantages(episodes, turn_discount=1.0)
    alone = advantages(episodes, turn_discount=1.0, step_weight=0.0)
    assert np.subtract(both, alone).tolist() == [[5, 0], [-5, 0]]
    assert alone == [[5, 5], [-5, -5]]


# Two groups of three episodes; states meet within an episode, among them, and never.
EPISODES = [
    [(0, 0.0, True), (1, 0.0, False), (0, 0.3, True), (2, 1.7, True)],
    [(0, 0.1, True), (3, 0.0, True)],
    [(4, 0.0, False), (1, 0.0, True), (-1, 0.9, True)],
    [(0, 1.3, True)],
    [(0, 0.0, True), (0, 0.0, True), (1, 0.0, True)],
    [(1, 0.0, True), (0, 0.7, False)],
]


def by_hand(gamma, penalty, weight, statistics, std, epsilon=1e-6):
    made = []
    for first in (0, 3):
        group = EPISODES[first : first + 3]
        returns, score = {}, {}
        for e, turns in enumerate(group):
            for t, (_, _, valid) in enumerate(turns):
                off = 0.0 if valid else penalty
                later = enumerate(turns[t:])
                returns[e, t] = sum(gamma**k * r for k, (_, r, _) in later) - off
                score[e, t] = sum(r for _, r, _ in turns) - off
        values = list(score.values())
        if statistics == "trajectories":
            values = [np.mean([score[e, t] for t in range(len(x))]) for e, x in enumerate(group)]

        def compared(own, others, std=std):
            spread = np.std(others, ddof=1) + epsilon if std else 1.0
            return (own - np.mean(others)) / spread

        for e, turns in enumerate(group):
            made.append([])
            for t, (state, _, _) in enumerate(turns):
                same = [
                    returns[i, j]
                    for i, x in enumerate(group)
                    for j, (other, _, _) in enumerate(x)
                    if other == state >= 0
                ]
                step = compared(returns[e, t], same) if len(same) > 1 else 0.0
                made[-1].append(compared(score[e, t], values) + weight * step)
    return made


@pytest.mark.parametrize("statistics", ["trajectories", "turns"])
@pytest.mark.parametrize("normalise", ["none", "std"])
@pytest.mark.parametrize("gamma, penalty, weight", [(0.95, 0.1, 1.0), (1.0, 0.0, 0.3)])
def test_formulas(gamma, penalty, weight, normalise, statistics):
    found = advantages(
        EPISODES, 3, turn_discount=gamma, invalid_penalty=penalty, step_weight=weight,
        normalise=normalise, statistics=statistics,
    )  # fmt: skip
    wanted = by_hand(gamma, penalty, weight, statistics, normalise == "std")
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-6, atol=1e-6)


def test_an_unscored_episode_leaves_both_terms_and_equal_ones_give_none():
    found = advantages(EPISODES, 3, rewards=[2.0, np.nan, 0.9, 1.3, np.nan, np.nan])
    assert not any(found[1]) and not any(sum(found[3:], []))
    assert any(found[0]) and any(found[2])
    equal = [[(0, 0.1, True)] * 3] * 3
    assert not any(sum(advantages(equal, 3, normalise="std", turn_discount=0.0), []))


def test_actions_that_are_not_valid_are_worse_also_where_all_returns_are_equal():
    episodes = [[(0, 0.0, True), (0, 0.0, False)], [(0, 0.0, False), (0, 0.0, True)]]
    for statistics in ("trajectories", "turns"):
        found = advantages(episodes, normalise="std", statistics=statistics)
        assert found[0] == found[1][::-1] and found[0][0] > 0 > found[0][1]
        assert max(np.abs(found).ravel()) < 10


def test_shares_and_turn_numbers():
    turns = Turns.of(batch_of(EPISODES), 3)
    # Of 15 turns 11 meet a state of others: those of 2, 3, 4 and of none do not.
    assert turns.metrics()["anchor/shared"] == pytest.approx(11 / 15)
    # State 0 of the first group: turns 0, 2; 1: 1. Second: 0: 0, 1; 1: 0, 2.
    assert turns.metrics()["anchor/turn_numbers"] == pytest.approx(7 / 4)


def test_what_is_warned_of(caplog):
    counted = [[(10 * s + t, 0.0, True) for t, s in enumerate((0, 1, 2))] for _ in range(2)]
    alone = [[(6 * e + t, 0.0, True) for t in range(6)] for e in range(2)]
    with caplog.at_level(logging.WARNING):
        for episodes in (counted, alone):
            made = algorithm()
            for _ in range(2 * SAID_AFTER):
                made.compute_advantages(batch_of(episodes))
    first, second = (record.getMessage() for record in caplog.records)
    assert "step counter" in first
    assert f"less than {100 * FEW_SHARED:.0f} %" in second and "Observation.anchor" in second


def test_what_compares_nothing_is_refused():
    without = batch_of(EPISODES)
    with pytest.raises(RunError, match="no state"):
        algorithm(3).compute_advantages(without | {"anchor": np.full_like(without["anchor"], -1)})
    del without["turn"]
    with pytest.raises(RunError, match="lacks turn"):
        algorithm(3).compute_advantages(without)
    with pytest.raises(ConfigError, match="turn_discount"):
        tiny_config("GiGPO", MAZE | {"algorithm.turn_discount": -1.0})
    with pytest.raises(ConfigError, match="rollout.samples=1"):
        with trainer_of("GiGPO", MAZE | {"rollout.samples": 1}):
            pass


@pytest.mark.extended
def test_mazes_are_played_and_a_resume_is_the_same(tmp_path):
    changes = MAZE | {"steps": 2, "checkpoint.every": 1}
    with trainer_of("GiGPO", changes, tmp_path / "whole") as trainer:
        rows = [computed(row) for row in trainer.run()]
        assert "invalid_action" in trainer.batch
    assert all(0 < row["anchor/shared"] <= 1 for row in rows)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/2")
    with trainer_of("GiGPO", changes, tmp_path / "again") as trainer:
        assert [computed(row) for row in trainer.run()] == rows[1:]


@pytest.mark.extended
def test_weight_0_is_grpo():
    """But for the penalty of actions that are not valid."""
    keys = MAZE | {"steps": 1, "algorithm.normalise": "none", "algorithm.kl_coef": 0.0}
    more = {"algorithm.step_weight": 0.0, "algorithm.invalid_penalty": 0.0}
    rows = []
    for name, extra in (("GiGPO", more), ("GRPO", {})):
        with trainer_of(name, keys | extra) as trainer:
            rows.append(computed(trainer.step()))
    shared = {k: v for k, v in rows[0].items() if not k.startswith("anchor/")}
    for key, value in rows[1].items():
        assert shared[key] == pytest.approx(value, rel=1e-4, abs=1e-7), key
