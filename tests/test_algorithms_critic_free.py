"""The critic-free methods against loops written from their papers, and groups drawn anew."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ONE_DEVICE, tiny_config, trainer_of

import hjax
from hjax.algorithms import ALGORITHMS, advantages
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.algorithms.resampling import concatenate_batches
from hjax.controller import ResourcePool, WorkerGroup, join
from hjax.errors import ConfigError, RunError
from hjax.run.dataflow import absent_roles, step_calls

SAMPLES, GROUPS, LENGTH, LIMIT = 4, 3, 5, 5
ROWS = SAMPLES * GROUPS
BETA = 0.05


def batch_of(seed=0):
    """Ragged responses of three groups; the second's rewards are all equal."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, LENGTH + 1, ROWS)
    mask = np.arange(LENGTH) < lengths[:, None]
    rewards = rng.integers(0, 4, ROWS).astype(np.float32)
    rewards[SAMPLES : 2 * SAMPLES] = 2.0
    old = np.where(mask, -rng.uniform(0.2, 2.0, mask.shape), 0.0).astype(np.float32)
    reference = np.where(mask, old + rng.normal(0, 0.3, mask.shape), 0.0).astype(np.float32)
    return {
        "response_mask": mask,
        "rewards": rewards,
        "logprobs": old,
        "ref_logprobs": reference,
        "truncated": lengths == LENGTH,
    }


def moved(batch, seed=1):
    """Log-probs of a policy that has learned a little."""
    noise = np.random.default_rng(seed).normal(0, 0.4, batch["logprobs"].shape)
    return np.where(batch["response_mask"], batch["logprobs"] + noise, 0.0)


# Each method as its paper or code writes it: advantages [rows, tokens] and the loss of a step.


def groups_of(rewards):
    return rewards.astype(np.float64).reshape(GROUPS, SAMPLES)


def spread(per_row, mask):
    return np.where(mask, np.asarray(per_row).reshape(-1)[:, None], 0.0)


def grpo_rows(rewards):
    groups = groups_of(rewards)
    std = groups.std(axis=1, ddof=1, keepdims=True)
    return np.where(std > 0, (groups - groups.mean(axis=1, keepdims=True)) / (std + 1e-6), 0.0)


def centred_rows(rewards):
    groups = groups_of(rewards)
    return groups - groups.mean(axis=1, keepdims=True)


def others_rows(rewards):
    groups = groups_of(rewards)
    made = np.zeros_like(groups)
    for g in range(GROUPS):
        for i in range(SAMPLES):
            made[g, i] = groups[g, i] - np.mean([groups[g, j] for j in range(SAMPLES) if j != i])
    return made


def whitened(x, mask):
    chosen = x[mask]
    return np.where(mask, (x - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8), 0.0)


def k1(batch):
    return np.where(batch["response_mask"], batch["logprobs"] - batch["ref_logprobs"], 0.0)


def to_go(per_token):
    return np.cumsum(per_token[:, ::-1], axis=1)[:, ::-1]


def opo_rows(batch):
    groups, lengths = groups_of(batch["rewards"]), batch["response_mask"].sum(1)
    lengths = lengths.reshape(GROUPS, SAMPLES)
    return groups - (groups * lengths).sum(1, keepdims=True) / lengths.sum(1, keepdims=True)


def max_rl_rows(rewards):
    groups = groups_of(rewards)
    return (groups - groups.mean(axis=1, keepdims=True)) / groups.mean(axis=1, keepdims=True)


def reinforce_tokens(batch):
    mask, rewards = batch["response_mask"], batch["rewards"]
    last = mask & (np.cumsum(mask, axis=1) == mask.sum(1, keepdims=True))
    return np.where(mask, to_go(-BETA * k1(batch) + last * rewards[:, None]), 0.0)


def rloo_rows(batch):
    return others_rows(batch["rewards"] - BETA * k1(batch).sum(axis=1))


