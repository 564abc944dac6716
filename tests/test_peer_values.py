"""What TRL's and verl's functions give (tests/make_peer_values.py), and where names differ."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.algorithms import ALGORITHMS
from hjax.algorithms.advantages import (
    discounted_returns,
    gae,
    group_advantages,
    remax_advantages,
    whiten,
)
from hjax.algorithms.distillation import DistillationLoss
from hjax.algorithms.kl import kl_estimate
from hjax.algorithms.losses import ValueLoss
from hjax.algorithms.pair_loss import PairLoss
from hjax.algorithms.policy_loss import PolicyLoss
from hjax.algorithms.unpaired_loss import ImplicitRewardLoss, UnpairedLoss

STORED = json.loads((pathlib.Path(__file__).parent / "peer_values.json").read_text())
GIVEN = {name: np.array(x, np.float32) for name, x in STORED["inputs"].items()}
MASK = GIVEN["mask"] > 0
SAMPLES = 3
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def spread(rows):
    return np.where(MASK, np.asarray(rows)[:, None], 0.0)


def group(**switches):
    lengths = MASK.sum(axis=1)
    return spread(group_advantages(GIVEN["rewards"], SAMPLES, lengths=lengths, **switches))


def prime():
    config = ALGORITHMS["PRIME"].default_config()
    config.update({"beta": 0.5, "process_coef": 2.0, "outcome_coef": 3.0})  # no prompt is left out
    roles = dict.fromkeys(("actor", "reference", "reward", "process_reward"))
    batch = {
        "response_mask": MASK,
        "rewards": GIVEN["right"],
        "logprobs": GIVEN["old"],
        "ref_logprobs": GIVEN["reference"],
        "process_logprobs": GIVEN["new"],
    }
    algorithm = ALGORITHMS["PRIME"](config, roles, samples=SAMPLES)
    return algorithm.compute_advantages(algorithm.with_outcomes(batch))["advantages"]


ADVANTAGES = {
    "grpo": group,
    "dr_grpo": lambda: group(normalise="none"),
    "rloo": lambda: group(baseline="others", normalise="none"),
    "opo": lambda: group(baseline="length", normalise="none"),
    "gpg": lambda: group(normalise="none"),  # of rewards of which none is 0
    "reinforce_plus_plus": lambda: whiten(discounted_returns(GIVEN["dense"], MASK, 0.9), MASK),
    "reinforce_plus_plus_baseline": lambda: whiten(group(normalise="none"), MASK),
    "remax": lambda: remax_advantages(
        GIVEN["rewards"], GIVEN["baselines"], MASK, kl_cumulated=True
    ),
    "gae": lambda: whiten(gae(GIVEN["dense"], GIVEN["values"], MASK, 0.9, 0.8)[0], MASK),
    "gae_returns": lambda: gae(GIVEN["dense"], GIVEN["values"], MASK, 0.9, 0.8)[1],
    "prime": prime,
}


@pytest.mark.parametrize("name", STORED["verl"]["advantages"])
def test_advantages_are_verls(name):
    expected = np.where(MASK, STORED["verl"]["advantages"][name], 0.0)
    np.testing.assert_allclose(ADVANTAGES[name](), expected, rtol=1e-5, atol=1e-5)


BATCH = {
    "response_mask": MASK,
    "responses": np.arange(MASK.size).reshape(MASK.shape),
    "old_logprobs": GIVEN["old"],
    "ref_logprobs": GIVEN["reference"],
    "values": GIVEN["old_values"],
    "returns": GIVEN["returns"],
    "positive": spread(GIVEN["right"]),
    "kl_baseline": np.float32(0.2),
}
BY_TOKEN, BY_ROW = GIVEN["advantages"], spread(GIVEN["row_advantages"])


def of(loss, advantages=BY_TOKEN, **changes):
    """The step's loss as a function of log-probs (or values)."""
    batch = BATCH | {"advantages": advantages} | changes

    def total(x):
        given = batch | (loss.prepared(batch) if hasattr(loss, "prepared") else {})
        arguments = (x, given) if isinstance(loss, ValueLoss) else (x, None, given)
        return jnp.sum(loss.weights(batch) * loss(*arguments)[0])

    return total


def odds(x):
    """ORPO without its likelihood, which TRL adds elsewhere."""
    mean = jnp.sum(jnp.where(MASK, x, 0.0), axis=1) / MASK.sum(axis=1)
    return of(PairLoss(kind="odds", beta=0.3))(x) + jnp.mean(mean[::2])


