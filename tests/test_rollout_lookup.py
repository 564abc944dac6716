"""Guesses by what a text said before: found as by hand, and no draw is other for them."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.rollout import prompt_lookup
from hjax.rollout.language_model import LanguageModel
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.sharding.layout import make_layouts
from tests.test_rollout_prefixes import answers, same

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=16, mlp_size=24, layers=2, heads=4, kv_heads=2, head_dim=8,
    max_length=256,
)  # fmt: skip


def by_hand(text, count):
    """The longest match of up to three last tokens, of equally long ones the latest."""
    best = None
    for size in range(1, prompt_lookup.MAX_NGRAM + 1):
        for end in range(len(text) - 1):
            if end + 1 >= size and text[end + 1 - size : end + 1] == text[len(text) - size :]:
                if best is None or (size, end) > best:
                    best = size, end
    if best is None:
        return None
    follows = text[best[1] + 1 :]
    return [follows[i % len(follows)] for i in range(count)]


def test_what_followed_before_is_guessed():
    assert by_hand([5, 6, 7, 1, 5, 6], 3) == [7, 1, 5]
    draw = random.Random(0)
    texts = [draw.choices(range(3), k=draw.randint(1, 12)) for _ in range(200)]
    room = np.full((len(texts), 12), 9)
    for row, text in zip(room, texts, strict=True):
        row[: len(text)] = text
    lengths = jnp.array([len(text) for text in texts])
    found = np.asarray(prompt_lookup.draft_tokens(jnp.asarray(room), lengths, 4))
    expected = [by_hand(text, 4) for text in texts]
    matched = [i for i, guess in enumerate(expected) if guess is not None]
    assert 100 < len(matched) < 200
    for i in matched:
        assert found[i].tolist() == expected[i], texts[i]


@pytest.fixture(scope="module")
def model():
    layout = make_layouts(jax.devices()[:1]).generate
    return LanguageModel(CONFIG, decoder_network(CONFIG).create(1, layout))


@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.extended
def test_requests_of_all_kinds_get_the_same_with_guesses(count, model):
    draw = random.Random(count)

    def options():
        return SamplingParams(
            temperature=draw.choice([0, 0.3, 1.0]), top_k=draw.choice([0, 3]),
            repetition_penalty=draw.choice([1.0, 1.2]), frequency_penalty=draw.choice([0, 0.4]),
            stop=tuple(draw.sample(range(8), draw.choice([0, 1]))), min_tokens=draw.choice([0, 9]),
            logit_bias={draw.randrange(8): draw.choice([-100, 1.0])},
            forced=tuple(draw.choices((2, 3), k=draw.choice([0, 3]))),
        )  # fmt: skip

    def asked(seed):
        prompt = tuple(draw.choices(range(8), k=draw.randint(1, 60)))
        for _ in range(99):
            try:
                return Request(prompt, draw.randint(1, 120), options(), seed)
            except ValueError:  # forced tokens that other options forbid
                continue
        raise AssertionError("no options")

    requests = [asked(seed) for seed in range(count)]
    guesses, plain = GenerationService(model, slots=4, lookup=3), GenerationService(model, slots=4)
    try:
        same(answers(guesses, requests), answers(plain, requests))
        stats = guesses.stats()
        assert 0 < stats["right_tokens"] < stats["guessed_tokens"]
        assert plain.stats()["guessed_tokens"] == 0
    finally:
        guesses.close(0)
        plain.close(0)


@pytest.mark.extended
def test_a_text_that_repeats_itself_takes_fewer_steps(model, monkeypatch):
    service = GenerationService(model, slots=1, lookup=4)
    steps, decode = [], service._engine.decode

    def counted(*arguments):
        state, drawn = decode(*arguments)
        steps.append(drawn.steps)
        return state, drawn

    monkeypatch.setattr(service._engine, "decode", counted)
    try:
        # A bias that leaves one token to draw: after two of them all guesses are right.
        request = Request((1, 2), 41, SamplingParams(temperature=0, logit_bias={5: 100.0}))
        tokens, _, _ = answers(service, [request])
        assert tokens == [[5] * 41]
        assert 8 <= sum(steps) <= 11  # of 40 tokens, five at a time
    finally:
        service.close(0)


@pytest.mark.extended
def test_draws_with_guesses_have_the_exact_frequencies(model):
    """Chi-squared of the tokens that follow a first one, the last of which may have been guessed,
    against the model's own probabilities."""
    stats = pytest.importorskip("scipy.stats")
    prompt, count, temperature = (1, 2, 1, 2, 1), 1000, 0.7

    def probabilities(texts):
        logits = np.asarray(model.logits(texts), np.float64)[:, -1] / temperature
        return np.exp(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    one = probabilities([prompt])[0]
    two = probabilities([(*prompt, i) for i in range(8)])
    three = probabilities([(*prompt, i, j) for i in range(8) for j in range(8)])
    exact = np.einsum("i,ij,ijk->jk", one, two, three.reshape(8, 8, 8)).ravel()
    service = GenerationService(model, slots=16, lookup=2)
    try:
        requests = [
            Request(prompt, 3, SamplingParams(temperature=temperature), s) for s in range(count)
        ]
        tokens, _, _ = answers(service, requests)
        assert service.stats()["right_tokens"] > count / 16
    finally:
        service.close(0)
    seen = np.bincount([8 * b + c for _, b, c in tokens], minlength=64)
    assert stats.chisquare(seen, exact * count).pvalue > 1e-3
