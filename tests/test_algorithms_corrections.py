"""Corrections for rollouts of other weights: worked out by hand, with numpy and torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import trainer_of
from references import torch

from hjax.algorithms.corrections import correction_bounds, correction_weights
from hjax.algorithms.losses import PolicyLoss
from hjax.errors import ConfigError

# One row: old probability over the sampler's 1.5, 4 and 0.5; the last token is padding.
MASK = np.array([[True, True, True, False]])
OLD = np.array([[-1.0, -1.0, -1.0, np.nan]], np.float32)
SAMPLER = OLD - np.log(np.array([[1.5, 4.0, 0.5, 1.0]], np.float32))
ADVANTAGES = np.array([[1.0, 1.0, -2.0, np.nan]], np.float32)
# The trained policy over the old one: 1.1 is within 0.8 to 1.2, 1.5 is cut, 0.7 too.
RATIO = np.array([[1.1, 1.5, 0.7, 1.0]], np.float32)
LOGPROBS = OLD + np.log(RATIO)


def batch(**more):
    given = {"response_mask": MASK, "old_logprobs": OLD, "logprobs": SAMPLER}
    return given | {"advantages": ADVANTAGES} | more


def value_and_gradient(loss, logprobs, given):
    token_loss, stats = jax.jit(loss)(logprobs, None, given)
    gradient = jax.grad(lambda x: jnp.sum(loss(x, None, given)[0]))(jnp.asarray(logprobs))
    return np.asarray(token_loss), np.asarray(gradient), stats


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "correction, weights, capped",
    [("decoupled", [1.5, 4.0, 0.5], None), ("truncated", [1.5, 2.0, 0.5], [0, 1, 0])],
)
def test_the_surrogate_is_weighed_by_hand(correction, weights, capped):
    loss = PolicyLoss(correction=correction)
    token_loss, gradient, stats = value_and_gradient(loss, LOGPROBS, batch())
    w1, w2, w3 = weights
    # -min(1.1, 1.1) * 1; -min(1.5, 1.2) * 1, cut: no gradient; -min(0.7 * -2, 0.8 * -2), cut.
    close(token_loss, [[-1.1 * w1, -1.2 * w2, 1.6 * w3, 0.0]])
    # d(-rho A w)/dl = -rho A w, where it is not cut; the weight is a constant.
    close(gradient, [[-1.1 * w1, 0.0, 0.0, 0.0]])
    close(stats["correction"], [[*weights, 0.0]])
    if capped is None:
        assert "correction_capped" not in stats
    else:
        close(stats["correction_capped"], [[*capped, 0]])


@pytest.mark.parametrize("kind", ["decoupled", "truncated", "icepop"])
def test_weights_have_no_gradient(kind):
    low, high = correction_bounds(kind, None, None)

    def total(old):
        weights, _ = correction_weights(old, SAMPLER, MASK, kind=kind, low=low, high=high)
        return jnp.sum(weights)

    close(jax.grad(total)(jnp.asarray(OLD)), np.zeros_like(OLD))


def test_reinforce_is_weighed_too():
    loss = PolicyLoss(ratio="none", correction="truncated", correction_cap=3.0)
    assert loss.needs == ("response_mask", "advantages", "old_logprobs", "logprobs")
    token_loss, gradient, _ = value_and_gradient(loss, LOGPROBS, batch())
    weights = np.array([1.5, 3.0, 0.5])
    close(token_loss, [[*(-weights * [1, 1, -2] * LOGPROBS[0, :3]), 0.0]])
    close(gradient, [[*(-weights * [1, 1, -2]), 0.0]])


def test_neither_the_kl_nor_the_entropy_is_weighed():
    reference = np.where(MASK, -2.0, 0.0).astype(np.float32)
    plain = PolicyLoss(kl_coef=0.5, kl_estimator="k2", correction="truncated")
    given = batch(advantages=np.zeros_like(ADVANTAGES), ref_logprobs=reference)
    token_loss = jax.jit(plain)(LOGPROBS, None, given)[0]
    close(token_loss, [[*(0.5 * 0.5 * (LOGPROBS[0, :3] + 2.0) ** 2), 0.0]])


def test_what_the_sampler_truncated_is_compared_before_it_was():
    other = batch(logprobs=np.zeros_like(OLD), policy_logprobs=SAMPLER)
    loss = PolicyLoss(correction="decoupled")
    close(loss(LOGPROBS, None, other)[0], loss(LOGPROBS, None, batch())[0])


@pytest.mark.parametrize("cap", [None, 1.3])
def test_value_and_gradient_equal_torchs(cap):
    draw = np.random.default_rng(0)
    shape = (6, 5)
    new, old, sampler = (draw.normal(-2, 0.4, shape) for _ in range(3))
    advantages, mask = draw.normal(size=shape), draw.random(shape) < 0.8
    x = torch.tensor(new, requires_grad=True)
    ratio = torch.exp(x - torch.tensor(old))
    a = torch.tensor(advantages)
    weight = torch.exp(torch.tensor(old) - torch.tensor(sampler))
    weight = weight if cap is None else torch.clamp(weight, max=cap)
    clipped = torch.clamp(ratio, 0.8, 1.28)
    expected = -(torch.minimum(ratio * a, clipped * a) * weight)[torch.tensor(mask)].mean()
    expected.backward()
    switches = {"correction": "decoupled"} if cap is None else {
        "correction": "truncated", "correction_cap": cap}  # fmt: skip
    loss = PolicyLoss(clip_high=0.28, **switches)
    given = {"response_mask": mask, "old_logprobs": old, "logprobs": sampler}
    given["advantages"] = advantages
    given = {k: x if x.dtype == bool else x.astype(np.float32) for k, x in given.items()}

    def total(logprobs):
        return jnp.sum(loss.weights(given) * loss(logprobs, None, given)[0])

    value, gradient = jax.value_and_grad(total)(jnp.asarray(new, jnp.float32))
    close(value, expected.item())
    close(gradient, x.grad.numpy())


def test_without_a_correction_nothing_more_is_read():
    assert "logprobs" not in PolicyLoss().needs
    assert PolicyLoss(ratio="none").needs == ("response_mask", "advantages")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"correction": "mine"}, "correction='mine' is not built: use none, decoupled, truncated"),
        ({"correction": "decoupled", "ratio": "none"}, "no effect with ratio='none'.*'truncated'"),
        ({"correction": "truncated", "correction_cap": 0.0}, "correction_cap=0.0 must be above 0"),
    ],
)
def test_what_means_nothing_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(**options)


@pytest.mark.parametrize("algorithm", ["PPO", pytest.param("ReMax", marks=pytest.mark.slow)])
@pytest.mark.extended
def test_an_algorithm_has_the_actor_score_its_rollouts_first(algorithm):
    changes = {"steps": 1, "algorithm.correction": "truncated", "rollout.top_k": 6}
    with trainer_of(algorithm, changes) as trainer:
        row = trainer.step()
        calls = [span.method for span in trainer.timeline.spans() if span.role == "actor"]
    assert calls.index("compute_log_prob") < calls.index("update_actor")
    batch = trainer.batch
    mask = batch["response_mask"]
    # The weights have not moved, so the actor's are the sampler's: before top-k, all weights 1.
    np.testing.assert_allclose(batch["old_logprobs"], batch["policy_logprobs"], atol=1e-5)
    assert abs(batch["old_logprobs"] - batch["logprobs"])[mask].max() > 1e-3
    assert row["actor/correction"] == pytest.approx(1.0, abs=1e-5)
    assert row["actor/correction_capped"] == 0.0
