"""The distribution that is drawn from, and the draws: transformers' warpers are the truth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ONE_DEVICE, trainer_of
from references import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    torch,
)

from hjax.errors import ConfigError
from hjax.rollout.sampling import draw, gumbel, sequence_keys
from hjax.rollout.sampling_params import SamplingParams
from hjax.sharding.layout import make_layouts
from hjax.xla.collectives import received_bytes

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=500),  # more than there are tokens: all
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05),  # less than any token's probability: one stays
    SamplingParams(temperature=0.7, top_k=9, top_p=0.8),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.5),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.5, top_k=30, top_p=0.95, min_p=0.2),
]


def warped(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Probabilities as transformers' generate makes them: temperature, top-k, top-p, min-p."""
    scores = torch.tensor(logits)
    if sampling.temperature != 1:
        scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return torch.softmax(scores, -1).numpy()


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.extended
def test_the_same_noise_draws_the_same_tokens_of_transformers_distribution(sampling):
    logits = np.random.default_rng(0).normal(size=(200, 40)).astype(np.float32) * 2
    keys = sequence_keys(jnp.uint32(3), jnp.uint32(1), jnp.arange(200))
    drawn = draw(logits, keys, jnp.int32(4), dataclasses.replace(sampling, top=20))
    expected = warped(logits, sampling)
    with np.errstate(divide="ignore"):
        scores = np.log(expected) + gumbel(keys, jnp.int32(4), 40)
    np.testing.assert_array_equal(drawn.token, np.argmax(scores, axis=-1))
    # Of each row the 20 likeliest tokens, or as many as are left.
    np.testing.assert_allclose(np.exp(drawn.top), -np.sort(-expected)[:, :20], atol=1e-6)
    left = np.minimum((expected > 0).sum(axis=-1), 20)
    np.testing.assert_array_equal((np.asarray(drawn.top) > -np.inf).sum(axis=-1), left)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.extended
def test_a_draw_reports_the_log_probs_of_its_token(sampling):
    logits = np.random.default_rng(1).normal(size=(50, 12)).astype(np.float32)
    keys = sequence_keys(jnp.uint32(3), jnp.uint32(1), jnp.arange(50))
    drawn = draw(logits, keys, jnp.int32(4), sampling)
    tempered = SamplingParams(temperature=sampling.temperature)
    for field, distribution in (
        ("sampled", sampling),
        ("policy", tempered),
        ("untempered", SamplingParams()),
    ):
        picked = warped(logits, distribution)[range(50), drawn.token]
        np.testing.assert_allclose(np.exp(getattr(drawn, field)), picked, rtol=1e-5)


SPLIT = [SamplingParams(0.0), SamplingParams(), SamplingParams(temperature=0.7, top_k=9, top_p=0.8)]


@pytest.mark.parametrize("sampling", SPLIT, ids=str)
@pytest.mark.extended
def test_parts_of_the_vocabulary_draw_the_same_tokens_for_a_few_numbers_per_row(sampling):
    rows, vocab = 16, 4096
    logits = np.random.default_rng(4).normal(size=(rows, vocab)).astype(np.float32) * 2
    logits[3, 70] = logits[3, 4000] = 50.0  # equals, on two devices
    keys = sequence_keys(jnp.uint32(3), jnp.uint32(1), jnp.arange(rows))
    whole = draw(logits, keys, jnp.int32(4), sampling)

    layout = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": -1}).generate
    placed = jax.device_put(logits, layout.sharding("batch", "vocab"))

    @jax.jit
    def split(logits, keys):
        return draw(logits, keys, jnp.int32(4), sampling, layout=layout)

    parts = split(placed, keys)
    np.testing.assert_array_equal(parts.token, whole.token)
    for field in ("sampled", "policy", "untempered"):
        np.testing.assert_allclose(getattr(parts, field), getattr(whole, field), atol=2e-6)
    text = split.lower(placed, keys).compile().as_text()
    each = received_bytes(text) / (rows / 2)
    # Some ten numbers of 4 bytes; to cut the tail 15 at a time, 8 times, for top-k and top-p.
    assert each <= 2 * 4 * (10 + (2 * 8 * 15 if sampling.truncates else 0))
    if sampling.greedy:
        assert parts.token[3] == 70


