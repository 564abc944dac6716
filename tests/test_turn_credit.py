"""Credit over turns by hand: sums, discounted returns, GAE of turns and of two levels."""

import jax.numpy as jnp
import numpy as np
import pytest

from hjax.algorithms.turn_credit import (
    bilevel_gae,
    first_tokens,
    group_turn_advantages,
    turn_level_gae,
    turn_returns,
    turn_sums,
)

# Two episodes: turns of 2, 1 and 2 tokens with observations between; one turn of one token.
TURN = np.array([[0, 0, -1, 2, -1, -1, 3, 3, -1], [0, -1, -1, -1, -1, -1, -1, -1, -1]])
REWARDS = np.array([[0.0, 1, 9, 2, 9, 9, 0.5, 4, 9], [3, 9, 9, 9, 9, 9, 9, 9, 9]], np.float32)
VALUES = np.array([[0.3, -0.2, 7, 0.6, 7, 7, 1.1, 0.4, 7], [0.5] + [7] * 8], np.float32)


def turns_of(row):
    """Token positions of each turn, in order."""
    return [np.flatnonzero(TURN[row] == k) for k in sorted(set(TURN[row][TURN[row] >= 0].tolist()))]


def by_hand(row, gamma, lam, turn_gamma, turn_lam, level):
    turns, advantages = turns_of(row), np.zeros(TURN.shape[1])
    returns, following, later = np.zeros(TURN.shape[1]), 0.0, 0.0
    for places in reversed(turns):
        reward, value = REWARDS[row][places].sum(), VALUES[row][places[0]]
        of_turn = reward + turn_gamma * following - value + turn_gamma * turn_lam * later
        following, later = value, of_turn
        advantages[places], returns[places] = of_turn, of_turn + value
        if level == 2:
            returns[places[-1]] = of_turn + VALUES[row][places[-1]]
            for t in range(len(places) - 2, -1, -1):
                here, then = places[t], places[t + 1]
                delta = gamma * VALUES[row][then] - VALUES[row][here]
                advantages[here] = delta + gamma * lam * advantages[then]
                returns[here] = advantages[here] + VALUES[row][here]
    return advantages, returns


def test_first_tokens_and_sums():
    assert np.flatnonzero(first_tokens(jnp.asarray(TURN))[0]).tolist() == [0, 3, 6]
    sums = np.asarray(turn_sums(REWARDS, jnp.asarray(TURN)))
    assert sums[0].tolist() == [1, 0, 0, 2, 0, 0, 4.5, 0, 0]
    assert sums[1].tolist() == [3, *[0] * 8]


@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_discounts_count_turns(gamma):
    found = np.asarray(turn_returns(REWARDS, jnp.asarray(TURN), gamma))
    third, second, first = 4.5, 2 + gamma * 4.5, 1 + gamma * (2 + gamma * 4.5)
    assert np.allclose(found[0], [first, first, 0, second, 0, 0, third, third, 0])
    assert np.allclose(found[1], [3, *[0] * 8])


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.99, 0.9), (0.7, 0.0)])
def test_a_turn_is_one_action(gamma, lam):
    found = turn_level_gae(REWARDS, VALUES, jnp.asarray(TURN), gamma, lam)
    for row in range(2):
        wanted = by_hand(row, 0, 0, gamma, lam, level=1)
        for mine, right in zip(found, wanted, strict=True):
            assert np.allclose(np.asarray(mine)[row], right, atol=1e-6)


@pytest.mark.parametrize("rates", [(1.0, 1.0, 0.95, 0.9), (0.9, 0.8, 0.95, 1.0), (1, 0, 0.5, 0)])
def test_two_levels(rates):
    gamma, lam, turn_gamma, turn_lam = rates
    found = bilevel_gae(
        REWARDS, VALUES, jnp.asarray(TURN),
        gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam,
    )  # fmt: skip
    for row in range(2):
        wanted = by_hand(row, gamma, lam, turn_gamma, turn_lam, level=2)
        for mine, right in zip(found, wanted, strict=True):
            assert np.allclose(np.asarray(mine)[row], right, atol=1e-6)


def test_turns_are_compared_with_all_of_their_group():
    """Two groups of three episodes; one is unscored, one group has a single scored one."""
    turn = np.array([[0, 0, -1, 1], [0, -1, -1, -1], [0, -1, 1, 1], [0, -1, -1, -1],
                     [0, 1, -1, -1], [0, -1, -1, -1]])  # fmt: skip
    returns = np.where(turn >= 0, np.array([[1.0], [4], [2], [5], [6], [7]]) + turn, 0.0)
    scored = np.array([True, True, True, True, False, False])
    found = np.asarray(group_turn_advantages(returns, turn, scored, 3, normalise=False))
    values = np.array([1.0, 2, 4, 2, 3])  # the turns of the first group
    mean, std = values.mean(), values.std(ddof=1)
    assert np.allclose(found[0], [1 - mean, 1 - mean, 0, 2 - mean], atol=1e-6)
    assert np.allclose(found[2], [2 - mean, 0, 3 - mean, 3 - mean], atol=1e-6)
    assert not found[3:].any()
    scaled = np.asarray(group_turn_advantages(returns, turn, scored, 3))
    assert np.allclose(scaled[:3], found[:3] / (std + 1e-6), atol=1e-6)
    # Equal returns carry no signal, whatever float32 leaves of their mean.
    equal = np.where(turn >= 0, np.float32(0.95), 0.0)
    assert not np.asarray(group_turn_advantages(equal, turn, np.ones(6, bool), 3)).any()
