"""Counts from a shape: parameters, FLOPs and bytes, against published figures and real programs."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.models.attention_strategies import Causal
from hjax.models.compute import Compute
from hjax.models.cost_inputs import model_counts
from hjax.models.model_config import LayerKind, ModelConfig
from hjax.models.parameters import decoder_network, scalar_network
from hjax.models.presets import planning_shape, preset
from hjax.xla.flops import count_flops

# Billions of parameters as their makers give them (papers, model cards).
PUBLISHED = {
    "llama-7b": 6.74, "llama-13b": 13.02, "llama-34b": 33.74, "llama-70b": 68.98,
    "llama-3-8b": 8.03, "llama-3-70b": 70.55, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.60, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1,
    "mistral-7b": 7.25, "smollm3-3b": 3.08, "olmo-2-7b": 7.30, "phi-3-mini-4k": 3.82,
    "gemma-2-2b": 2.61, "gemma-2-9b": 9.24, "gemma-2-27b": 27.2,
    "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "gemma-3-12b": 11.77, "gemma-3-27b": 27.0,
    "gpt2": 0.124, "gpt2-large": 0.774,
    "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8,
}  # fmt: skip
ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.35, "qwen3-235b-a22b": 22.2}


@pytest.mark.parametrize("name, billions", PUBLISHED.items())
def test_published_parameters(name, billions):
    shape = preset(name)
    assert parameter_counts.parameter_count(shape) == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("name, billions", ACTIVE.items())
def test_published_active_parameters_of_experts(name, billions):
    shape = preset(name)
    embedding = shape.vocab_size * shape.hidden_size
    active = model_counts(shape).active_parameters + embedding
    assert active == pytest.approx(billions * 1e9, rel=0.01)


@pytest.mark.parametrize("name", ["llama-7b", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_parameters_are_those_of_the_network(name):
    shape = preset(name)
    for network, scalar in ((decoder_network, False), (scalar_network, True)):
        leaves = jax.tree.leaves(network(shape).shapes)
        counted = sum(math.prod(leaf.shape) for leaf in leaves)
        assert parameter_counts.parameter_count(shape, scalar) == counted
        bias = 1 if scalar else 0  # which plans leave out
        assert model_counts(shape, scalar=scalar).parameters == counted - bias


def test_flops_by_hand():
    # One layer, hidden 4, MLP 8, one head of 4, vocabulary 10, 3 tokens:
    # products 2 * (4*4*4 attention + 3*4*8 MLP + 4*10 head) * 3; pairs 4 * 4 * 3 * 3 / 2.
    shape = preset("llama-7b").__class__(10, 4, 8, 1, 1, 1, 4, 16)
    assert parameter_counts.forward_flops(shape, 3) == 2 * (64 + 96 + 40) * 3 + 4 * 4 * 4.5


def test_flops_of_a_window_by_hand():
    # Of 5 tokens a window of 2 lets the first see 1 and the others 2: 9 pairs instead of 5 * 5 / 2.
    kinds = (LayerKind(2), LayerKind())
    shape = ModelConfig(10, 4, 8, 2, 1, 1, 4, 16, layer_kinds=kinds)
    products = 2 * (2 * (64 + 96) + 40) * 5
    assert parameter_counts.forward_flops(shape, 5) == products + 4 * 4 * (9 + 12.5)
    # Attended to in full, as by a program that masks: 5 tokens each.
    assert parameter_counts.forward_flops(shape, 5, context=5) == products + 4 * 4 * 2 * 25


def test_flops_are_those_of_the_traced_forward():
    """The jaxpr's matrix products, attention counted in full instead of its causal half."""
    shape = preset("llama-3.2-1b")
    network = decoder_network(shape)
    length = 256

    def forward(params, tokens):
        model = network.bind(params)
        mask = jnp.ones(tokens.shape, bool)
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        hidden, _, _ = model(tokens, positions, Causal(mask), compute=Compute())
        return model.logits(hidden)

    tokens = jax.ShapeDtypeStruct((2, length), jnp.int32)
    counted = count_flops(jax.make_jaxpr(forward)(network.shapes, tokens)).products
    wanted = 2 * parameter_counts.forward_flops(shape, length, context=length)
    assert counted == pytest.approx(wanted, rel=1e-3)


def test_cache_bytes_of_llama():
    # 32 layers * 2 * 4096 elements * 2 bytes = 512 KiB a token; 70B: 80 * 2 * 1024 * 2.
    assert parameter_counts.cache_bytes(preset("llama-7b")) == 512 * 1024
    assert parameter_counts.cache_bytes(preset("llama-70b")) == 320 * 1024


def test_activations_by_hand():
    # Llama 7B: 4*4096 whole + 4*4096 of attention + 3*11008 of the MLP = 65792 elements a layer.
    shape = preset("llama-7b")
    found = model_counts(shape)
    assert (found.layer_activations, found.layer_activations_whole) == (65792, 16384)


def test_parameters_of_experts_are_those_of_the_network():
    shape = preset("mixtral-8x7b")
    counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(decoder_network(shape).shapes))
    assert parameter_counts.parameter_count(shape) == counted


def test_a_config_json_of_another_family_is_read_for_planning(tmp_path):
    config = {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = planning_shape(str(tmp_path))
    assert parameter_counts.parameter_count(read) == parameter_counts.parameter_count(
        preset("qwen3-30b-a3b")
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ConfigError, match="model_type 'mamba'"):
        planning_shape(str(tmp_path))