EXPECTED_ADVANTAGES = {
    "GRPO": lambda b: spread(grpo_rows(b["rewards"]), b["response_mask"]),
    "DrGRPO": lambda b: spread(centred_rows(b["rewards"]), b["response_mask"]),
    "GSPO": lambda b: spread(grpo_rows(b["rewards"]), b["response_mask"]),
    "GSPOToken": lambda b: spread(grpo_rows(b["rewards"]), b["response_mask"]),
    "CISPO": lambda b: spread(grpo_rows(b["rewards"]), b["response_mask"]),
    "SAPO": lambda b: spread(grpo_rows(b["rewards"]), b["response_mask"]),
    "RLOO": lambda b: spread(rloo_rows(b), b["response_mask"]),
    "Reinforce": reinforce_tokens,
    "ReinforcePlusPlus": lambda b: whitened(reinforce_tokens(b), b["response_mask"]),
    "ReinforcePlusPlusBaseline": lambda b: whitened(
        spread(centred_rows(b["rewards"]), b["response_mask"]), b["response_mask"]
    ),
    "OPO": lambda b: spread(opo_rows(b), b["response_mask"]),
    # Two of three groups differ.
    "GPG": lambda b: spread(centred_rows(b["rewards"]) * 3 / 2, b["response_mask"]),
    "MaxRL": lambda b: spread(max_rl_rows(b["rewards"]), b["response_mask"]),
}


def ratio_of(x, batch):
    return jnp.exp(x - batch["logprobs"])


def mean_ratio(x, batch):
    mask = batch["response_mask"]
    return jnp.exp((x - batch["logprobs"]).sum(1, keepdims=True) / mask.sum(1, keepdims=True))


def clip(ratio, a, low, high):
    return -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - low, 1 + high) * a)


def by_token(x, mask, rows=None):
    kept = mask if rows is None else mask & rows[:, None]
    return jnp.where(kept, x, 0.0).sum() / kept.sum()


def by_sequence(x, mask):
    return (jnp.where(mask, x, 0.0).sum(1) / mask.sum(1)).mean()


def kl3(x, batch):
    d = batch["ref_logprobs"] - x
    return jnp.exp(d) - 1 - d


def differ(batch):
    groups = groups_of(batch["rewards"])
    return np.repeat(groups.max(1) > groups.min(1), SAMPLES)


EXPECTED_LOSS = {
    "GRPO": lambda x, a, b, m: by_sequence(
        clip(ratio_of(x, b), a, 0.2, 0.2) + BETA * kl3(x, b), m
    ),
    "DrGRPO": lambda x, a, b, m: (
        jnp.where(m, clip(ratio_of(x, b), a, 0.2, 0.2), 0.0).sum() / (ROWS * LIMIT)
    ),
    "GSPO": lambda x, a, b, m: clip(mean_ratio(x, b)[:, 0], a[:, 0], 3e-4, 4e-4).mean(),
    "GSPOToken": lambda x, a, b, m: by_sequence(
        clip(
            jax.lax.stop_gradient(mean_ratio(x, b)) * jnp.exp(x - jax.lax.stop_gradient(x)),
            a, 3e-4, 4e-4,
        ),
        m,
    ),
    "CISPO": lambda x, a, b, m: by_token(
        -jax.lax.stop_gradient(jnp.minimum(ratio_of(x, b), 5.0)) * a * x, m
    ),
    "SAPO": lambda x, a, b, m: by_sequence(
        jnp.where(
            a > 0,
            -4.0 / (1 + jnp.exp(-(ratio_of(x, b) - 1))) * a,
            -4.0 / 1.05 / (1 + jnp.exp(-1.05 * (ratio_of(x, b) - 1))) * a,
        ),
        m,
    ),
    "RLOO": lambda x, a, b, m: -(a[:, 0] * jnp.where(m, x, 0.0).sum(1)).mean(),
    "Reinforce": lambda x, a, b, m: by_token(-a * x, m),
    "ReinforcePlusPlus": lambda x, a, b, m: by_token(clip(ratio_of(x, b), a, 0.2, 0.2), m),
    "ReinforcePlusPlusBaseline": lambda x, a, b, m: by_token(
        clip(ratio_of(x, b), a, 0.2, 0.2) + BETA * 0.5 * (x - b["ref_logprobs"]) ** 2, m
    ),
    "OPO": lambda x, a, b, m: by_token(-a * x, m),
    "GPG": lambda x, a, b, m: by_token(-a * x, m, differ(b)),
    "MaxRL": lambda x, a, b, m: by_token(clip(ratio_of(x, b), a, 0.2, 0.2), m),
}  # fmt: skip


