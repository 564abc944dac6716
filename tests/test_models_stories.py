"""Real trained weights: stories260K reproduces its goldens (float64, made elsewhere)."""

import json

import numpy as np
import pytest

import hjax


@pytest.fixture(scope="module")
def stories(test_data):
    path = test_data / "weights" / "stories260K-hf"
    return hjax.load_model(path), json.loads((path / "goldens.json").read_text())


def test_log_probs_entropies_and_logits_of_a_text(stories):
    model, golden = stories
    tokens = np.array([golden["text_ids"]])
    assert model.tokenizer.encode(golden["text"]) == golden["text_ids"]
    np.testing.assert_allclose(model.log_probs(tokens)[0], golden["text_logprobs"], atol=1e-4)
    logits = np.asarray(model.logits(tokens)[0], np.float64)
    np.testing.assert_allclose(logits[-1, :8], golden["last_logits_first8"], atol=1e-4)
    probability = np.exp(logits - logits.max(-1, keepdims=True))
    probability /= probability.sum(-1, keepdims=True)
    entropy = -(probability * np.log(probability)).sum(-1)
    np.testing.assert_allclose(entropy[:-1], golden["text_entropy"], atol=1e-4)


def test_greedy_tokens_and_text_are_exact(stories):
    model, golden = stories
    first, *rest = golden["greedy_from_bos"]
    [out] = model.generate([[first]], max_new_tokens=len(rest), temperature=0.0)
    assert out.tokens == rest
    assert out.text == golden["greedy_text"]
    assert out.finish_reason == "length"
    tokens = np.array([[first, *rest]])
    np.testing.assert_allclose(out.logprobs, model.log_probs(tokens)[0], atol=1e-4)


def test_a_text_prompt_is_continued_with_its_space(stories):
    model, _ = stories
    [out] = model.generate(["Once upon a time, there was a"], max_new_tokens=8, temperature=0.0)
    assert out.text.startswith(" little girl named")