def test_greedy_takes_the_likeliest_token_and_reports_it_untempered():
    logits = np.array([[0.0, 1.0, 3.0], [2.0, 2.0, -1.0]], np.float32)
    keys = sequence_keys(jnp.uint32(0), jnp.uint32(0), jnp.arange(2))
    drawn = draw(logits, keys, jnp.int32(0), SamplingParams(temperature=0.0, top_k=2, top_p=0.5))
    assert drawn.token.tolist() == [2, 0]  # of equals the first
    expected = [3 - np.log(1 + np.e + np.e**3), -np.log(2 + np.exp(-3))]
    for field in (drawn.sampled, drawn.policy, drawn.untempered):
        np.testing.assert_allclose(field, expected, rtol=1e-6)


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    expected = probability * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


LOGITS = np.array([1.5, 0.3, -0.4, 0.9, -2.0, 0.0, 0.6, -1.0], np.float32)
DRAWS = 20000


def drawn_tokens(sampling, sequences, position):
    keys = sequence_keys(jnp.uint32(7), jnp.uint32(2), jnp.asarray(sequences))
    logits = jnp.broadcast_to(LOGITS, (DRAWS, 8))
    return np.asarray(jax.jit(draw, static_argnums=3)(logits, keys, position, sampling).token)


@pytest.mark.parametrize(
    "sampling, limit",  # 99.9 % quantiles of chi-square with (kept tokens - 1) degrees of freedom
    [(SamplingParams(), 24.32), (SamplingParams(0.7), 24.32), (SamplingParams(1.0, 4), 16.27)],
    ids=["plain", "temperature", "top-k"],
)
@pytest.mark.parametrize("over", ["sequences", "positions"])
def test_frequencies_follow_the_distribution(sampling, limit, over):
    index = jnp.arange(DRAWS, dtype=jnp.int32)
    zeros = jnp.zeros(DRAWS, jnp.int32)
    tokens = drawn_tokens(sampling, *((index, zeros) if over == "sequences" else (zeros, index)))
    probability = warped(LOGITS[None], sampling)[0]
    kept = probability > 0
    counts = np.bincount(tokens, minlength=8)
    assert counts[~kept].sum() == 0
    assert chi_square(counts[kept], probability[kept]) < limit


def test_neighbouring_draws_are_independent():
    index = jnp.arange(DRAWS, dtype=jnp.int32)
    top = SamplingParams(top_k=3)
    probability = warped(LOGITS[None], top)[0]
    pairs = np.outer(probability, probability).ravel()
    here = drawn_tokens(top, index, jnp.int32(0))
    for other in (drawn_tokens(top, index, jnp.int32(1)), np.roll(here, 1)):
        counts = np.bincount(here * 8 + other, minlength=64)
        assert chi_square(counts[pairs > 0], pairs[pairs > 0]) < 26.12  # 8 degrees of freedom


@pytest.mark.parametrize(
    "options, line",
    [
        ({"temperature": -1.0}, "temperature=-1.0: 0 .greedy., or 1e-05 to 100000"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1: 0 .all tokens. or more"),
        ({"top_p": 0.0}, "top_p=0.0: above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_impossible_settings_are_refused(options, line):
    with pytest.raises(ConfigError, match=line):
        SamplingParams(**options)


@pytest.mark.extended
def test_a_run_draws_with_the_options_of_its_config():
    keys = {"steps": 1, "warm_start.steps": 0, "rollout.prompts": 16, "rollout.samples": 4}
    options = {"min_p": 0.02, "repetition_penalty": 1.3, "logit_bias": "5:-100", "min_tokens": 3}
    keys |= {f"rollout.{name}": value for name, value in options.items()}
    with trainer_of("GRPO", keys | ONE_DEVICE) as trainer:
        metrics, batch = trainer.step(), trainer.batch
    mask = np.asarray(batch["response_mask"])
    assert mask.sum(axis=1).min() >= 3 and mask.sum(axis=1).max() > 3
    tokens = np.asarray(batch["responses"])[mask]
    assert 5 not in tokens and {4, 6} <= set(tokens.tolist())
    # What is learned from is compared with the policy's log-probs, which know no options.
    assert metrics["rollout/token_prob_error"] == pytest.approx(1, abs=1e-4)
    both = (np.asarray(batch[name])[mask] for name in ("logprobs", "policy_logprobs"))
    assert np.abs(np.subtract(*both)).max() > 0.1


@pytest.mark.parametrize(
    "name, value, line",
    [
        ("min_p", 2.0, "config.rollout.min_p=2.0: must be 0 .all tokens. to 1"),
        ("logit_bias", "5", "config.rollout.logit_bias='5': must be up to 300 token ids"),
        ("logit_bias", "99:1", "config.rollout.logit_bias token 99: the model's are 0 to"),
    ],
)
def test_a_runs_impossible_options_are_refused_by_key(name, value, line):
    with pytest.raises(ConfigError, match=line), trainer_of("GRPO", {f"rollout.{name}": value}):
        pass
