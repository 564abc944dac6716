"""Advantages against hand-worked numbers, loops written from the definitions, and torch."""

import fractions
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import torch

from hjax.algorithms import advantages, masks
from hjax.algorithms.advantages import rewards_differ
from hjax.algorithms.losses import explained_variance
from hjax.errors import ConfigError

NAN = float("nan")

# As the algorithms run them: compiled.
masked_mean = jax.jit(masks.masked_mean, static_argnames="axis")
masked_variance = jax.jit(masks.masked_variance, static_argnames="unbiased")
whiten = jax.jit(masks.whiten, static_argnames=("shift_mean", "unbiased"))
token_rewards = jax.jit(advantages.token_rewards)
gae = jax.jit(advantages.gae)
discounted_returns = jax.jit(advantages.discounted_returns)
group_advantages = jax.jit(
    advantages.group_advantages,
    static_argnames=("samples", "normalise", "baseline", "unbiased_std"),
)
remax_advantages = jax.jit(advantages.remax_advantages, static_argnames="kl_cumulated")
lagrangian_advantages = jax.jit(advantages.lagrangian_advantages)


def close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def ragged(lengths, width, seed=0):
    """Random rewards and values [N, width] with garbage in the padding, and their mask."""
    draw = np.random.default_rng(seed)
    mask = np.arange(width) < np.array(lengths)[:, None]
    rewards, values = draw.normal(size=(2, *mask.shape)).astype(np.float32)
    return np.where(mask, rewards, 99.0), np.where(mask, values, NAN), mask


# --- masks


def test_masked_mean_ignores_what_is_masked_out():
    x, mask = np.array([[1.0, 3.0, NAN], [5.0, 7.0, 9.0]]), np.array([[1, 1, 0], [1, 0, 0]])
    close(masked_mean(x, mask), 3.0)  # (1 + 3 + 5) / 3
    close(masked_mean(x, mask, axis=1), [2.0, 5.0])
    close(masked_mean(x, np.zeros_like(mask)), 0.0)


def test_masked_variance_of_one_entry_is_zero():
    close(masked_variance(np.array([1.0, 2.0, 3.0]), np.ones(3)), 1.0)  # (1 + 0 + 1) / 2
    close(masked_variance(np.array([1.0, 2.0, 3.0]), np.ones(3), unbiased=False), 2 / 3)
    close(masked_variance(np.array([1.0, 2.0, 3.0]), np.array([0, 1, 0])), 0.0)


