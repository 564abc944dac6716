"""Weights that travel round a tensor axis: loss and gradient of the plain form on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.models import collective_matmul
from hjax.models.compute import Compute
from hjax.models.cost_inputs import MeshSizes, model_counts
from hjax.models.forward import response_states, token_log_probs
from hjax.models.lora import Lora
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network
from hjax.models.quantized import quantize_params
from hjax.sharding.layout import make_layouts

LLAMA = ModelConfig(48, 32, 40, 2, 8, 4, 4, 64)
LORA = Lora(3, 6.0)
SAMPLES, ROWS, PROMPT, LENGTH = 2, 8, 5, 6

# name -> (changes to LLAMA, train sizes, generate sizes).
RUNS = {
    "llama, fsdp 2, tensor 4": ({}, {"fsdp": 2, "tensor": 4}, {"tensor": 4}),
    "tensor 2 x 2 micro, data 2": ({}, {"data": 2, "tensor": 4}, {"tensor": 2}),
    "biases, layer norms, no gate": (
        {
            "qkv_bias": True, "output_bias": True, "mlp_bias": True, "layer_norm": True,
            "gated_mlp": False, "activation": "gelu_tanh", "ropes": (),
            "layer_kinds": (LayerKind(rope=None),) * 2, "family": "gpt2",
        },
        {"data": 2, "fsdp": 2, "tensor": 2}, {},
    ),
    "norms after, over all heads": (
        {"norms": "after", "query_key_norm": "all", "family": "olmo2"},
        {"fsdp": 4, "tensor": 2}, {},
    ),
    "norms around, windows, caps": (
        {
            "norms": "around", "norm_offset": 1.0, "attention_softcap": 5.0, "family": "gemma2",
            "layer_kinds": (LayerKind(window=4), LayerKind()), "activation": "gelu_tanh",
        },
        {"fsdp": 2, "tensor": 4}, {},
    ),
    "adapters": ({"lora": LORA}, {"fsdp": 2, "tensor": 4}, {}),
    "adapters of a base in a byte": (
        {"lora": LORA, "quantized": "int8"}, {"fsdp": 2, "tensor": 4}, {},
    ),
}  # fmt: skip
EVERY_DAY = {"tensor 2 x 2 micro, data 2", "adapters of a base in a byte"}
OFTEN = {n: pytest.mark.extended if n in EVERY_DAY else pytest.mark.slow for n in RUNS}
NAMES = [pytest.param(n, marks=OFTEN[n]) for n in RUNS]


def params_of(config):
    """Random, none of them 0."""
    network = decoder_network(dataclasses.replace(config, quantized=""))
    leaves, structure = jax.tree.flatten(network.shapes)
    keys = jax.random.split(jax.random.key(3), len(leaves))
    drawn = [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    params = jax.tree.unflatten(structure, drawn)
    return quantize_params(params, decoder_network(config).declared)


def batch_of():
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, 48, (ROWS // SAMPLES, PROMPT), dtype=np.int32)
    mask = np.arange(PROMPT) >= PROMPT - rng.integers(1, PROMPT + 1, (len(prompts), 1))
    answered = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    return {
        "prompts": np.repeat(prompts * mask, SAMPLES, axis=0),
        "prompt_mask": np.repeat(mask, SAMPLES, axis=0),
        "responses": rng.integers(1, 48, answered.shape, dtype=np.int32) * answered,
        "response_mask": answered,
        "weights": (rng.normal(size=answered.shape) * answered).astype(np.float32),
    }


def loss_and_gradient(network, params, batch, compute, samples):
    """Of weighted log-probs, what learns being adapters where there are some."""
    learned, frozen = network.partition.split(params)

    def loss(learned, frozen, batch):
        model = network.bind(network.partition.join(learned, frozen))
        states = response_states(model, batch, samples, compute)
        logprobs, _ = token_log_probs(model, states, batch["responses"], layout=compute.layout)
        return jnp.sum(batch["weights"] * logprobs)

    return jax.jit(jax.value_and_grad(loss)).trace(learned, frozen, batch)


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_one_device(name, monkeypatch):
    changes, train, generate = RUNS[name]
    config = dataclasses.replace(LLAMA, **changes)
    network, params, batch = decoder_network(config), params_of(config), batch_of()
    compute = Compute(remat="full")
    learned, frozen = network.partition.split(params)
    plain = loss_and_gradient(network, params, batch, compute, SAMPLES)
    loss, gradient = plain.lower().compile()(learned, frozen, batch)

    monkeypatch.setattr(collective_matmul, "PLATFORMS", ("cpu",))
    monkeypatch.setattr(collective_matmul, "fewer_bytes_received", lambda *_: True)
    layout = make_layouts(jax.devices()[:8], {"data": 1} | train, generate).train
    compute = dataclasses.replace(compute.for_layout(layout), layout=layout)
    placed = network.place(params, layout)
    rows = {key: jax.device_put(x, layout.sharding("batch")) for key, x in batch.items()}
    parted = loss_and_gradient(network, placed, rows, compute, SAMPLES)
    assert "ppermute" in str(parted.jaxpr)
    ours = parted.lower().compile()(*network.partition.split(placed), rows)
    assert float(ours[0]) == pytest.approx(float(loss), rel=1e-5)
    for (path, x), expected in zip(
        jax.tree.leaves_with_path(ours[1]), jax.tree.leaves(gradient), strict=True
    ):
        error = np.linalg.norm(x - expected) / np.linalg.norm(expected)
        assert error <= 1e-5, (jax.tree_util.keystr(path), error)


def test_activations_are_summed_where_weights_cannot_travel_or_are_more():
    def travels(sizes, **changes):
        model = model_counts(dataclasses.replace(LLAMA, **changes))
        mesh = MeshSizes.of(make_layouts(8, sizes).train)
        return collective_matmul.weights_travel(model, mesh, 10_000)

    assert travels({"fsdp": 2, "tensor": 4}) and travels({"data": 2, "tensor": 4}, lora=LORA)
    assert not travels({"fsdp": 8})
    assert not travels({"context": 2, "tensor": 4}) and not travels({"pipe": 2, "tensor": 4})
    assert not travels({"tensor": 8}, kv_heads=2)
    assert not travels({"fsdp": 2, "tensor": 4}, experts=4, experts_per_token=2, family="mixtral")
    assert not travels({"fsdp": 2, "tensor": 4}, lora=dataclasses.replace(LORA, dora=True))
    # Llama-3-8B over 4: 218.1 million weights a layer; of each token two sums of 4096 elements are
    # received twice, or of 40 heads of 128 a quarter and back: from 218.1e6 / (16384 - 2560) on.
    llama = {"hidden_size": 4096, "mlp_size": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}
    large = model_counts(dataclasses.replace(LLAMA, **llama))
    fewer = collective_matmul.fewer_bytes_received
    assert not fewer(large, 15_700, 4) and fewer(large, 15_900, 4)