def algorithm_of(name, **config):
    made = ALGORITHMS[name].default_config()
    made.unlock()
    made.update({"kl_coef": BETA if made.kl_coef else 0.0} | config)
    ALGORITHMS[name].check(made)
    groups = dict.fromkeys(("actor", "reference", "reward"))
    return ALGORITHMS[name](
        made, groups, samples=SAMPLES, max_response_length=LIMIT, more_prompts=lambda first: {}
    )


@pytest.mark.parametrize("name", EXPECTED_ADVANTAGES)
def test_a_method_has_the_advantages_loss_and_gradient_of_its_paper(name):
    algorithm, batch = algorithm_of(name), batch_of()
    mask = batch["response_mask"]
    learned = algorithm.compute_advantages(batch)
    expected = EXPECTED_ADVANTAGES[name](batch)
    np.testing.assert_allclose(learned["advantages"], expected, rtol=2e-5, atol=2e-5)

    loss = algorithm.losses(algorithm.config, LIMIT)["actor"]
    x = moved(batch).astype(np.float32)

    def total(x):
        return jnp.sum(loss.weights(learned) * loss(x, None, learned)[0])

    def by_hand(x):
        return EXPECTED_LOSS[name](x, jnp.asarray(expected, jnp.float32), batch, mask)

    value, gradient = jax.jit(jax.value_and_grad(total))(x)
    wanted, slope = jax.jit(jax.value_and_grad(by_hand))(x)
    np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(np.where(mask, gradient, 0), np.where(mask, slope, 0), atol=2e-5)


def test_dapo_is_grpo_with_another_clip_aggregation_and_length():
    algorithm, batch = algorithm_of("DAPO"), batch_of()
    # A fifth of five tokens: whoever has all five loses a whole reward.
    full = batch["response_mask"].sum(1) == LENGTH
    # Answers that are all right, or all wrong, say nothing, though some of them are longer.
    long = groups_of(full)
    some = int(np.flatnonzero(long.any(1) & ~long.all(1))[0])
    batch["rewards"][some * SAMPLES : (some + 1) * SAMPLES] = 1
    learned = algorithm.compute_advantages(batch)
    rows = grpo_rows(batch["rewards"] - full)
    np.testing.assert_allclose(
        learned["advantages"], spread(rows, batch["response_mask"]), atol=2e-5
    )
    given = groups_of(batch["rewards"])
    says = np.repeat(given.max(1) > given.min(1), SAMPLES)
    assert learned["row_mask"].tolist() == says.tolist() and not says.all()
    loss = algorithm.losses(algorithm.config, LIMIT)["actor"]
    assert (loss.clip_low, loss.clip_high, loss.aggregation) == (0.2, 0.28, "token")
    assert not loss.kl_coef


@pytest.mark.parametrize(
    "lengths, limit, buffer, expected",
    [([10, 12, 16, 20, 30], 20, 8, [0, 0, -0.5, -1, -1]), ([1, 2], 2, 0.5, [0, -1])],
)
def test_the_overlong_penalty_by_hand(lengths, limit, buffer, expected):
    made = advantages.overlong_penalty(np.array(lengths), limit, buffer)
    np.testing.assert_allclose(made, expected)