def test_whiten_by_hand():
    x, mask = np.array([[1.0, 2.0, 50.0], [3.0, 50.0, NAN]]), np.array([[1, 1, 0], [1, 0, 0]])
    # 1, 2, 3: mean 2, unbiased variance 1
    close(whiten(x, mask), [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    close(whiten(x, mask, shift_mean=False), [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]])
    # Biased variance 2/3, as OpenRLHF's.
    root = np.sqrt(1.5)
    close(whiten(x, mask, unbiased=False), [[-root, 0.0, 0.0], [root, 0.0, 0.0]])


def test_whiten_equals_torch_standardisation():
    x, _, mask = ragged([4, 1, 3], 4)
    selected = torch.tensor(x[mask])
    expected = np.zeros_like(x)
    expected[mask] = ((selected - selected.mean()) / selected.std()).numpy()
    close(whiten(x, mask), expected)


@pytest.mark.parametrize("mask", [np.zeros((2, 2)), np.array([[1, 0], [0, 0]])])
def test_whiten_of_nothing_and_of_one_token_is_zero(mask):
    close(whiten(np.full((2, 2), 7.0), mask), np.zeros((2, 2)))


# --- token rewards


def test_the_reward_sits_on_the_last_token_and_kl_on_each():
    mask = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    kl = np.array([[1.0, 2.0, 4.0], [3.0, NAN, 8.0], [8.0, 8.0, 8.0]])
    result = token_rewards(np.array([10.0, 20.0, 30.0]), mask, kl, kl_coef=0.5)
    # 10 - 0.5 * 4 = 8; 20 - 0.5 * 3 = 18.5; an empty response carries no reward
    close(result, [[-0.5, -1.0, 8.0], [18.5, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_without_kl_only_the_last_token_is_rewarded():
    close(token_rewards(np.array([2.0]), np.array([[1, 1, 0]])), [[0.0, 2.0, 0.0]])


def test_the_clamp_bounds_the_sum_of_reward_and_penalty():
    kl = np.array([[9.0, 4.0]])
    # -0.5 * 9 = -4.5 -> -3; 10 - 2 = 8 -> 3 (clamping the reward first would give 3 - 2 = 1)
    close(token_rewards(np.array([10.0]), np.ones((1, 2)), kl, 0.5, clip=3.0), [[-3.0, 3.0]])


def test_an_unscored_sample_keeps_only_its_kl():
    kl = np.array([[1.0, 1.0]])
    close(token_rewards(np.array([NAN]), np.ones((1, 2)), kl, 0.5), [[-0.5, -0.5]])


# --- GAE


def test_gae_by_hand():
    rewards = np.array([[0.0, 0.0, 1.0], [0.0, 1.0, 50.0]])
    values = np.array([[0.5, 0.25, 0.75], [0.25, 0.75, 50.0]])
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    # row 0: d = 1 - .75 = .25             A = .25
    #        d = .5 * .75 - .25 = .125     A = .125 + .25 * .25 = .1875
    #        d = .5 * .25 - .5 = -.375     A = -.375 + .25 * .1875 = -.328125
    # row 1 is row 0 from its second token on, with padding after it
    close(advantages, [[-0.328125, 0.1875, 0.25], [0.1875, 0.25, 0.0]])
    close(returns, [[0.171875, 0.4375, 1.0], [0.4375, 1.0, 0.0]])


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_gae_equals_the_double_sum(gamma, lam):
    lengths = [5, 0, 1, 3]
    rewards, values, mask = ragged(lengths, 5)
    expected = np.zeros(mask.shape)
    for i, length in enumerate(lengths):
        v = np.append(values[i, :length], 0.0)
        delta = rewards[i, :length] + gamma * v[1:] - v[:-1]
        for t in range(length):
            expected[i, t] = sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, length))
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert advantages.dtype == returns.dtype == jnp.float32
    close(advantages, expected)
    close(returns, expected + np.where(mask, values, 0.0))


def test_lambda_may_differ_per_response():
    rewards, values, mask = ragged([3, 3], 3)
    both, _ = gae(rewards, values, mask, 1.0, np.array([0.5, 0.9]))
    close(both[0], gae(rewards[:1], values[:1], mask[:1], 1.0, 0.5)[0][0])
    close(both[1], gae(rewards[1:], values[1:], mask[1:], 1.0, 0.9)[0][0])


def test_tokens_masked_inside_a_response_are_stepped_over():
    rewards, values, _ = ragged([3], 3)
    gap = np.array([0, 1, 3])  # the columns kept of [N, 4]
    wide = np.full((2, 1, 4), 77.0)
    wide[0, :, gap], wide[1, :, gap] = rewards.T, values.T
    mask = np.array([[1, 1, 0, 1]])
    expected, _ = gae(rewards, values, np.ones((1, 3)), 0.9, 0.8)
    actual, _ = gae(wide[0], wide[1], mask, 0.9, 0.8)
    close(actual[:, gap], expected)
    assert actual[0, 2] == 0.0


# --- returns


def test_discounted_returns_by_hand():
    rewards, mask = np.array([[1.0, 2.0, 4.0], [8.0, 9.0, 9.0]]), np.array([[1, 1, 1], [1, 0, 0]])
    # 4; 2 + .5 * 4 = 4; 1 + .5 * 4 = 3
    close(discounted_returns(rewards, mask, 0.5), [[3.0, 4.0, 4.0], [8.0, 0.0, 0.0]])


# --- groups


def test_grpo_equals_torch():
    rewards = np.random.default_rng(0).normal(size=12).astype(np.float32)
    groups = torch.tensor(rewards).view(3, 4)
    for unbiased in (True, False):
        std = groups.std(dim=1, keepdim=True, unbiased=unbiased)
        expected = (groups - groups.mean(dim=1, keepdim=True)) / (std + 1e-4)
        actual = group_advantages(rewards, 4, epsilon=1e-4, unbiased_std=unbiased)
        close(actual, expected.flatten().numpy(), 1e-5)


def test_dr_grpo_subtracts_the_mean_only():
    close(group_advantages(np.array([1.0, 3.0, 0.0, 10.0]), 2, normalise="none"), [-1, 1, -5, 5])


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = np.array([1.0, 2.0, 6.0])
    # 1 - 4 = -3; 2 - 3.5 = -1.5; 6 - 1.5 = 4.5, that is 3/2 of the distance to the mean 3
    result = group_advantages(rewards, 3, normalise="none", baseline="others")
    close(result, [-3.0, -1.5, 4.5])


def test_leave_one_out_std_is_that_of_the_others():
    # The first's others are equal, so it is left undivided: 1 - 0. The rest see 1, 0, 0: mean
    # 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
    result = group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), 4, baseline="others")
    close(result, [1.0, -(3**-0.5), -(3**-0.5), -(3**-0.5)], 1e-5)


