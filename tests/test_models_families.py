"""Every family against transformers: logits, cached decoding, padding, files both ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import torch
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hjax
from hjax.errors import ConfigError
from hjax.models import arithmetic
from hjax.models.families import FAMILIES, from_hf, to_hf
from hjax.models.forward import sequence_states, token_log_probs
from hjax.models.huggingface import load_weights, save_weights
from hjax.models.parameters import decoder_network
from hjax.models.transformer import Compute

SIZES = {
    "vocab_size": 47,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": 47, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
slow = pytest.mark.slow


def scaled(kind, theta=10000.0, **keys):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **keys}}


# Per family one row of every day; the others are odd settings.
MODELS = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear rope": ("llama", scaled("linear", factor=3.0)),
    "llama yarn": ("llama", scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama dynamic": ("llama", {"max_position_embeddings": 16} | scaled("dynamic", factor=2.0)),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": (
        "qwen2",
        scaled("yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=2.0)
        | {"num_key_value_heads": 4},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3 tied": ("qwen3", {"head_dim": 6, "tie_word_embeddings": True}),
    "qwen3 biases": ("qwen3", {"head_dim": 8, "attention_bias": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "mistral wide window": ("mistral", {"sliding_window": 64, "num_key_value_heads": 1}),
    "mistral tied": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm3 tied": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "smollm3 any layers": ("smollm3", {"no_rope_layers": [0, 0, 1], "attention_bias": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2 tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "olmo2 heads": ("olmo2", {"num_key_value_heads": 4} | scaled("linear", 5e5, factor=2.0)),
    "gpt2": ("gpt2", {}),
    "gpt2 narrow": ("gpt2", {"n_inner": 24, "layer_norm_epsilon": 1e-3}),
    "gpt2 one head": ("gpt2", {"n_head": 1, "tie_word_embeddings": False}),
}
EVERY_DAY = {next(name for name, row in MODELS.items() if row[0] == f) for f, _ in MODELS.values()}
NAMES = [name if name in EVERY_DAY else pytest.param(name, marks=slow) for name in MODELS]
TOKENS = np.random.default_rng(0).integers(1, 47, (2, 20)).astype(np.int32)


def model(name):
    """A tiny model of transformers, all of whose parameters are random."""
    family, changes = MODELS[name]
    sizes = GPT2 if family == "gpt2" else SIZES
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**(sizes | changes))
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape)
            norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.copy_(1 + 0.3 * noise if norm else 0.2 * noise)
    return made


def logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor(tokens).long()).logits.double().numpy()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers_and_files_go_both_ways(name, tmp_path):
    theirs = model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits(theirs, TOKENS)
    ours = hjax.load_model(tmp_path / "theirs")
    np.testing.assert_allclose(ours.logits(TOKENS), expected, rtol=2e-5, atol=2e-5)
    assert arithmetic.parameters(ours.config) == theirs.num_parameters()

    config, params = load_weights(tmp_path / "theirs")
    assert from_hf(to_hf(config)) == config
    save_weights(tmp_path / "ours", config, params)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        np.testing.assert_array_equal(after[tensor], values)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(logits(again.eval(), TOKENS), expected)


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_the_cache_change_nothing(name, tmp_path):
    """Log-probs padded on either side, and of greedy decoding, are those of the row alone."""
    theirs = model(name)
    theirs.save_pretrained(tmp_path)
    ours = hjax.load_model(tmp_path)
    row, (left, right) = TOKENS[0, :13], (4, 3)
    alone = np.asarray(ours.log_probs(row[None]))[0]
    config, params = load_weights(tmp_path)
    network = decoder_network(config)

    def log_probs(params, tokens, mask):
        decoder = network.bind(params)
        hidden = sequence_states(decoder, tokens, mask, Compute(unroll_layers=True))
        return token_log_probs(decoder, hidden[:, :-1], tokens[:, 1:])[0]

    tokens = np.pad(row, (left, right))[None]
    padded = jax.jit(log_probs)(params, jnp.asarray(tokens), jnp.asarray(tokens > 0))
    np.testing.assert_allclose(padded[0, left : left + 12], alone, atol=2e-5)

    [out] = ours.generate([row[:7].tolist()], max_new_tokens=6, temperature=0.0)
    whole = np.array([[*row[:7], *out.tokens]])
    np.testing.assert_allclose(out.logprobs, ours.log_probs(whole)[0, 6:], atol=2e-5)


def test_every_family_is_here():
    assert {family for family, _ in MODELS.values()} == set(FAMILIES) - {"mixtral", "qwen3_moe"}


def test_older_files_and_either_spelling_load(tmp_path):
    """GPT-2's first files lack `transformer.`; `lm_head.weight` may stand for a tied embedding."""
    from safetensors.numpy import save_file

    for name, rename in (
        ("gpt2", lambda n: n.removeprefix("transformer.")),
        ("qwen2 tied", lambda n: "lm_head.weight" if "embed_tokens" in n else n),
    ):
        path = tmp_path / name
        theirs = model(name)
        theirs.save_pretrained(path)
        tensors = load_file(path / "model.safetensors")
        save_file({rename(n): x for n, x in tensors.items()}, path / "model.safetensors")
        np.testing.assert_allclose(
            hjax.load_model(path).logits(TOKENS), logits(theirs, TOKENS), rtol=2e-5, atol=2e-5
        )
    new = from_hf(model("qwen2 yarn").config.to_dict())
    old = to_hf(new)
    assert "rope_scaling" in old and "rope_parameters" not in old
    assert from_hf(old) == new


REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'.*gelu_new"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "needs use_sliding_window=true"),
    ("olmo2", {"mlp_bias": True}, "a olmo2 model with mlp_bias=True is not supported"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
]


@pytest.mark.parametrize("family, changes, line", REFUSED, ids=[line for *_, line in REFUSED])
def test_what_a_family_does_not_have_is_refused_by_name(family, changes, line):
    content = CONFIG_MAPPING[family](**(GPT2 if family == "gpt2" else SIZES)).to_dict()
    with pytest.raises(ConfigError, match=line) as caught:
        from_hf(content | changes)
    assert "\n" not in str(caught.value)
