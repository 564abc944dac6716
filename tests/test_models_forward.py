"""The forms of one forward: scanned, unrolled, recomputed, prompts shared, logits in chunks.

Truth is transformers' Llama on each row by itself, without padding, and torch's gradient of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import LlamaConfig, LlamaForCausalLM, torch

from hjax.models import forward
from hjax.models.compute import Compute
from hjax.models.forward import (
    response_states,
    sequence_states,
    token_log_probs,
    top_log_probs,
)
from hjax.models.huggingface import load_weights
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.sharding.layout import make_layouts
from hjax.sharding.pipeline import run_all_layers

PROMPTS = [[5, 9, 2], [40, 3, 17, 22, 1], [7]]  # three prompts of different lengths
RESPONSES = [[[11], [12, 13, 14, 15], [0, 16, 17]], [[18, 19], [20, 21], [22]], [[5], [6], [7, 8]]]
SAMPLES = 3
CPU = {"kernel_set": "cpu"}
FORMS = {
    "scanned": CPU,
    "unrolled": {**CPU, "unroll_layers": True},
    "recomputed": {**CPU, "remat": "full"},
    "recomputed but attention": {**CPU, "remat": "attention"},
    "recomputed but products": {**CPU, "remat": "products"},
    "recomputed, inputs on the host": {**CPU, "remat": "offload"},
    "unrolled, recomputed": {**CPU, "unroll_layers": True, "remat": "full"},
    "whole on a device": {**CPU, "whole": True},
    "whole, unrolled": {**CPU, "whole": True, "unroll_layers": True},
    "with the reference": {"kernel_set": "reference"},
    "with written-out backward passes": {"kernel_set": "backward"},
    "written out, unrolled": {"kernel_set": "backward", "unroll_layers": True},
}


def compute_of(form):
    """``whole``: under a layout of one device, made here because that starts a backend."""
    options = dict(FORMS[form])
    whole = options.pop("whole", False)
    layout = make_layouts(jax.devices()[:1]).train if whole else None
    return Compute(layout=layout, **options)


def pad(rows, length, left):
    tokens, mask = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        at = slice(length - len(row), length) if left else slice(len(row))
        tokens[i, at], mask[i, at] = row, True
    return tokens, mask


@pytest.fixture(scope="module")
def batch():
    """9 rows: prompt padded on the left to 6, responses on the right to 4."""
    prompts, prompt_mask = pad([p for p in PROMPTS for _ in range(SAMPLES)], 6, left=True)
    responses, response_mask = pad([r for group in RESPONSES for r in group], 4, left=False)
    weights = np.random.default_rng(0).normal(size=responses.shape) * response_mask
    return {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "response_mask": response_mask,
        "weights": weights.astype(np.float32),
    }


@pytest.fixture(scope="module")
def truth(batch, tmp_path_factory):
    """(network, params, log-probs, gradient of sum(weights * log-probs)), the latter by torch."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=47,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    config, params = saved(model, tmp_path_factory.mktemp("weights"))
    logprobs, total = np.zeros(batch["responses"].shape), torch.tensor(0.0)
    for row, (p, r) in enumerate((p, r) for i, p in enumerate(PROMPTS) for r in RESPONSES[i]):
        logits = model(torch.tensor([p + r])).logits[0, len(p) - 1 : -1]
        picked = torch.log_softmax(logits, -1)[range(len(r)), r]
        logprobs[row, : len(r)] = picked.detach().numpy()
        total = total + (torch.tensor(batch["weights"][row, : len(r)]) * picked).sum()
    total.backward()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    # The gradient, saved as if it were a model, comes back in our tree.
    _, gradient = saved(model, tmp_path_factory.mktemp("gradient"))
    return decoder_network(config), jax.tree.map(jnp.asarray, params), logprobs, gradient


def saved(model, path):
    model.save_pretrained(path)
    return load_weights(path)


def weighted(network, params, batch, samples, compute):
    model = network.bind(params)
    hidden = response_states(model, batch, samples, compute)
    logprobs, _ = token_log_probs(model, hidden, batch["responses"])
    return jnp.sum(batch["weights"] * logprobs), logprobs


def close(gradient, expected):
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
    ):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("form, samples", [("scanned", 1), *((form, SAMPLES) for form in FORMS)])
@pytest.mark.extended
def test_log_probs_and_gradient_equal_torch(form, samples, truth, batch):
    network, params, logprobs, gradient = truth
    run = jax.jit(
        jax.value_and_grad(
            lambda params, batch: weighted(network, params, batch, samples, compute_of(form)),
            has_aux=True,
        )
    )
    (_, ours), ours_gradient = run(params, batch)
    kept = np.where(batch["response_mask"], ours, 0)
    np.testing.assert_allclose(kept, logprobs, atol=2e-5)
    close(ours_gradient, gradient)