@pytest.mark.parametrize("baseline", ["group", "others", "length"])
@pytest.mark.parametrize("normalise", ["std", "none"])
def test_unscored_samples_leave_the_group(normalise, baseline):
    options = {"normalise": normalise, "baseline": baseline}
    with_gap = group_advantages(
        np.array([1.0, NAN, 4.0, 0.0]), 4, lengths=np.array([2, 9, 3, 1]), **options
    )
    without = group_advantages(np.array([1.0, 4.0, 0.0]), 3, lengths=np.array([2, 3, 1]), **options)
    close(with_gap, [without[0], 0.0, without[1], without[2]])


@pytest.mark.parametrize("baseline", ["group", "others", "length"])
@pytest.mark.parametrize("group", [[0.1, 0.1, 0.1], [NAN, 5.0, NAN], [NAN, NAN, NAN]])
def test_groups_that_say_nothing_get_exact_zeros(group, baseline):
    result = group_advantages(np.array(group), 3, baseline=baseline, lengths=np.array([2, 3, 1]))
    assert result.tolist() == [0.0, 0.0, 0.0]


REWARDS = (0.1, 0.7, 1 / 3, 0.95, 1e3 / 3, -0.7)
# The decimal numbers that they stand for, exactly: each is a whole number of sixtieths.
SIXTIETHS = {x: int(60 * fractions.Fraction(x).limit_denominator(10**6)) for x in REWARDS}


@pytest.mark.parametrize("baseline", ["group", "others", "length", "none"])
@pytest.mark.parametrize("normalise", ["std", "mean", "none"])
def test_rounding_is_never_divided_by(baseline, normalise):
    """Groups of 2 to 16, the rest unscored: equal rewards, one that differs, two values."""
    groups = [
        group
        for samples in range(2, 17)
        for a, b in itertools.product(REWARDS, repeat=2)
        for group in ([a] * samples, [b] + [a] * (samples - 1), [a, b] * (samples // 2))
    ]
    lengths = np.arange(1, 17)
    padded = np.array([group + [NAN] * (16 - len(group)) for group in groups])
    found = group_advantages(
        padded.reshape(-1), 16, baseline=baseline, normalise=normalise,
        lengths=np.tile(lengths, len(groups)),
    ).reshape(-1, 16)  # fmt: skip
    truth = np.zeros(padded.shape)
    for row, group in zip(truth, groups, strict=True):
        row[: len(group)] = exact_advantages(group, baseline, normalise, lengths)
    scale = np.array([max(1, *map(abs, group)) for group in groups])[:, None]
    allowed = np.where(np.isnan(padded), 0, 3e-4 * np.abs(truth) + 3e-5 * scale)
    wrong = ~(np.abs(found - truth) <= allowed)
    assert not wrong.any(), groups[wrong.any(1).argmax()]


def exact_advantages(group, baseline, normalise, lengths):
    """The definition, in whole sixtieths: only the last quotients are rounded."""
    exact = [SIXTIETHS[x] for x in group]
    weights = lengths[: len(exact)].tolist()
    made = {}
    for i, own in enumerate(exact):
        if own in made:
            continue
        peers = exact[:i] + exact[i + 1 :] if baseline == "others" else exact
        total, count = sum(peers), len(peers)
        above, below = {
            "length": (sum(x * n for x, n in zip(exact, weights)), sum(weights)),
            "none": (0, 1),
        }.get(baseline, (total, count))
        from_it = (own * below - above) / (60 * below)
        if normalise == "std":
            square = sum((x * count - total) ** 2 for x in peers)
            std = (square / max(count - 1, 1)) ** 0.5 / (60 * count)
            from_it = from_it / (std + 1e-6) if square else from_it
        elif normalise == "mean":
            from_it = from_it / (total / (60 * count)) if total > 0 else 0
        made[own] = from_it
    return [made[own] for own in exact]


def test_seven_equal_others_are_not_divided_by():
    found = group_advantages(np.array([0, *[0.95] * 7]), 8, baseline="others")
    assert found[0] == pytest.approx(-0.95, abs=1e-6)
    assert np.all(np.abs(found[1:]) < 3)
    assert not rewards_differ(np.float32([0.1 + 0.2, 0.3, 0.3, 0.3]), 4).any()
    assert not np.any(whiten(np.full((3, 5), 0.7), np.ones((3, 5), bool)))
    assert explained_variance(np.zeros((2, 7)), np.full((2, 7), 0.1), np.ones((2, 7), bool)) == 0


def test_a_large_common_offset_costs_no_precision():
    result = group_advantages(np.array([1e5, 1e5 + 1]), 2)
    close(result, [-(2**-0.5), 2**-0.5], 1e-5)  # std of two values one apart: sqrt(1/2)


def test_groups_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="5 rewards do not split into groups of samples=2"):
        group_advantages(np.zeros(5), 2)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ConfigError, match="normalise='var' is unknown: use std, mean, none"):
        group_advantages(np.zeros(4), 2, normalise="var")


