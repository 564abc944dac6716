"""Covariances, an entropy that is aimed at, DPPO by KL: by hand, and what is refused."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from hjax.algorithms import ALGORITHMS
from hjax.algorithms.kl import AdaptiveEntropy
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.algorithms.surrogates import select_by_covariance, token_covariances
from hjax.errors import ConfigError

MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1]], bool)


def step(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "response_mask": MASK,
        "responses": rng.integers(0, 50, MASK.shape),
        "advantages": rng.normal(size=MASK.shape).astype(np.float32),
        "old_logprobs": -rng.uniform(0.1, 2, MASK.shape).astype(np.float32),
    }


def test_covariances_by_hand():
    # Means over the two tokens that count: A 1 and 3 about 2, l -1 and -3 about -2.
    mask = np.array([[1, 1, 0]], bool)
    made = token_covariances(np.float32([[1, 3, 9]]), np.float32([[-1, -3, np.nan]]), mask)
    np.testing.assert_allclose(made, [[-1, -1, 0]])


def test_kl_cov_takes_the_largest_and_clip_cov_some_between_its_bounds():
    rng = np.random.default_rng(0)
    cov, tokens = rng.normal(size=(4, 25)), rng.integers(0, 9, (4, 25))
    mask = rng.uniform(size=cov.shape) < 0.8
    few = int(0.1 * mask.sum())
    made = np.asarray(select_by_covariance(cov, mask, "kl", 0.1, 0, 0, tokens))
    assert sorted(cov[made]) == sorted(cov[mask])[-few:]
    between = mask & (cov > -0.5) & (cov < 1)
    made = np.asarray(select_by_covariance(cov, mask, "clip", 0.1, -0.5, 1, tokens))
    assert made.sum() == few and not made[~between].any()
    again, other = (
        np.asarray(select_by_covariance(cov, mask, "clip", 0.1, -0.5, 1, t))
        for t in (tokens, tokens + 1)
    )
    assert (again == made).all() and (other != made).any()  # a draw of the batch's own
    whole = np.asarray(select_by_covariance(cov, mask, "clip", 1.0, -0.5, 1, tokens))
    assert (whole == between).all()
    assert select_by_covariance(cov, mask, "kl", 1e-6, 0, 0, tokens).sum() == 1  # at least one


@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_a_covariance_is_that_of_the_step_in_micro_batches(kind):
    batch = step()
    options = {"covariance_low": -9.0, "covariance_high": 9.0} if kind == "clip" else {}
    loss = PolicyLoss(covariance=kind, covariance_share=0.3, **options)
    x = batch["old_logprobs"] + 0.1
    made = batch | {"weights": loss.weights(batch)} | loss.prepared(batch)
    tokens, stats = loss(x, None, made)
    plain, _ = PolicyLoss()(x, None, batch)
    chosen = np.asarray(stats["covariant"]) > 0
    assert chosen.sum() == 2  # of seven tokens
    expected = np.where(chosen, 0.0 if kind == "clip" else plain + 0.1, plain)
    np.testing.assert_allclose(np.asarray(tokens)[MASK], expected[MASK], rtol=1e-5)
    parts = [{k: np.asarray(v)[i : i + 1] for k, v in made.items()} for i in range(2)]
    total = sum(
        float(jnp.sum(part["weights"] * loss(x[i : i + 1], None, part)[0]))
        for i, part in enumerate(parts)
    )
    np.testing.assert_allclose(total, jnp.sum(made["weights"] * tokens), rtol=1e-5)


def test_an_entropy_coefficient_follows_its_target():
    control = AdaptiveEntropy(0.0, target=1.0, step=0.25, max_coef=0.5)
    seen = []
    for entropy in (0.5, 0.5, 0.5, 1.5, 1.5, 0.9, math.nan):
        seen.append(control.coef)
        control.update(entropy)
    # Up to the most there may be; nothing while the entropy is above, though it only falls slowly.
    assert seen == [0.0, 0.25, 0.5, 0.5, 0.0, 0.0, 0.25]
    again = AdaptiveEntropy(0.0, target=1.0, step=0.25, max_coef=0.5)
    again.restore(control.state())
    assert again.coef == control.coef == 0.25


def test_the_coefficient_travels_with_the_batch_and_is_saved():
    cls = ALGORITHMS["GRPO"]
    config = cls.default_config()
    config.update({"entropy_target": 1.0, "entropy_coef": 0.004, "kl_coef": 0.0})
    algorithm = cls(config, dict.fromkeys(("actor", "reference", "reward")), samples=2)
    batch = {"response_mask": MASK}
    assert algorithm.update_kl_coef(batch, None)["entropy_coef"] == np.float32(0.004)
    assert algorithm.finish({"actor/entropy": 0.2}) == {"entropy/coefficient": 0.004}
    assert algorithm.state()["entropy"]["value"] == pytest.approx(0.0041)
    loss = cls.losses(config, 4)["actor"]
    assert loss.needs_entropy and loss.scalars == ("entropy_coef",)
    given = step() | {"entropy_coef": np.float32(0.5)}
    entropy = np.full(MASK.shape, 2.0, np.float32)
    made, _ = loss(given["old_logprobs"], entropy, given)
    plain, _ = PolicyLoss(aggregation="sequence")(given["old_logprobs"], None, given)
    np.testing.assert_allclose(np.asarray(made - plain)[MASK], -1.0, rtol=1e-5)


def test_dppo_masks_by_kl():
    old, new = np.float32([[0.5, 0.5, 0.5, 0.5]]), np.float32([[0.8, 0.6, 0.2, 0.4]])
    batch = {
        "response_mask": np.ones((1, 4), bool),
        "old_logprobs": np.log(old),
        "advantages": np.float32([[1, 1, -2, -2]]),
    }
    # KL of a coin of .5 and one of .8: .5 log(.5 / .8) + .5 log(.5 / .2) = .2231; of .6: .0204.
    loss = PolicyLoss(surrogate="dppo_kl", clip_low=0.1, clip_high=0.1)
    value, stats = loss(np.log(new), None, batch)
    assert stats["clip_fraction"].tolist() == [[1, 0, 1, 0]]
    expected = [[0.0, -1.2 * math.log(0.6), 0.0, 2 * 0.8 * math.log(0.4)]]
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    # Either way that the gradient does not push is free, however far.
    back = batch | {"advantages": -batch["advantages"]}
    assert not np.asarray(loss(np.log(new), None, back)[1]["clip_fraction"]).any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"covariance": "cov"}, "covariance='cov' is not built: use none, clip, kl"),
        ({"covariance_share": 0.1}, "covariance_share=0.1 has no effect with covariance='none'"),
        ({"covariance": "kl", "covariance_low": 2.0}, r"covariance_low=2.0 has no effect .*bounds"),
        ({"covariance": "clip", "covariance_coef": 2.0}, "covariance_coef=2.0 has no effect"),
        ({"covariance": "clip", "covariance_low": 6.0}, "must be below covariance_high=5.0"),
        ({"covariance": "kl", "covariance_share": 0.0}, "must be above 0 and at most 1"),
        (
            {"ratio": "none", "clip_low": None, "clip_high": None, "covariance": "kl"},
            "covariance=kl has no effect with ratio='none'",
        ),
        ({"surrogate": "sapo", "ratio_cap": 2.0, "clip_low": None, "clip_high": None}, "ratio_cap"),
        ({"surrogate": "dppo_kl", "ratio": "sequence"}, "weighs each token by its own ratio"),
        ({"surrogate": "dppo_kl", "clip_low": None}, "'dppo_kl' needs clip_low and clip_high"),
    ],
)
def test_switches_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(**options)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("PPO", {"entropy_target": 1.0, "entropy_coef": 0.1}, "is where entropy_target begins"),
        ("GRPO", {"kl_cumulated": False}, "kl_cumulated=False has no effect with"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(name, changes, message):
    config = ALGORITHMS[name].default_config()
    config.update(changes)
    with pytest.raises(ConfigError, match=message) as caught:
        ALGORITHMS[name].check(config)
    assert "\n" not in str(caught.value)
