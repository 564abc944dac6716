"""Losses: hand-worked tokens, torch and optax references, and linearity over micro-batches."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from references import torch

from hjax.algorithms import losses
from hjax.algorithms.losses import (
    PolicyLoss,
    SupervisedLoss,
    ValueLoss,
)
from hjax.errors import ConfigError

NAN = float("nan")

# As the workers run them: compiled.
aggregation_weights = jax.jit(
    losses.aggregation_weights, static_argnames=("aggregation", "max_length")
)
explained_variance = jax.jit(losses.explained_variance)


def close(actual, expected, tolerance=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def call(loss, *arguments):
    """Token losses and statistics, compiled as a worker does."""
    return jax.jit(loss)(*arguments)


def gradient_of(loss, logprobs, batch):
    """Gradient of the unweighted sum of the token losses."""
    arguments = () if isinstance(loss, ValueLoss) else (None,)
    return jax.jit(jax.grad(lambda x: jnp.sum(loss(x, *arguments, batch)[0])))(logprobs)


def ratios(ratio, advantages, mask=None):
    """A batch, and the log-probs under which its ratios are `ratio` [N, L]."""
    ratio = np.asarray(ratio, np.float32)
    old = np.full(ratio.shape, -2.0, np.float32)
    mask = np.ones(ratio.shape, bool) if mask is None else np.asarray(mask, bool)
    batch = {"old_logprobs": old, "advantages": np.asarray(advantages), "response_mask": mask}
    return old + np.log(ratio), batch


def random_batch(rows=8, length=5, seed=0):
    draw = np.random.default_rng(seed)
    lengths = np.array([5, 1, 3, 0, 4, 2, 5, 3])[:rows]
    mask = np.arange(length) < lengths[:, None]

    def logprobs():
        return np.where(mask, -draw.gamma(2.0, size=mask.shape), 0.0).astype(np.float32)

    return {
        "response_mask": mask,
        "old_logprobs": logprobs(),
        "ref_logprobs": logprobs(),
        "advantages": draw.normal(size=mask.shape).astype(np.float32),
        "values": draw.normal(size=mask.shape).astype(np.float32),
        "returns": draw.normal(size=mask.shape).astype(np.float32),
        "x": draw.normal(size=mask.shape).astype(np.float32),
    }


# --- aggregation

MASK = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"aggregation": "token"}, [[1 / 4] * 3, [1 / 4, 0, 0], [0] * 3]),
        # two non-empty responses: 1 / (3 * 2) and 1 / (1 * 2)
        ({"aggregation": "sequence"}, [[1 / 6] * 3, [1 / 2, 0, 0], [0] * 3]),
        # three responses of at most 10 tokens
        ({"aggregation": "constant", "max_length": 10}, [[1 / 30] * 3, [1 / 30, 0, 0], [0] * 3]),
    ],
)
def test_weights_by_hand(options, expected):
    close(aggregation_weights(MASK, **options), expected)


@pytest.mark.parametrize(
    "options, weight",
    [
        ({"aggregation": "token"}, 1.0),
        ({"aggregation": "sequence"}, 1.0),
        ({"aggregation": "constant", "max_length": 5}, 0.1),
    ],
)
def test_unscored_rows_leave_the_normaliser(options, weight):
    rows = np.array([False, True, True])
    expected = [[0] * 3, [weight, 0, 0], [0] * 3]  # "constant": 1 / (2 rows * 5)
    close(aggregation_weights(MASK, row_mask=rows, **options), expected)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_no_tokens_weigh_nothing(how):
    max_length = 3 if how == "constant" else None
    close(aggregation_weights(np.zeros((2, 3)), how, max_length), np.zeros((2, 3)))


def test_rows_times_length_may_pass_two_to_the_31():
    weights = aggregation_weights(np.ones((4, 1)), "constant", max_length=2**30)
    close(weights * 2.0**32, np.ones((4, 1)))


# --- the policy loss, token by token


def test_clipped_tokens_by_hand():
    mask = [[1, 1, 1], [1, 1, 0]]
    logprobs, batch = ratios([[1.5, 0.5, 1.0], [1.5, 0.5, 9.0]], [[1, 1, 1], [-1, -1, 1]], mask)
    loss, stats = call(PolicyLoss(), logprobs, None, batch)
    # A > 0: the gain is cut at 1.2, a loss of probability is not. A < 0: the other way round.
    close(loss, [[-1.2, -0.5, -1.0], [1.5, 0.8, 0.0]])
    close(stats["clip_fraction"], [[1, 0, 0], [0, 1, 0]])
    gradient = gradient_of(PolicyLoss(), logprobs, batch)
    close(gradient, [[0.0, -0.5, -1.0], [1.5, 0.0, 0.0]])  # -ratio * A where not cut


def test_bounds_may_differ_or_be_absent():
    logprobs, batch = ratios([[1.5, 0.5]], [[1, -1]])
    close(call(PolicyLoss(clip_low=0.1, clip_high=0.28), logprobs, None, batch)[0], [[-1.28, 0.9]])
    loss, stats = call(PolicyLoss(clip_low=None, clip_high=None), logprobs, None, batch)
    close(loss, [[-1.5, 0.5]])
    close(stats["clip_fraction"], [[0, 0]])
    close(call(PolicyLoss(clip_low=None), logprobs, None, batch)[0], [[-1.2, 0.5]])


def test_dual_clip_bounds_the_loss_of_bad_tokens_only():
    logprobs, batch = ratios([[5.0, 2.0, 5.0]], [[-1, -1, 1]])
    loss, stats = call(PolicyLoss(dual_clip=3.0), logprobs, None, batch)
    close(loss, [[3.0, 2.0, -1.2]])
    close(stats["dual_clip_fraction"], [[1, 0, 0]])
    gradient = gradient_of(PolicyLoss(dual_clip=3.0), logprobs, batch)
    close(gradient, [[0.0, 2.0, 0.0]])


def test_reinforce_needs_no_old_policy():
    loss_function = PolicyLoss(ratio="none")
    batch = {"advantages": np.array([[2.0, -1.0]]), "response_mask": np.ones((1, 2), bool)}
    loss, stats = call(loss_function, np.array([[-0.5, -3.0]]), None, batch)
    close(loss, [[1.0, -3.0]])
    assert stats == {}
    assert loss_function.needs == ("response_mask", "advantages")


def test_at_ratio_one_ppo_has_the_gradient_of_reinforce():
    logprobs, batch = ratios(np.ones((2, 3)), np.random.default_rng(0).normal(size=(2, 3)))
    for ratio in ("token", "sequence_token", "none"):
        loss = PolicyLoss(ratio=ratio, clip_low=None, clip_high=None)
        gradient = gradient_of(loss, logprobs, batch)
        close(gradient, -batch["advantages"])


def test_approx_kl_is_k3_of_the_old_policy():
    logprobs, batch = ratios([[2.0, 0.5]], [[1, 1]])
    stats = call(PolicyLoss(), logprobs, None, batch)[1]
    close(stats["approx_kl"], [[1 - np.log(2), -0.5 + np.log(2)]])  # ratio - 1 - log ratio


def test_kl_and_entropy_are_added_to_each_token():
    logprobs, batch = ratios([[1.0, 1.0]], [[0, 0]])
    batch["ref_logprobs"] = np.asarray(logprobs) - np.log(2)  # half the policy's probability
    loss_function = PolicyLoss(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01)
    loss, stats = call(loss_function, logprobs, np.array([[3.0, 5.0]]), batch)
    k2 = np.log(2) ** 2 / 2
    close(loss, [[0.1 * k2 - 0.03, 0.1 * k2 - 0.05]])
    close(stats["kl"], [[k2, k2]])
    close(stats["entropy"], [[3.0, 5.0]])
    assert loss_function.needs == ("response_mask", "advantages", "old_logprobs", "ref_logprobs")
    assert loss_function.needs_entropy


def test_entropy_without_a_bonus_is_a_statistic_only():
    logprobs, batch = ratios([[1.0]], [[1]])
    loss, stats = call(PolicyLoss(), logprobs, np.array([[3.0]]), batch)
    close(loss, [[-1.0]])
    close(stats["entropy"], [[3.0]])
    assert not PolicyLoss().needs_entropy


def test_a_missing_entropy_is_named():
    logprobs, batch = ratios([[1.0]], [[1]])
    with pytest.raises(ConfigError, match="entropy_coef=0.01 needs the entropy"):
        call(PolicyLoss(entropy_coef=0.01), logprobs, None, batch)


@pytest.mark.parametrize("options", [{}, {"ratio": "sequence"}, {"dual_clip": 3.0}])
def test_an_exploded_ratio_stays_finite(options):
    batch = {"advantages": np.array([[-1.0, 1.0]]), "response_mask": np.ones((1, 2), bool)}
    batch["old_logprobs"] = np.full((1, 2), -300.0)

    def total(x):
        return jnp.sum(PolicyLoss(**options)(x, None, batch)[0])

    loss, gradient = jax.jit(jax.value_and_grad(total))(np.zeros((1, 2), np.float32))
    assert np.isfinite(loss) and np.isfinite(gradient).all()


# --- whole losses against torch


def test_ppo_equals_torch():
    batch = random_batch()
    logprobs = np.where(batch["response_mask"], batch["old_logprobs"] + 0.3 * batch["x"], 0.0)
    mask, advantages = torch.tensor(batch["response_mask"]), torch.tensor(batch["advantages"])
    policy = torch.tensor(logprobs, requires_grad=True)
    ratio = (policy - torch.tensor(batch["old_logprobs"])).exp()
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    expected = -surrogate[mask].mean()
    expected.backward()
    loss = PolicyLoss(clip_high=0.28)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: total_loss(loss, x, batch)))(logprobs)
    close(value, expected.item())
    close(gradient, policy.grad.numpy())


def test_the_sequence_ratio_gives_gspo():
    batch = random_batch()
    rows = batch["advantages"][:, :1]
    batch["advantages"] = np.broadcast_to(rows, batch["advantages"].shape)
    logprobs = np.where(batch["response_mask"], batch["old_logprobs"] + 0.3 * batch["x"], 0.0)
    # The paper's form: one ratio per sequence, the mean over non-empty sequences.
    policy = torch.tensor(logprobs, requires_grad=True)
    lengths = torch.tensor(batch["response_mask"].sum(1))
    log_ratio = (policy - torch.tensor(batch["old_logprobs"])) * torch.tensor(
        batch["response_mask"]
    )
    log_ratio = log_ratio.sum(1) / lengths.clamp(min=1)
    ratio, advantages = log_ratio.exp(), torch.tensor(rows[:, 0])
    surrogate = torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)
    expected = -surrogate[lengths > 0].mean()
    expected.backward()
    loss = PolicyLoss(ratio="sequence", clip_low=0.1, clip_high=0.1, aggregation="sequence")
    value, gradient = jax.jit(jax.value_and_grad(lambda x: total_loss(loss, x, batch)))(logprobs)
    close(value, expected.item())
    close(gradient, policy.grad.numpy())


def total_loss(loss, logprobs, batch):
    return jnp.sum(loss.weights(batch) * loss(logprobs, None, batch)[0])


# --- linearity: the whole step's loss, whatever the micro-batches

STEP_LOSSES = [
    PolicyLoss(),
    PolicyLoss(aggregation="sequence", kl_coef=0.04, entropy_coef=0.01, dual_clip=3.0),
    PolicyLoss(aggregation="constant", max_length=7, kl_coef=0.1, kl_estimator="k3+"),
    PolicyLoss(ratio="sequence", aggregation="sequence"),
    PolicyLoss(ratio="none"),
    ValueLoss(),
    ValueLoss(clip=None, aggregation="sequence"),
    SupervisedLoss(),
]


def parts(loss, theta, batch, weights):
    """Weighted loss and clip-fraction of some rows, from a two-parameter 'model'."""
    output = theta[0] * batch["x"] + theta[1]
    if isinstance(loss, ValueLoss):
        token_loss, stats = loss(output, batch)
    else:
        logprobs = -jax.nn.softplus(output)
        token_loss, stats = loss(logprobs, jnp.exp(logprobs), batch)
    return jnp.sum(weights * token_loss), stats


@pytest.mark.parametrize("loss", STEP_LOSSES, ids=lambda loss: type(loss).__name__)
def test_micro_batches_sum_to_the_loss_and_gradient_of_the_step(loss):
    batch, theta = random_batch(), np.array([0.7, 0.4], np.float32)
    batch["row_mask"] = np.arange(8) != 4
    weights = np.asarray(jax.jit(loss.weights)(batch))
    stat_weights = np.asarray(jax.jit(loss.stat_weights)(batch))
    step = jax.jit(jax.value_and_grad(functools.partial(parts, loss), has_aux=True))
    (whole, stats), gradient = step(theta, batch, weights)

    micro_loss, micro_gradient, micro_stats = 0.0, np.zeros(2), dict.fromkeys(stats, 0.0)
    for rows in (slice(0, 1), slice(1, 4), slice(4, 8)):
        piece = {key: value[rows] for key, value in batch.items()}
        (value, piece_stats), grad = step(theta, piece, weights[rows])
        micro_loss, micro_gradient = micro_loss + value, micro_gradient + grad
        for key in stats:
            micro_stats[key] += np.sum(stat_weights[rows] * np.asarray(piece_stats[key]))

    close(micro_loss, whole)
    close(micro_gradient, gradient)
    for key in stats:
        scored = batch["response_mask"] & batch["row_mask"][:, None]
        close(micro_stats[key], np.asarray(stats[key])[scored].mean())


def test_a_mean_per_micro_batch_would_differ():
    batch, theta, loss = random_batch(), np.array([0.7, 0.4], np.float32), PolicyLoss()
    whole, _ = parts(loss, theta, batch, loss.weights(batch))
    pieces = [
        {key: value[rows] for key, value in batch.items()} for rows in np.split(np.arange(8), 2)
    ]
    mean_of_means = np.mean([parts(loss, theta, piece, loss.weights(piece))[0] for piece in pieces])
    assert abs(mean_of_means - whole) > 1e-3


@pytest.mark.parametrize("loss", STEP_LOSSES, ids=lambda loss: type(loss).__name__)
def test_padding_has_no_influence(loss):
    batch = random_batch()
    mask, garbage = batch["response_mask"], np.where(batch["x"] > 0, NAN, -np.inf)
    dirty = {key: np.where(mask, value, garbage) for key, value in batch.items()}
    dirty["response_mask"] = mask

    def total(output, batch):
        if isinstance(loss, ValueLoss):
            token_loss, stats = loss(output, batch)
        else:
            token_loss, stats = loss(output, -output, batch)
        return jnp.sum(loss.weights(batch) * token_loss), (token_loss, stats)

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    output = np.where(mask, batch["old_logprobs"] - 0.1, 0.0)
    clean = step(output, batch)
    soiled = step(np.where(mask, output, garbage), dirty)
    jax.tree.map(np.testing.assert_array_equal, clean, soiled)


@pytest.mark.parametrize("loss", STEP_LOSSES, ids=lambda loss: type(loss).__name__)
def test_the_call_reads_what_it_needs_and_travels(loss):
    loss = pickle.loads(pickle.dumps(loss))
    batch = random_batch()
    batch = {key: batch[key] for key in loss.needs}
    arguments = () if isinstance(loss, ValueLoss) else (np.zeros((8, 5)),)
    token_loss, stats = jax.jit(loss)(np.zeros((8, 5)), *arguments, batch)
    for array in (token_loss, *stats.values()):
        assert array.shape == (8, 5) and array.dtype == jnp.float32


def test_an_adaptive_coefficient_is_read_from_the_batch_by_hand():
    # The policy gives the token 1/2, the reference 1/4: k3 is e^-log2 - 1 + log 2 = .193147. With
    # ratio 1 and advantage 1 the loss is -1 + beta * .193147, and its gradient along the
    # log-prob -1 + beta * (1 - e^-log2) = -1 + beta / 2.
    loss = PolicyLoss(kl_coef=0.05, kl_adaptive=True, kl_estimator="k3")
    assert "kl_coef" in loss.needs and loss.scalars == ("kl_coef",)
    logprobs = np.log(np.float32([[0.5]]))
    batch = {
        "old_logprobs": logprobs,
        "ref_logprobs": np.log(np.float32([[0.25]])),
        "advantages": np.ones((1, 1), np.float32),
        "response_mask": np.ones((1, 1), bool),
    }
    for beta in (0.05, 0.4):
        batch["kl_coef"] = np.float32(beta)
        close(call(loss, logprobs, None, batch)[0], [[-1 + beta * (np.log(2) - 0.5)]])
        close(gradient_of(loss, logprobs, batch), [[-1 + beta / 2]])
    fixed = PolicyLoss(kl_coef=0.4, kl_estimator="k3")
    np.testing.assert_array_equal(
        call(loss, logprobs, None, batch)[0], call(fixed, logprobs, None, batch)[0]
    )


# --- refusals


@pytest.mark.parametrize(
    "key, shape",
    [("advantages", (8,)), ("old_logprobs", (8, 4)), ("ref_logprobs", (5,)), ("kl_coef", (8,))],
)
def test_shapes_that_do_not_belong_together_are_refused_when_traced(key, shape):
    loss = PolicyLoss(kl_coef=0.1, kl_adaptive=True)
    batch = random_batch() | {"kl_coef": np.float32(0.1)}
    call(loss, np.zeros((8, 5)), None, batch)
    with pytest.raises(AssertionError, match="shape"):
        call(loss, np.zeros((8, 5)), None, batch | {key: np.ones(shape, np.float32)})


def test_a_value_loss_refuses_one_return_per_row():
    batch = {"returns": np.ones(3), "values": np.ones((3, 3)), "response_mask": np.ones((3, 3))}
    with pytest.raises(AssertionError, match="shape"):
        call(ValueLoss(), np.zeros((3, 3)), batch)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ratio": "cispo"}, "ratio='cispo' is not built: use token, sequence,"),
        ({"aggregation": "batch"}, "aggregation='batch' is not built: use token, seq"),
        ({"aggregation": "constant"}, "divides by max_length=None: set it"),
        ({"max_length": 8}, "max_length=8 has no effect with aggregation='token'"),
        ({"clip_low": 1.5}, "clip_low=1.5 must lie in 0 to 1"),
        ({"clip_high": -0.1}, "clip_high=-0.1 must be 0 or more"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        ({"ratio": "none", "dual_clip": 3.0}, "dual_clip=3.0 has no effect with ratio='none'"),
        ({"ratio": "none", "clip_high": 0.28}, "clip_high=0.28 has no effect with ratio='none'"),
        ({"kl_coef": -1.0}, "kl_coef=-1.0 must be 0 or more"),
        ({"kl_coef": "adaptive"}, "batch entry kl_coef, with kl_adaptive=True"),
        ({"kl_adaptive": True}, "kl_adaptive=True needs a first kl_coef above 0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "has no effect as a loss"),
        ({"kl_estimator": "k9"}, "KL estimator 'k9' is unknown"),
    ],
)
def test_impossible_switches_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        PolicyLoss(**options)


def test_a_value_clip_of_zero_is_refused():
    with pytest.raises(ConfigError, match="value clip=0.0 must be above 0"):
        ValueLoss(clip=0.0)


# --- values and demonstrations


def test_value_loss_by_hand():
    batch = {
        "values": np.array([[0.0, 0.0, 0.0]]),
        "returns": np.array([[1.0, 1.0, -1.0]]),
        "response_mask": np.ones((1, 3), bool),
    }
    values = np.array([[0.5, 0.1, 0.5]])
    loss, stats = call(ValueLoss(clip=0.2), values, batch)
    # 0.5 is cut to 0.2, error .8^2 > .5^2 (cut, gradient 0); .1 is within; towards the wrong
    # side the unclipped error 1.5^2 > 1.2^2 counts
    close(loss, [[0.32, 0.405, 1.125]])
    close(stats["clip_fraction"], [[1, 0, 0]])
    gradient = gradient_of(ValueLoss(clip=0.2), values, batch)
    close(gradient, [[0.0, -0.9, 1.5]])
    close(call(ValueLoss(clip=None), values, batch)[0], [[0.125, 0.405, 1.125]])


def test_a_cost_critic_reads_its_own_keys():
    loss = ValueLoss(values_key="cost_values", returns_key="cost_returns")
    assert loss.needs == ("response_mask", "cost_returns", "cost_values")
    batch = {"cost_values": np.zeros((1, 1)), "cost_returns": np.ones((1, 1))}
    close(loss(np.zeros((1, 1)), {**batch, "response_mask": np.ones((1, 1))})[0], [[0.5]])


def test_supervised_loss_equals_optax_cross_entropy():
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(3, 5, 7)), draw.integers(0, 7, size=(3, 5))
    mask = np.arange(5) < np.array([[5], [2], [0]])
    nll = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), jnp.asarray(labels))
    expected = np.asarray(nll)[mask].mean()
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    close(total_loss(SupervisedLoss(), logprobs, {"response_mask": mask}), expected)


def test_explained_variance_by_hand():
    returns, mask = np.array([[0.0, 2.0, 4.0, NAN]]), np.array([[1, 1, 1, 0]])
    close(explained_variance(returns, returns, mask), 1.0)
    close(explained_variance(np.full((1, 4), 7.0), returns, mask), 0.0)
    # residuals 0, 1, 2: variance 1 of 4
    close(explained_variance(returns / 2, returns, mask), 0.75)


@pytest.mark.parametrize("mask", [np.ones((1, 3)), np.zeros((1, 3)), np.array([[1, 0, 0]])])
def test_explained_variance_of_constant_returns_is_zero(mask):
    assert explained_variance(np.array([[1.0, 2.0, 3.0]]), np.full((1, 3), 5.0), mask) == 0.0


def test_rounding_is_no_clipping_of_values():
    rng = np.random.default_rng(0)
    old = rng.normal(size=(64, 64)).astype(np.float32)
    moved = rng.uniform(-0.19, 0.19, size=old.shape).astype(np.float32)
    returns = rng.normal(size=old.shape).astype(np.float32)
    batch = {"response_mask": np.ones(old.shape, bool), "values": old, "returns": returns}
    _, stats = ValueLoss(clip=0.2)(old + moved, batch)
    assert float(stats["clip_fraction"].sum()) == 0
    # Where the values' own move is cut, and the cut one is further off, it is.
    _, stats = ValueLoss(clip=0.2)(old + 0.5, batch | {"returns": old + 0.5})
    assert float(stats["clip_fraction"].min()) == 1