# --- ReMax


@pytest.mark.parametrize(
    "options, expected",
    [
        # 2 - 0.5 = 1.5, discounted by 1/4, 1/2, 1, minus the token's own KL
        ({}, [0.275, 0.55, 1.2]),
        ({"clip": 1.0}, [0.15, 0.3, 0.7]),
        # 1.5 - .3 = 1.2; -.2 + .5 * 1.2 = .4; -.1 + .5 * .4 = .1
        ({"kl_cumulated": True}, [0.1, 0.4, 1.2]),
        # the bound is on the reward's difference, not on the sum: 1 - .3 = .7; .15; -.025
        ({"kl_cumulated": True, "clip": 1.0}, [-0.025, 0.15, 0.7]),
    ],
)
def test_remax_in_both_published_forms(options, expected):
    kl = np.array([[0.1, 0.2, 0.3, NAN]])
    mask = np.array([[1, 1, 1, 0]])
    result = remax_advantages(np.array([2.0]), np.array([0.5]), mask, kl, 1.0, 0.5, **options)
    close(result, [[*expected, 0.0]])


def test_remax_without_kl_is_the_difference_at_every_token():
    mask = np.array([[1, 1], [1, 0]])
    result = remax_advantages(np.array([1.0, 0.0]), np.array([0.25, 1.0]), mask)
    close(result, [[0.75, 0.75], [-1.0, 0.0]])


@pytest.mark.parametrize("kl_cumulated", [False, True])
def test_remax_rows_without_reward_or_baseline_get_zero(kl_cumulated):
    rewards, baseline, mask = np.array([NAN, 1.0]), np.array([0.0, NAN]), np.ones((2, 2))
    result = remax_advantages(rewards, baseline, mask, mask, 1.0, kl_cumulated=kl_cumulated)
    assert not np.asarray(result).any()


# --- Safe-RLHF


def test_lagrangian_by_hand():
    # (3 - 2 * 6) / 3 = -3
    close(lagrangian_advantages(np.array([[3.0]]), np.array([[6.0]]), 2.0), [[-3.0]])


@pytest.mark.parametrize("multiplier", [0.0, 0.3, 1.0, 7.0])
def test_without_clamps_the_lagrangian_carries_exactly_minus_beta_kl(multiplier):
    draw = np.random.default_rng(1)
    kl, (reward, cost), beta = draw.normal(size=(2, 3)), draw.normal(size=(2, 2)), 0.1
    mask, values = np.array([[1, 1, 1], [1, 1, 0]]), np.zeros((2, 3))

    def combined(clip):
        rewards = token_rewards(reward, mask, kl, beta, clip)
        costs = token_rewards(cost, mask, kl, -beta, clip)
        adv_reward, _ = gae(rewards, values, mask, 1.0, 0.95)
        adv_cost, _ = gae(costs, values, mask, 1.0, 0.95)
        return lagrangian_advantages(adv_reward, adv_cost, multiplier)

    # GAE is linear: the same KL penalty once, and the score (R - multiplier C) / (1 + multiplier)
    score = (reward - multiplier * cost) / (1 + multiplier)
    expected, _ = gae(token_rewards(score, mask, kl, beta), values, mask, 1.0, 0.95)
    close(combined(clip=None), expected)
    close(combined(clip=50.0), expected)  # never reached
    assert not np.allclose(combined(clip=0.05), expected, atol=1e-3)


THREE = np.ones((3, 3), np.float32)


@pytest.mark.parametrize(
    "wrong",
    [
        # NumPy would stretch one reward per row over the three tokens.
        lambda: advantages.gae(np.ones(3), THREE, THREE, 1.0, 1.0),
        lambda: advantages.token_rewards(THREE, THREE),
        lambda: advantages.token_rewards(np.ones(3), THREE, kl=np.ones(3)),
        lambda: advantages.group_advantages(THREE, 3),
        lambda: advantages.remax_advantages(np.ones((3, 1)), np.ones((3, 1)), THREE),
        lambda: advantages.lagrangian_advantages(THREE, np.ones(3), 1.0),
    ],
)
def test_arrays_of_other_shapes_are_refused(wrong):
    with pytest.raises(AssertionError, match="shape|rank"):
        wrong()
