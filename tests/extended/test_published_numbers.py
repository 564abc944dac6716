"""Numbers that other projects' tests state, from the inputs that they state.

- NeMo-RL, tests/unit/algorithms/test_loss_functions.py (commit 7ea279a)
- rlax, rlax/_src/multistep_test.py and policy_gradients_test.py (commit 4c5d25b)
- Tunix, tests/rl/algo_core_test.py and tests/rl/ppo/ppo_helpers_test.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from hjax.algorithms.advantages import gae, group_advantages
from hjax.algorithms.kl import kl_estimate
from hjax.algorithms.masks import masked_mean, masked_variance
from hjax.algorithms.policy_loss import PolicyLoss

A, OLD = [1.0, -1.0, 2.0], [-1.0, -1.0, -1.0]
NEW = [-1.69315, -1.0, -0.59453]  # ratios .5, 1, 1.5
DUAL = {"advantages": [1.0, -1.0, -4.0], "old": [-1.0, -1.0, -3.0]}
STALE = [-0.5, -1.5, -0.8]
# Switches, log-probs, further inputs, the losses of tokens and their mean.
NEMO = {
    "ppo_clipping": ({}, NEW, {}, [-0.5, 1.0, -2.4], -0.6333),
    "dual_clip": ({"dual_clip": 3.0}, [-1.69315, -1.0, -0.69741], DUAL, [-0.5, 1.0, 12.0], 4.1667),
    "gspo": ({"ratio": "sequence"}, NEW, {}, [-0.9086, 0.9086, -1.8171], -0.6057),
    "on_policy_truncated_importance_sampling": (
        {"correction": "truncated", "correction_cap": 0.8}, NEW, {"sampler": STALE},
        [-0.3033, 0.8, -1.92], -0.4744,
    ),
    "reinforce_mode": (
        {"ratio": "none", "clip_low": None, "clip_high": None}, [-0.5, -1.0, -1.5],
        {"advantages": [1.0, -1.0, 2.0]}, [0.5, -1.0, 3.0], 0.8333,
    ),
    "kl_penalty": (
        {"kl_coef": 0.1, "kl_estimator": "k3"}, [0.0, -1.0, -2.0],
        {"advantages": [0.0] * 3, "old": [0.0] * 3, "reference": [-1.0] * 3},
        [0.0368, 0.0, 0.0718], 0.0362,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEMO)
def test_losses_of_nemo_rls_tests(name):
    switches, new, given, tokens, mean = NEMO[name]
    inputs = {"advantages": A, "old": OLD, "sampler": OLD, "reference": OLD} | given
    batch = {
        "response_mask": np.ones((1, 3), bool),
        "advantages": np.float32([inputs["advantages"]]),
        "old_logprobs": np.float32([inputs["old"]]),
        "logprobs": np.float32([inputs["sampler"]]),
        "ref_logprobs": np.float32([inputs["reference"]]),
    }
    loss = PolicyLoss(**switches)
    made, _ = loss(np.float32([new]), None, batch)
    np.testing.assert_allclose(made, [tokens], rtol=2e-3, atol=1e-6)
    np.testing.assert_allclose(jnp.sum(loss.weights(batch) * made), mean, rtol=1e-3)


@pytest.mark.parametrize(
    "kind, free, clamped",
    [
        ("k1", [-1.0, 14.0, 29.0], [-1.0, 10.0, 10.0]),
        ("k2", [0.5, 98.0, 420.5], [0.5, 10.0, 10.0]),
        ("k3", [0.7183, 13.0, 28.0], [0.7183, 10.0, 10.0]),
    ],
)
def test_kl_estimates_of_nemo_rls_tests(kind, free, clamped):
    given = np.float32([-1, -1, -1]), np.float32([0, -15, -30])
    np.testing.assert_allclose(kl_estimate(*given, kind), free, rtol=1e-3)
    made = kl_estimate(*given, kind, input_clamp=20.0, output_clamp=10.0)
    np.testing.assert_allclose(made, clamped, rtol=1e-3)


RLAX = {
    1.0: [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3.0, 2.0, 1.0, 0.0, -4.9]],
    0.7: [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1.0, 0.0, -4.9]],
    0.4: [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1.0, 0.0, -4.9]],
}


@pytest.mark.parametrize("lam", RLAX)
def test_gae_of_rlaxs_tests(lam):
    # There a value follows the last step, here it is 0: it becomes part of the last reward. In the
    # second row a discount of 0 ends an episode behind four steps.
    rows = (
        ([0, 0, 1, 0, -0.5 + 0.99 * -1], [1, 4, -3, -2, -1], 0.99, slice(5), 0),
        ([0, 0, 0, 0], [-3, -2, -1, 0], 0.9, slice(4), 1),
        ([1 + 0.9 * -1], [5], 0.9, slice(4, 5), 1),
    )
    for rewards, values, gamma, at, row in rows:
        given = np.float32([rewards]), np.float32([values])
        made, _ = gae(*given, np.ones((1, len(values)), bool), gamma, lam)
        np.testing.assert_allclose(made[0], RLAX[lam][row][at], atol=1e-3)


def test_clipped_surrogate_of_rlaxs_tests():
    logits = np.float64([[1, 1, 1], [2, 0, 0], [-1, -2, -3]])
    before = np.float64([[1, 1, 1], [2, 0, 0], [-3, -2, -1]])
    actions = np.arange(3)

    def chosen(x):
        x = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
        return np.float32([x[np.arange(3), actions]])

    for sign, expected in ((1, -0.17117467), (-1, 0.19333333)):
        batch = {
            "response_mask": np.ones((1, 3), bool),
            "old_logprobs": chosen(before),
            "advantages": np.float32([[0.3, 0.2, 0.1]]) * sign,
        }
        made, _ = PolicyLoss()(chosen(logits), None, batch)
        np.testing.assert_allclose(np.mean(made), expected, atol=1e-4)


def test_baselines_and_moments_of_tunixs_tests():
    made = group_advantages(np.arange(1.0, 7.0), 3, baseline="others", normalise="none")
    np.testing.assert_allclose(made, [-1.5, 0.0, 1.5, -1.5, 0.0, 1.5])
    x = np.arange(1.0, 11.0).reshape(2, 5)
    mask = np.array([[1, 1, 0, 0, 1], [1, 1, 1, 1, 1]], bool)
    np.testing.assert_allclose(masked_mean(x, mask), 6.0)
    np.testing.assert_allclose(masked_mean(x, mask, axis=1), [2.666667, 8.0], rtol=1e-6)
    np.testing.assert_allclose(masked_variance(x, mask), 10.285715, rtol=1e-6)
    np.testing.assert_allclose(masked_variance(x[0], mask[0]), 4.333333, rtol=1e-6)