def test_lambdas_of_vapo_by_hand():
    # 1 - 1 / (.05 * 100) = .8; 200 tokens: .9; up to 20 tokens: 0.
    made = advantages.length_adaptive_lambda(np.array([20, 100, 200]), 0.05)
    np.testing.assert_allclose(made, [0.0, 0.8, 0.9], rtol=1e-6)


def test_vapo_learns_values_of_whole_returns_and_right_answers_by_likelihood():
    config = ALGORITHMS["VAPO"].default_config()
    groups = dict.fromkeys(("actor", "critic", "reference", "reward"))
    algorithm = ALGORITHMS["VAPO"](config, groups, samples=1)
    mask = np.ones((2, 2), bool)
    batch = {
        "response_mask": mask,
        "rewards": np.array([1.0, 0.0], np.float32),
        "values": np.array([[0.25, 0.5], [0.5, 0.25]], np.float32),
        "logprobs": np.full((2, 2), -1.0, np.float32),
        "truncated": np.zeros(2, bool),
    }
    learned = algorithm.compute_advantages(batch)
    # Lambda 1: what follows. Two tokens have lambda 0, so one step each: .5 - .25, 1 - .5 and
    # .25 - .5, 0 - .25, whitened (mean 1/16, variance .15104 of n - 1).
    np.testing.assert_allclose(learned["returns"], [[1, 1], [0, 0]], atol=1e-6)
    plain = np.array([[0.25, 0.5], [-0.25, -0.25]])
    np.testing.assert_allclose(learned["advantages"], whitened(plain, mask), rtol=1e-5)
    loss = algorithm.losses(config, 2)["actor"]
    given = learned | loss.prepared(learned)
    total = jnp.sum(loss.weights(given) * loss(batch["logprobs"], None, given)[0])
    # On-policy the clipped part is minus the mean advantage, 0; the right answer's log-probs are
    # -1 each, weighed by .1.
    np.testing.assert_allclose(total, 0.1, rtol=1e-5)


def test_likelihood_of_right_answers_is_that_of_the_step_in_micro_batches():
    rng = np.random.default_rng(3)
    batch = batch_of() | {"advantages": rng.normal(size=(ROWS, LENGTH)).astype(np.float32)}
    batch["old_logprobs"] = batch["logprobs"]
    right = (batch["rewards"] > 2)[:, None] & batch["response_mask"]
    batch["positive"] = right.astype(np.float32)
    loss, plain = (
        PolicyLoss(positive_nll=0.3, aggregation="sequence"),
        PolicyLoss(aggregation="sequence"),
    )
    x = moved(batch).astype(np.float32)
    made = batch | {"weights": loss.weights(batch)} | loss.prepared(batch)
    total = 0.0
    for rows in np.split(np.arange(ROWS), 3):
        part = {key: np.asarray(value)[rows] for key, value in made.items()}
        total += float(jnp.sum(part["weights"] * loss(x[rows], None, part)[0]))
    without = float(jnp.sum(plain.weights(batch) * plain(x, None, batch)[0]))
    np.testing.assert_allclose(total - without, -0.3 * x[right].mean(), rtol=1e-4)


def test_dppo_masks_by_the_change_of_probability():
    old = np.log(np.array([[0.5, 0.5, 0.5, 0.5]], np.float32))
    new = np.log(np.array([[0.8, 0.6, 0.2, 0.4]], np.float32))
    batch = {
        "response_mask": np.ones((1, 4), bool),
        "old_logprobs": old,
        "advantages": np.array([[1.0, 1.0, -2.0, -2.0]], np.float32),
    }
    loss = PolicyLoss(surrogate="dppo", clip_low=0.2, clip_high=0.2, ratio_cap=1.1)
    value, stats = loss(new, None, batch)
    # Rises by .3 (too far) and .1; falls by .3 (too far) and .1. Ratios 1.2, cut to 1.1, and .8.
    expected = [[0.0, -1.1 * math.log(0.6), 0.0, 2 * 0.8 * math.log(0.4)]]
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert stats["clip_fraction"].tolist() == [[1, 0, 1, 0]]