@pytest.mark.extended
def test_forward_mode_and_second_derivatives_through_the_reference(truth, batch):
    network, params, _, gradient = truth
    rng = np.random.default_rng(3)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), params)

    def objective(params):
        return weighted(network, params, batch, SAMPLES, Compute())[0]

    @jax.jit
    def run(params):
        _, along = jax.jvp(objective, (params,), (direction,))
        return along, jax.jvp(jax.grad(objective), (params,), (direction,))[1]

    @jax.jit
    def gradient_at(distance):
        return jax.grad(objective)(jax.tree.map(lambda x, d: x + distance * d, params, direction))

    def inner(left, right):
        return sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right)))

    along, curved = run(params)
    # Along a direction the derivative is the inner product with torch's gradient.
    np.testing.assert_allclose(along, inner(gradient, direction), rtol=1e-4)
    # The Hessian times it is how the gradient changes there.
    step = 1e-3
    change = jax.tree.map(
        lambda b, a: (b - a) / (2 * step), gradient_at(step), gradient_at(-step)
    )
    off = jax.tree.map(np.subtract, curved, change)
    assert inner(off, off) <= 1e-4 * inner(curved, curved)


def test_written_out_backward_passes_have_no_forward_mode(truth, batch):
    network, params, _, _ = truth

    def objective(params):
        return weighted(network, params, batch, SAMPLES, Compute(kernel_set="backward"))[0]

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(objective, (params,), (params,))


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_mask": np.ones((9, 5), bool)},
        {"prompt_mask": np.ones((9, 6), np.float32)},
        {"responses": np.zeros((8, 4), np.int32)},
        {"responses": np.zeros((9, 4), np.float32)},
        {
            "prompts": np.zeros((8, 6), np.int32), "prompt_mask": np.ones((8, 6), bool),
            "responses": np.zeros((8, 4), np.int32),
        },
    ],
    ids=["mask's length", "mask's dtype", "rows", "tokens' dtype", "rows that no group divides"],
)  # fmt: skip
def test_a_wrong_batch_is_refused_when_traced(changes, truth, batch):
    network, params, _, _ = truth

    def run(params, batch):
        return response_states(network.bind(params), batch, SAMPLES, Compute())

    jax.eval_shape(run, params, batch)
    with pytest.raises(AssertionError):
        jax.eval_shape(run, params, batch | changes)


def test_wrong_tokens_to_score_are_refused_when_traced(truth):
    network, params, _, _ = truth

    def run(params, hidden, tokens):
        return token_log_probs(network.bind(params), hidden, tokens)

    hidden = jnp.zeros((3, 5, 32))
    jax.eval_shape(run, params, hidden, jnp.zeros((3, 5), int))
    jax.eval_shape(run, params, hidden, jnp.zeros((3, 5, 2), int))
    for tokens in (jnp.zeros((3, 4), int), jnp.zeros((5, 3), int), jnp.zeros((3, 5))):
        with pytest.raises(AssertionError):
            jax.eval_shape(run, params, hidden, tokens)


def test_padding_is_never_seen(truth, batch):
    network, params, _, _ = truth
    run = jax.jit(lambda batch: weighted(network, params, batch, SAMPLES, Compute())[1])
    filled = {**batch}
    for tokens, mask in (("prompts", "prompt_mask"), ("responses", "response_mask")):
        filled[tokens] = np.where(batch[mask], batch[tokens], 46).astype(np.int32)
    mask = batch["response_mask"]
    np.testing.assert_array_equal(np.asarray(run(batch))[mask], np.asarray(run(filled))[mask])


def test_logits_in_chunks_equal_logits_at_once(truth, batch, monkeypatch):
    network, params, logprobs, gradient = truth

    def lowered(chunk_bytes):
        monkeypatch.setattr(forward, "LOGIT_CHUNK_BYTES", chunk_bytes)

        def objective(params):
            return weighted(network, params, batch, SAMPLES, Compute())

        program = jax.jit(jax.value_and_grad(objective, has_aux=True)).lower(params)
        # [rows, length, vocab]
        return program, "9x4x47" in program.as_text()

    whole, large = lowered(2**30)
    parts, small = lowered(1)
    assert large and not small
    (_, ours), grads = parts.compile()(params)
    np.testing.assert_allclose(np.where(batch["response_mask"], ours, 0), logprobs, atol=2e-5)
    close(grads, gradient)