def distilled(beta):
    kind = {0.0: "forward", 1.0: "reverse"}.get(beta, "jensen_shannon")
    options = {} if kind != "jensen_shannon" else {"mixture": beta}
    teacher = GIVEN["teacher"] - np.log(np.exp(GIVEN["teacher"]).sum(axis=-1, keepdims=True))
    loss = DistillationLoss(kind=kind, **options)
    return lambda x: of(loss, teacher_logprobs=teacher)(jax.nn.log_softmax(x))


def summed(kind):
    return lambda x: jnp.sum(jnp.where(MASK, kl_estimate(x, GIVEN["reference"], kind), 0.0))


def policy(**switches):
    return of(PolicyLoss(**CLIP | switches))


def by_row(**switches):
    return of(PolicyLoss(**CLIP | switches), BY_ROW)


NO_CLIP = {"clip_low": None, "clip_high": None}
COV = {"covariance": "clip", "covariance_low": 0.1, "covariance_high": 0.6}
LOSSES = {
    "verl": {
        "vanilla token-mean": policy(dual_clip=3.0),
        "vanilla seq-mean-token-sum": policy(dual_clip=3.0, aggregation="sum"),
        "vanilla seq-mean-token-mean": policy(dual_clip=3.0, aggregation="sequence"),
        "gspo": policy(ratio="sequence_token", aggregation="sequence"),
        "sapo": policy(surrogate="sapo", aggregation="sequence", **NO_CLIP),
        "gpg": policy(ratio="none", **NO_CLIP),
        "cispo": policy(surrogate="cispo"),
        "clip_cov": policy(covariance_share=1.0, **COV),
        "kl_cov": policy(
            covariance="kl", covariance_share=0.2, covariance_coef=0.7, **NO_CLIP
        ),
        "value": of(ValueLoss(clip=0.5)),
        **{f"kl {kind}": summed(kind) for kind in ("k1", "k2", "k3")},
        "prime": of(ImplicitRewardLoss(beta=0.5)),
    },
    "trl": {
        "grpo": by_row(aggregation="sequence", kl_coef=0.04, kl_estimator="k3"),
        "dapo": by_row(),
        "dr_grpo": by_row(aggregation="constant", max_length=7),
        "delta": by_row(ratio_cap=1.1),
        "cispo": by_row(surrogate="cispo", clip_low=1.0, clip_high=0.2),  # TRL: at most 1.2
        "sapo": by_row(surrogate="sapo", aggregation="sequence", **NO_CLIP),
        "sequence": by_row(ratio="sequence", aggregation="sequence"),
        "dpo sigmoid": of(PairLoss(beta=0.3)),
        "dpo hinge": of(PairLoss(kind="hinge", beta=0.3)),
        "dpo ipo": of(PairLoss(kind="ipo", beta=0.3)),
        "dpo robust": of(PairLoss(kind="robust", beta=0.3, smoothing=0.1)),
        "kto": of(UnpairedLoss(beta=0.3, desirable=1.2, undesirable=0.7)),
        "orpo odds": odds,
        "simpo": of(PairLoss(kind="margin", beta=2.0, margin=1.0)),
        **{f"jsd {beta}": distilled(beta) for beta in (0.0, 0.3, 1.0)},
    },
}
AT = {"clip_cov": "old", "kl_cov": "near", "value": "values"} | dict.fromkeys(
    ("jsd 0.0", "jsd 0.3", "jsd 1.0"), "student"
)