CORRECTED = {
    # Weights 1.5, 4 and .5: by their sources' bounds, then by others.
    "icepop": ({}, [1.5, 4.0, 0.5], [0, 0, 0]),
    "icepop, narrow": ({"correction_low": 0.6, "correction_cap": 2.0}, [1.5, 0, 0], [0, 1, 1]),
    # The geometric mean of 1.5 * 4 * .5 = 3 over three tokens is 1.442.
    "sequence_mask": ({}, [0, 0, 0], [1, 1, 1]),
    "sequence_mask, wide": ({"correction_cap": 1.5}, [1.5, 4.0, 0.5], [0, 0, 0]),
    # TRL's: the product itself is the weight of every token, up to its bound of 3.
    "sequence_sum_mask": ({"correction_cap": 3.1}, [3.0, 3.0, 3.0], [0, 0, 0]),
    "sequence_sum_mask, narrow": ({"correction_cap": 2.9}, [0, 0, 0], [1, 1, 1]),
    # OpenRLHF's: bounds from both sides.
    "truncated, low": ({"correction_low": 0.6}, [1.5, 2.0, 0.6], [0, 1, 1]),
}


def test_verls_gpg_counts_responses_whose_reward_is_not_zero():
    """`compute_gpg_outcome_advantage` of verl: rows over rows with a reward that is not 0."""
    batch = batch_of()
    scored = int((batch["rewards"] != 0).sum())
    assert 0 < scored < len(batch["rewards"])
    found = algorithm_of("GPG", rescale="rewarded").compute_advantages(batch)["advantages"]
    scale = len(batch["rewards"]) / scored
    expected = spread(centred_rows(batch["rewards"]) * scale, batch["response_mask"])
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", CORRECTED)
def test_corrections_by_hand(case):
    options, weights, cut = CORRECTED[case]
    old = np.array([[-1.0, -1.0, -1.0, np.nan]], np.float32)
    batch = {
        "response_mask": np.array([[True, True, True, False]]),
        "old_logprobs": old,
        "logprobs": old - np.log(np.array([[1.5, 4.0, 0.5, 1.0]], np.float32)),
        "advantages": np.array([[1.0, -1.0, 2.0, np.nan]], np.float32),
    }
    loss = PolicyLoss(correction=case.split(",")[0], **options)
    value, stats = loss(old, None, batch)
    expected = -np.array(weights) * [1.0, -1.0, 2.0]
    np.testing.assert_allclose(value, [[*expected, 0.0]], rtol=1e-5, atol=1e-6)
    assert stats["correction_capped"].tolist() == [[*cut, 0]]


@pytest.mark.parametrize(
    "name, config, message",
    [
        ("GRPO", {"ratio": "none", "clip_high": 0.3}, "clip_high=0.3 has no effect with"),
        ("GRPO", {"surrogate": "cispo", "ratio": "sequence"}, "weighs each token by its own"),
        ("GRPO", {"surrogate": "sapo", "clip_low": 0.1}, "clip_low=0.1 has no effect with"),
        ("GRPO", {"tau_positive": 2.0}, "tau_positive=2.0 has no effect with surrogate='clip'"),
        ("CISPO", {"dual_clip": 3.0}, "dual_clip=3.0 has no effect with surrogate='cispo'"),
        ("GRPO", {"baseline": "none"}, "normalise='std' normalises by statistics of the group"),
        ("GRPO", {"whiten": True, "rescale": "groups"}, "rescale has no effect with"),
        ("PPO", {"whiten": False, "whiten_biased": True}, "whiten_biased has no effect without"),
        ("PPO", {"turn_gamma": 0.9}, "turn_gamma=0.9 has no effect with credit='token'"),
        ("PPO", {"credit": "turn", "lam": 0.5}, "lam=0.5 has no effect with credit='turn'"),
        ("GRPO", {"resample": 1}, "set config.algorithm.filter=True"),
        ("GRPO", {"correction": "icepop", "correction_low": 6.0}, "low=6.0 must be below"),
        ("GRPO", {"correction_cap": 3.0}, "cap=3.0 has no effect with correction='none'"),
    ],
)  # fmt: skip
def test_combinations_that_make_no_sense_are_refused(name, config, message):
    with pytest.raises(ConfigError, match=message):
        algorithm_of(name, **config)