@pytest.mark.parametrize("chunk_bytes", [1, 2**30], ids=["in chunks", "at once"])
def test_temperature_and_entropy_by_hand(chunk_bytes, truth, batch, monkeypatch):
    monkeypatch.setattr(forward, "LOGIT_CHUNK_BYTES", chunk_bytes)
    network, params, _, _ = truth

    @jax.jit
    def run(params):
        model = network.bind(params)
        hidden = response_states(model, batch, SAMPLES, Compute())
        scores = token_log_probs(model, hidden, batch["responses"], temperature=0.5)
        return model.logits(hidden), *scores

    logits, ours, entropy = run(params)
    logits = np.asarray(logits, np.float64) / 0.5
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(entropy, -(p * np.log(p)).sum(-1), atol=1e-5)
    picked = np.take_along_axis(np.log(p), batch["responses"][..., None], -1)[..., 0]
    np.testing.assert_allclose(ours, picked, atol=1e-5)


@pytest.mark.parametrize(
    "stack", [run_all_layers, lambda *a: run_all_layers(*a)], ids=["plain", "as in a stage"]
)
@pytest.mark.parametrize("chunk_bytes", [1, 2**30], ids=["in chunks", "at once"])
def test_several_tokens_of_a_place_and_the_most_probable(
    chunk_bytes, stack, truth, batch, monkeypatch
):
    monkeypatch.setattr(forward, "LOGIT_CHUNK_BYTES", chunk_bytes)
    network, params, _, _ = truth
    tokens = (batch["responses"][..., None] + np.arange(3)) % 47

    @jax.jit
    def run(params):
        model = network.bind(params, stack)
        hidden = response_states(network.bind(params), batch, SAMPLES, Compute())
        several = token_log_probs(model, hidden, tokens, temperature=0.5, with_entropy=False)
        top = top_log_probs(model, hidden, 4, temperature=0.5)
        return model.logits(hidden), several[0], *top

    logits, ours, top, ids = run(params)
    logits = np.asarray(logits, np.float64) / 0.5
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(ours, np.take_along_axis(logprobs, tokens, -1), atol=1e-5)
    np.testing.assert_allclose(top, -np.sort(-logprobs, axis=-1)[..., :4], atol=1e-5)
    np.testing.assert_array_equal(ids, np.argsort(-logprobs, axis=-1)[..., :4])


def test_sequences_padded_on_the_right_equal_torch(truth, batch):
    network, params, logprobs, _ = truth
    rows = [p + r for i, p in enumerate(PROMPTS) for r in RESPONSES[i]]
    tokens, mask = pad(rows, 10, left=False)

    @jax.jit
    def run(params):
        model = network.bind(params)
        hidden = sequence_states(model, tokens, mask, Compute())
        return token_log_probs(model, hidden[:, :-1], tokens[:, 1:])[0]

    ours = run(params)
    lengths = [len(p) for p in PROMPTS for _ in range(SAMPLES)]
    for row, (prompt, tail) in enumerate(zip(lengths, batch["response_mask"].sum(1), strict=True)):
        expected = logprobs[row, :tail]
        np.testing.assert_allclose(ours[row, prompt - 1 : prompt - 1 + tail], expected, atol=2e-5)


def lowered_size(layers, compute):
    """Characters of the lowered training step of a model of this depth."""
    network = decoder_network(ModelConfig(47, 16, 24, layers, 2, 1, 8, 32))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(params, tokens):
        model = network.bind(params)
        hidden = sequence_states(model, tokens, jnp.ones_like(tokens, bool), compute)
        return jnp.sum(token_log_probs(model, hidden, tokens)[0])

    return len(jax.jit(jax.grad(loss)).lower(network.shapes, tokens).as_text())


@pytest.mark.extended
def test_the_scanned_program_does_not_grow_with_depth():
    assert lowered_size(32, Compute()) <= 1.02 * lowered_size(4, Compute())
    unrolled = Compute(unroll_layers=True)
    assert lowered_size(8, unrolled) > 1.5 * lowered_size(4, unrolled)  # the measure measures


@pytest.mark.parametrize(
    "form", ["scanned", "whole on a device", "with written-out backward passes"]
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_scan_keeps_activations_for_the_backward_pass_and_no_weights(form, dtype, truth, batch):
    network, params, _, _ = truth
    compute = dataclasses.replace(compute_of(form), dtype=dtype)

    def objective(params):
        return weighted(network, params, batch, 1, compute)[0]

    forward_scan = next(
        equation
        for equation in jax.make_jaxpr(jax.grad(objective))(params).eqns
        if equation.primitive.name == "scan"
    )
    layers, rows = network.config.layers, len(batch["prompts"])
    kept = [x.aval.shape for x in forward_scan.outvars if x.aval.shape[:1] == (layers,)]
    assert (layers, rows, 10, 32) in kept  # a layer's input
    assert [shape for shape in kept if shape[1] != rows] == []