@pytest.mark.parametrize(
    "peer, name", [(peer, name) for peer in LOSSES for name in STORED[peer]["losses"]]
)
def test_losses_and_gradients_are_the_peers(peer, name):
    stored = STORED[peer]["losses"][name]
    at = GIVEN[AT.get(name, "new")]
    value, gradient = jax.jit(jax.value_and_grad(LOSSES[peer][name]))(at)
    np.testing.assert_allclose(value, stored["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, stored["gradient"], rtol=1e-5, atol=1e-5)


# Same name, different formula: the difference that docs/losses.md lists


def test_trls_epsilon_and_nemos_baseline():
    rows = GIVEN["rewards"].reshape(-1, SAMPLES).astype(np.float64)
    std = rows.std(axis=1, ddof=1, keepdims=True)
    ours, trl = (group_advantages(GIVEN["rewards"], SAMPLES, epsilon=e) for e in (1e-6, 1e-4))
    ratio = ((std + 1e-6) / (std + 1e-4) * np.ones(SAMPLES)).ravel()
    np.testing.assert_allclose(trl, ours * ratio, rtol=1e-5)
    nemo = group_advantages(GIVEN["rewards"], SAMPLES, baseline="others")
    for i, reward in enumerate(rows.ravel()):
        others = np.delete(rows[i // SAMPLES], i % SAMPLES)
        expected = (reward - others.mean()) / (others.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(nemo[i], expected, rtol=1e-4)


def test_trls_rloo_is_reinforce_only_on_policy():
    ours = by_row(ratio="none", aggregation="sum", **NO_CLIP)
    trl = by_row(ratio="sequence_sum", aggregation="sequence", clip_low=0.2, clip_high=0.2)
    gradients = [np.asarray(jax.grad(f)(GIVEN["old"])) for f in (ours, trl)]
    np.testing.assert_allclose(*gradients, atol=1e-6)
    ratio = np.exp(np.where(MASK, GIVEN["new"] - GIVEN["old"], 0).sum(axis=1))
    rows = GIVEN["row_advantages"]
    clipped = np.minimum(ratio * rows, np.clip(ratio, 0.8, 1.2) * rows)
    np.testing.assert_allclose(trl(GIVEN["new"]), -clipped.mean(), rtol=1e-5)


def reinforce_plus_plus(**changes):
    config = ALGORITHMS["ReinforcePlusPlus"].default_config()
    config.update({"whiten": False, "kl_coef": 0.5} | changes)
    roles = dict.fromkeys(("actor", "reference", "reward"))
    algorithm = ALGORITHMS["ReinforcePlusPlus"](config, roles, samples=1)
    batch = BATCH | {"rewards": GIVEN["rewards"], "logprobs": GIVEN["old"]}
    batch = batch | {"truncated": np.zeros(len(MASK), bool)}
    return algorithm.compute_advantages(batch)["advantages"]


def test_nemos_reinforce_plus_plus_leaves_later_tokens_kl_out():
    kl = np.where(MASK, GIVEN["old"] - GIVEN["reference"], 0.0)
    later = np.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(
        reinforce_plus_plus(), spread(GIVEN["rewards"]) - 0.5 * np.where(MASK, later, 0), atol=1e-5
    )
    np.testing.assert_allclose(
        reinforce_plus_plus(kl_cumulated=False), spread(GIVEN["rewards"]) - 0.5 * kl, atol=1e-5
    )


def test_trls_delta_cuts_the_ratio_and_dual_clip_the_loss():
    batch = {
        "response_mask": np.ones((1, 2), bool),
        "old_logprobs": np.zeros((1, 2), np.float32),
        "advantages": np.float32([[-2.0, 2.0]]),
    }
    x = np.log(np.float32([[10.0, 10.0]]))
    for switches, expected in (
        ({}, [20.0, -2.4]),
        ({"dual_clip": 3.0}, [6.0, -2.4]),  # c |A|
        ({"ratio_cap": 4.0}, [8.0, -2.4]),  # delta |A|; A > 0: the clip binds first
        ({"ratio_cap": 1.1}, [2.4, -2.2]),  # below the clip: TRL's minimum takes the larger loss
    ):
        made, _ = PolicyLoss(**switches)(x, None, batch)
        np.testing.assert_allclose(made, [expected], rtol=1e-5)


def test_verls_gspo_is_gspo_token():
    token, sequence = (
        functools.partial(policy, ratio=ratio, aggregation="sequence")
        for ratio in ("sequence_token", "sequence")
    )
    stored = STORED["verl"]["losses"]["gspo"]["gradient"]
    # Equal in value; its gradient is the paper's only where an advantage holds for a response.
    np.testing.assert_allclose(token()(GIVEN["new"]), sequence()(GIVEN["new"]), rtol=1e-6)
    assert np.abs(jax.grad(sequence())(GIVEN["new"]) - np.array(stored)).max() > 1e-2
    a, b = (
        jax.grad(by_row(ratio=ratio, aggregation="sequence"))(GIVEN["new"])
        for ratio in ("sequence_token", "sequence")
    )
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_verls_reinforce_plus_plus_baseline_has_no_kl():
    with_kl, without = (
        by_row(kl_coef=c, kl_estimator="k2")(GIVEN["new"]) for c in (0.1, 0.0)
    )
    squares = 0.5 * (GIVEN["new"] - GIVEN["reference"])[MASK] ** 2
    np.testing.assert_allclose(with_kl - without, 0.1 * squares.mean(), rtol=1e-4)