def test_gdpo_normalises_each_reward_then_the_sum():
    algorithm, batch = algorithm_of("GDPO", weights=(1.0, 0.5)), batch_of()
    other = np.random.default_rng(5).uniform(size=ROWS).astype(np.float32)
    with pytest.raises(RunError, match="returns a dict of lists by name, or use GRPO"):
        algorithm.compute_advantages(batch)
    batch["named_rewards"] = {"a": batch["rewards"], "b": other}
    rows = (grpo_rows(batch["rewards"]) + 0.5 * grpo_rows(other)).reshape(-1)
    rows = (rows - rows.mean()) / (rows.std(ddof=1) + 1e-6)
    learned = algorithm.compute_advantages(batch)
    np.testing.assert_allclose(
        learned["advantages"], spread(rows, batch["response_mask"]), rtol=2e-4, atol=2e-5
    )
    # Equal sums of different rewards say something.
    batch |= {"rewards": np.ones(ROWS), "named_rewards": {"a": other, "b": 1 - other}}
    assert algorithm._groups_with_signal(batch).all()
    batch["named_rewards"].popitem()
    with pytest.raises(RunError, match=r"weights=\(1.0, 0.5\) for the rewards a: give one each"):
        algorithm.compute_advantages(batch)


WEIGHTS = {
    "in the function's order": (1.0, 0.0),
    "by name": ("format=0", "math=1"),
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=list(WEIGHTS))
def test_weights_are_of_the_names_also_where_these_are_not_sorted(weights):
    """One right row of eight: its advantage is 7 / 8 over the deviation, 0.35355, twice."""
    algorithm = algorithm_of("GDPO", weights=weights)
    batch = batch_of()
    right, form = np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32)
    right[0], form[0] = 1.0, 0.0
    travelled = join({"rewards": right + form, "named_rewards": {"math": right, "format": form}})
    assert list(travelled["named_rewards"]) == ["math", "format"]
    advantages = algorithm.compute_advantages(batch | travelled)["advantages"]
    assert advantages[0].max() > 2 and advantages[1:].max() < 0.5


@pytest.mark.parametrize("weights", [(1.0, "math=1"), ("math=1", "math=2"), ("x",), ("math=x",)])
def test_weights_of_no_form_are_refused(weights):
    with pytest.raises(ConfigError, match="must be numbers, or a number by each name"):
        algorithm_of("GDPO", weights=weights).check(algorithm_of("GDPO", weights=weights).config)


@pytest.mark.extended
@pytest.mark.extended
def test_a_run_weighs_its_rewards_in_the_functions_order(tmp_path):
    (tmp_path / "two.py").write_text(
        "def reward(prompts, responses, **columns):\n"
        "    long = [float(len(r)) for r in responses]\n"
        "    return {'z': long, 'a': [-x * x for x in long]}\n"
    )
    changes = {"reward.function": f"{tmp_path / 'two.py'}:reward", "steps": 1}
    with trainer_of("GDPO", changes | ONE_DEVICE | {"algorithm.weights": (1.0, 0.0)}) as trainer:
        trainer.step()
        batch, samples = trainer.batch, trainer.algorithm.samples
    assert list(batch["named_rewards"]) == ["z", "a"]
    # The same by the rewards' names, in a config that a run takes.
    config = tiny_config("GDPO", changes | {"algorithm.weights": {"a": 0.0, "z": 1.0}}).algorithm
    roles = dict.fromkeys(("actor", "reference", "reward"))
    named = ALGORITHMS["GDPO"](config, roles, samples=samples, max_response_length=4)
    for found in (batch, named.compute_advantages(batch)):
        groups = np.asarray(batch["named_rewards"]["z"]).reshape(-1, samples)
        rows = np.asarray(found["advantages"])[:, 0].reshape(groups.shape)
        # Longer is better by the first reward, and worse by the second.
        differ = groups.max(axis=1) > groups.min(axis=1)
        assert differ.any()
        for lengths, found in zip(groups[differ], rows[differ], strict=True):
            assert found[lengths.argmax()] > found[lengths.argmin()]


