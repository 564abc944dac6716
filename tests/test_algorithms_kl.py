"""KL estimators: values, bias and gradients by exact expectation over a small vocabulary."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.algorithms import kl as kl_module
from hjax.algorithms.kl import KL_KINDS, AdaptiveKL, FixedKL
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.errors import ConfigError

LOGITS = np.array([0.3, -1.2, 0.8, 0.1], np.float32)
REFERENCE = np.log(np.array([0.5, 0.2, 0.1, 0.2], np.float32))

kl_estimate = jax.jit(kl_module.kl_estimate, static_argnames="kind")


def grad(function):
    return jax.jit(jax.grad(function))


@jax.jit
def reverse_kl(logits):
    logprobs = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logprobs) * (logprobs - REFERENCE))


@jax.jit
def forward_kl(logits):
    return jnp.sum(jnp.exp(REFERENCE) * (REFERENCE - jax.nn.log_softmax(logits)))


def on_policy(kind):
    """Expected estimate over tokens drawn from the policy; the draw itself has no gradient."""

    def expectation(logits):
        logprobs = jax.nn.log_softmax(logits)
        probs = jax.lax.stop_gradient(jnp.exp(logprobs))
        return jnp.sum(probs * kl_estimate(logprobs, REFERENCE, kind))

    return expectation


def close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("k1", np.log(2)),
        ("k2", np.log(2) ** 2 / 2),
        ("k3", 0.5 - 1 + np.log(2)),  # the reference has half the policy's probability
        ("k1+", np.log(2)),
        ("k3+", 0.5 - 1 + np.log(2)),
    ],
)
def test_values_by_hand(kind, expected):
    close(kl_estimate(np.log(0.5), np.log(0.25), kind), expected)


@pytest.mark.parametrize("kind", ["k1", "k3", "k1+", "k3+"])
def test_unbiased_estimators_expect_the_kl(kind):
    close(jax.jit(on_policy(kind))(LOGITS), reverse_kl(LOGITS))


def test_k2_is_biased():
    assert abs(on_policy("k2")(LOGITS) - reverse_kl(LOGITS)) > 1e-2


def test_the_gradient_of_k1_has_mean_zero():
    close(grad(on_policy("k1"))(LOGITS), np.zeros(4))


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_the_gradient_of_k2_and_straight_through_is_that_of_the_reverse_kl(kind):
    close(grad(on_policy(kind))(LOGITS), grad(reverse_kl)(LOGITS))


def test_the_gradient_of_k3_is_that_of_the_forward_kl():
    close(grad(on_policy("k3"))(LOGITS), grad(forward_kl)(LOGITS))


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_straight_through_has_one_value_and_the_other_gradient(kind):
    logprobs = np.array([-0.1, -2.0, -30.0], np.float32)
    reference = np.array([-1.5, -2.0, -0.3], np.float32)
    assert (
        kl_estimate(logprobs, reference, kind) == kl_estimate(logprobs, reference, kind[:2])
    ).all()
    gradient = grad(lambda x: jnp.sum(kl_estimate(x, reference, kind)))(logprobs)
    close(gradient, logprobs - reference)  # d/dx (x - ref)^2 / 2


def test_k3_of_a_tiny_difference_keeps_its_digits():
    # k3 = d^2/2 - ...: 5e-9 for d = 1e-4, which exp(-d) - 1 + d would lose in float32
    close(kl_estimate(jnp.float32(1e-4), jnp.float32(0.0), "k3") * 1e9, 5.0, 1e-3)


def test_input_clamp_bounds_the_log_ratio():
    close(kl_estimate(np.array([3.0, -3.0]), np.zeros(2), "k1", input_clamp=2.0), [2.0, -2.0])
    close(kl_estimate(-200.0, 0.0, "k3", input_clamp=1.0), np.e - 2)
    assert jnp.isinf(kl_estimate(-200.0, 0.0, "k3"))


def test_output_clamp_bounds_the_estimate():
    close(kl_estimate(np.array([-5.0, 0.0]), np.zeros(2), "k3", output_clamp=10.0), [10.0, 0.0])
    gradient = grad(lambda x: kl_estimate(x, 0.0, "k3", output_clamp=10.0))(-5.0)
    assert gradient == 0.0


@pytest.mark.parametrize("kind", KL_KINDS)
def test_half_precision_log_probs_give_float32(kind):
    assert kl_estimate(jnp.bfloat16(-1.0), jnp.bfloat16(-2.0), kind).dtype == jnp.float32


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match="'k4' is unknown: use one of k1, k2, k3, k1"):
        kl_estimate(0.0, 0.0, "k4")


def test_token_ids_and_other_shapes_are_refused_when_traced():
    with pytest.raises(AssertionError, match="float"):
        kl_estimate(np.arange(3), np.zeros(3, np.float32))
    with pytest.raises(AssertionError, match="shape"):
        kl_estimate(np.zeros((3, 3), np.float32), np.zeros(3, np.float32))


def test_adaptive_by_hand():
    kl = AdaptiveKL(0.1, target=2.0, horizon=1000)
    kl.update(3.0, sequences=100)  # error 0.5, bounded to 0.2: 0.1 * (1 + 0.2 / 10)
    close(kl.coef, 0.102)
    kl.update(1.9, sequences=100)  # error -0.05: 0.102 * (1 - 0.05 / 10)
    close(kl.coef, 0.10149)
    kl.update(2.0, sequences=100)
    close(kl.coef, 0.10149)


def test_adaptive_never_turns_negative():
    kl = AdaptiveKL(0.1, target=2.0, horizon=10)
    kl.update(0.0, sequences=1000)  # one horizon's worth at most: -20 %
    close(kl.coef, 0.08)


@pytest.mark.parametrize("measured", [float("nan"), float("inf")])
def test_adaptive_ignores_a_kl_that_is_not_finite(measured):
    kl = AdaptiveKL(0.1, target=2.0)
    kl.update(measured, sequences=64)
    assert kl.coef == 0.1


def test_fixed_stays():
    kl = FixedKL(0.05)
    kl.update(100.0, sequences=64)
    assert kl.coef == 0.05


@pytest.mark.parametrize("make", [lambda: FixedKL(0.3), lambda: AdaptiveKL(0.3, target=1.0)])
def test_state_survives_json_bit_for_bit(make):
    before = make()
    before.update(np.float32(1.07), sequences=48)
    after = make()
    after.restore(json.loads(json.dumps(before.state())))
    assert after.coef == before.coef


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FixedKL(-0.1), "coefficient -0.1 must be a finite number, 0 or more"),
        (lambda: AdaptiveKL(0.0, target=1.0), "coef=0.0 must be above 0"),
        (lambda: AdaptiveKL(0.1, target=0.0), "target=0.0 must be above 0"),
        (lambda: AdaptiveKL(0.1, target=1.0, horizon=0), "horizon=0 must be above 0"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


OLD = np.log(np.array([0.1, 0.3, 0.2, 0.4], np.float32))  # of the policy that drew


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("ratio", ["token", "none"])
def test_weighted_by_the_ratio_value_and_gradient_are_the_reverse_kls(kind, ratio):
    """Each token of the vocabulary in a row of its own, weighted by who drew it: another policy, or
    without a ratio the policy itself."""
    clips = {} if ratio == "none" else {"clip_low": None, "clip_high": None}
    loss = PolicyLoss(ratio=ratio, kl_coef=1.0, kl_estimator=kind, kl_importance=True, **clips)
    ones = jnp.ones((4, 1))
    batch = {
        "response_mask": ones > 0, "advantages": 0 * ones, "old_logprobs": OLD[:, None],
        "ref_logprobs": REFERENCE[:, None],
    }  # fmt: skip

    def expectation(logits):
        logprobs = jax.nn.log_softmax(logits)
        drew = jnp.exp(OLD) if ratio == "token" else jax.lax.stop_gradient(jnp.exp(logprobs))
        return jnp.sum(drew * loss(logprobs[:, None], None, batch)[0][:, 0])

    close(expectation(LOGITS), reverse_kl(LOGITS), 1e-5)
    close(grad(expectation)(LOGITS), grad(reverse_kl)(LOGITS), 1e-5)


@pytest.mark.parametrize("kind", ["k2", "k1+", "k3+"])
def test_what_the_ratio_does_not_make_unbiased_is_refused(kind):
    with pytest.raises(ConfigError, match="weighted by the ratio k1 and k3 are unbiased"):
        PolicyLoss(kl_coef=1.0, kl_estimator=kind, kl_importance=True)


@pytest.mark.parametrize("keys", [{"kl_in": "reward"}, {"kl_in": "loss", "kl_coef": 0.0}])
def test_the_ratio_of_no_kl_in_the_loss_is_refused(keys):
    from helpers import tiny_config

    from hjax.algorithms.ppo import policy_loss

    config = tiny_config("PPO", {f"algorithm.{k}": v for k, v in keys.items()})
    config.algorithm.kl_importance = True
    with pytest.raises(ConfigError, match="weights the KL in the loss, and there is none"):
        policy_loss(config.algorithm, 8)