def test_rewards_by_token_are_what_returns_are_made_of():
    batch = batch_of()
    mask = batch["response_mask"]
    dense = np.where(mask, np.random.default_rng(7).normal(size=mask.shape), 0.0)
    # A whole response's penalty of 1 beside them stands at its last token.
    batch |= {"token_rewards": dense.astype(np.float32), "rewards": dense.sum(1) - 1}
    last = mask & (np.cumsum(mask, axis=1) == mask.sum(1, keepdims=True))
    per_token = np.where(mask, dense - last, 0.0)
    learned = algorithm_of("Reinforce", kl_coef=0.0).compute_advantages(batch)
    expected = np.where(mask, to_go(per_token), 0.0)
    np.testing.assert_allclose(learned["advantages"], expected, rtol=1e-4, atol=1e-5)
    # A group is compared by the responses' rewards.
    compared = algorithm_of("DrGRPO").compute_advantages(batch)
    rows = centred_rows(batch["rewards"])
    np.testing.assert_allclose(compared["advantages"], spread(rows, mask), rtol=1e-4, atol=1e-5)
    config = ALGORITHMS["PPO"].default_config()
    config.update({"lam": 1.0, "kl_coef": 0.0, "whiten": False})
    groups = dict.fromkeys(("actor", "critic", "reference", "reward"))
    batch["values"] = np.zeros(mask.shape, np.float32)
    learned = ALGORITHMS["PPO"](config, groups).compute_advantages(batch)
    np.testing.assert_allclose(learned["returns"], expected, rtol=1e-4, atol=1e-5)


# Groups drawn anew, on workers without a model


class Drawer(hjax.workers.Worker):
    """Answers prompt p with its number; a prompt's rewards differ where its number is odd."""

    def __init__(self, context):
        super().__init__(context)
        self.first = []

    @hjax.protocol("3D_PROTO")
    def generate_sequences(self, prompts):
        self.first.append(prompts.get("first", 0))
        numbers = np.repeat(prompts["prompts"][:, 0], SAMPLES)
        length = 2 + len(self.first)  # buckets differ from draw to draw
        mask = np.ones((len(numbers), length), bool)
        return {
            "responses": np.repeat(numbers[:, None], length, axis=1),
            "response_mask": mask,
            "logprobs": np.full(mask.shape, -1.0, np.float32),
            "truncated": np.zeros(len(numbers), bool),
            "prompt_id": numbers.astype(np.int64),
            "prompt_text": [str(n) for n in numbers],
            "columns": {"name": [f"p{n}" for n in numbers]},
        }

    @hjax.protocol("ALL_TO_ALL")
    def compute_reward(self, batch):
        numbers = np.asarray(batch["responses"])[:, 0]
        which = np.arange(len(numbers)) % SAMPLES
        rewards = np.where(numbers % 2, which, 1).astype(np.float32)
        return {"rewards": rewards, "reward_outcomes": {"ok": len(numbers)}}

    @hjax.protocol("3D_PROTO")
    def update_actor(self, batch, pretrain=None):
        return {"loss": np.float32(0), "grad_norm": np.float32(1)}


@contextlib.contextmanager
def drawing(resample, prompts=4):
    """DAPO over such workers, and the one that draws."""
    algorithm = ALGORITHMS["DAPO"]
    config = algorithm.default_config()
    config.update({"resample": resample, "overlong_buffer": 0.0})
    asked = iter(range(prompts, 100))

    def more(first):
        numbers = [next(asked) for _ in range(prompts)]
        return {"prompts": np.array(numbers)[:, None], "first": first}

    pool = ResourcePool("host")
    try:
        group = WorkerGroup(pool, Drawer, hjax.workers.WorkerContext("actor"), role="actor")
        groups = {"actor": group, "reward": group}
        made = algorithm(
            config,
            {**groups, **absent_roles(algorithm, groups)},
            samples=SAMPLES,
            max_response_length=8,
            more_prompts=more,
        )
        yield made, group.worker
    finally:
        pool.close()


@pytest.mark.parametrize(
    "resample, drawn, kept, numbers",
    [
        (0, None, None, [0, 1, 2, 3]),
        (1, 8, 4, [1, 3, 5, 7]),  # 0 to 3 have two, 4 to 7 the others
        (9, 8, 4, [1, 3, 5, 7]),  # no more than are needed
    ],
)
def test_groups_that_say_nothing_are_drawn_anew(resample, drawn, kept, numbers):
    with drawing(resample) as (algorithm, worker):
        batch = algorithm.step({"prompts": np.arange(4)[:, None]})
    assert batch["prompt_id"][::SAMPLES].tolist() == numbers
    assert batch["columns"]["name"][::SAMPLES] == [f"p{n}" for n in numbers]
    assert batch["prompt_text"] == [str(n) for n in batch["prompt_id"]]
    odd = batch["prompt_id"] % 2 == 1
    assert batch["row_mask"].tolist() == odd.tolist()
    metrics = algorithm.batch_metrics(batch)
    assert metrics.get("rollout/groups_drawn") == drawn
    assert metrics.get("rollout/groups_kept") == kept
    # Draws go on where the step's before have ended; what is longer is padded.
    assert worker.first == ([0] if not resample else [0, 16])
    if resample:
        assert batch["response_mask"].shape == (16, 4)
        assert batch["reward_outcomes"] == {"ok": 32}


def test_what_is_missing_is_filled_up_and_leaves_the_loss():
    with drawing(1, prompts=1) as (algorithm, _):
        batch = algorithm.step({"prompts": np.array([[0]])})
        # 0 and 1 were drawn, 1 says something; of 2 and 2 nothing does.
        assert batch["prompt_id"].tolist() == [1] * SAMPLES
        algorithm.more_prompts = lambda first: {"prompts": np.array([[4]]), "first": first}
        batch = algorithm.step({"prompts": np.array([[2]])})
    assert batch["prompt_id"].tolist() == [2] * SAMPLES
    assert not batch["row_mask"].any()


@pytest.mark.parametrize("name", [n for n, found in ALGORITHMS.items() if found.sequences])
def test_the_calls_of_a_step_are_read_off_without_workers(name):
    algorithm = ALGORITHMS[name]
    samples = {"SPIN": 1, "OnlineDPO": 2}.get(name, SAMPLES if algorithm.generates else 1)
    calls = step_calls(algorithm, algorithm.default_config(), 2, samples)
    made = [(call.role, call.method) for call in calls]
    sampled = [call for call in calls if call.phase == "generate" and not call.greedy]
    assert len(sampled) == algorithm.generates + (name == "METIS")  # judgements are drawn too
    scoring = algorithm.source == "steps" or name in ("RewardModel", "CostModel")
    assert ("actor", "update_scores" if scoring else "update_actor") in made
    compared = ("reference", "compute_ref_log_prob") in made
    assert compared == ("reference" in algorithm.needed_roles(algorithm.default_config()))


def test_batches_of_other_lengths_stand_in_one():
    one = {"responses": np.ones((1, 2), int), "text": ["a"], "columns": {"x": [1]}}
    two = {"responses": np.ones((1, 3), int), "text": ["b"], "columns": {"x": [2]}}
    made = concatenate_batches([one, two])
    assert made["responses"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert made["text"] == ["a", "b"] and made["columns"] == {"x": [1, 2]}
