"""Every family against transformers: logits, cached decoding, padding, files both ways."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import GPT2, MODELS, SIZES, logits, model, scaled
from helpers import tiny_config
from references import CONFIG_MAPPING, AutoModelForCausalLM, modeling_llama, torch
from safetensors.numpy import load_file

import hjax
from hjax.errors import ConfigError
from hjax.launch import export, generate, serve
from hjax.models import families, forward, parameter_counts
from hjax.models.compute import Compute
from hjax.models.families import FAMILIES, from_hf, to_hf
from hjax.models.forward import sequence_states, token_log_probs
from hjax.models.huggingface import load_weights, read_config, save_weights
from hjax.models.parameters import decoder_network
from hjax.models.presets import preset
from hjax.models.rotary import Rope
from hjax.models.sequence_packing import to_slots
from hjax.rollout.requests import Request
from hjax.rollout.sampling_params import SamplingParams
from hjax.rollout.service import GenerationService
from hjax.workers.packs import make_packing

EVERY_DAY = {next(name for name, row in MODELS.items() if row[0] == f) for f, _ in MODELS.values()}
NAMES = [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
# Of kinds that differ: windows and softcaps, sinks, layers without rotations, experts, learned
# positions, biases.
DIFFER = ("llama biases", "smollm3", "gemma2", "gpt-oss", "qwen3 experts", "gpt2")
TOKENS = np.random.default_rng(0).integers(1, 47, (2, 20)).astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_transformers_and_files_go_both_ways(name, tmp_path):
    theirs = model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = logits(theirs, TOKENS)
    ours = hjax.load_model(tmp_path / "theirs")
    np.testing.assert_allclose(ours.logits(TOKENS), expected, rtol=2e-5, atol=5e-5)
    assert parameter_counts.parameter_count(ours.config) == theirs.num_parameters()

    config, params = load_weights(tmp_path / "theirs")
    written = from_hf(to_hf(config))
    assert (written, written.dtype, written.token_ids) == (config, config.dtype, config.token_ids)
    save_weights(tmp_path / "ours", config, params)
    before, after = (load_file(tmp_path / x / "model.safetensors") for x in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        np.testing.assert_array_equal(after[tensor], values)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    np.testing.assert_array_equal(logits(again.eval(), TOKENS), expected)


@pytest.mark.parametrize(
    "name", [n if n in DIFFER else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
@pytest.mark.extended
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_requests_get_what_transformers_generates(name, tmp_path):
    """Through the engine's slots, more requests than slots, prompts of other lengths beside."""
    theirs = model(name)
    theirs.save_pretrained(tmp_path)
    ours = hjax.load_model(tmp_path)
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(1, 47, n).tolist()) for n in (7, 3, 12, 5, 9)]
    found = [[] for _ in prompts]
    service = GenerationService(ours, slots=2)
    for prompt, pieces in zip(prompts, found, strict=True):
        service.submit(Request(prompt, 8, SamplingParams(temperature=0.0)), pieces.append)
    service.close(300)
    for prompt, pieces in zip(prompts, found, strict=True):
        tokens = [token for piece in pieces for token in piece.tokens]
        expected = logits(theirs, np.array([[*prompt, *tokens]]))[0, len(prompt) - 1 : -1]
        assert len(tokens) == 8
        # A tie apart, each is transformers' likeliest after those before it.
        best = expected.max(-1)
        np.testing.assert_allclose(expected[np.arange(8), tokens], best, atol=1e-4)
        given = [x for piece in pieces for x in piece.logprobs]
        exact = best - np.log(np.exp(expected).sum(-1))
        np.testing.assert_allclose(given, exact, atol=5e-5)


# Windows, softcaps, sinks and learned positions.
PACKED = [
    n if n in ("gemma2", "gpt-oss", "gpt2") else pytest.param(n, marks=pytest.mark.slow)
    for n in MODELS
]


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.extended
def test_packs_change_nothing(name, tmp_path, monkeypatch):
    """Log-probs in packs, in one piece and by blocks, are transformers' of each row alone."""
    theirs = model(name)
    theirs.save_pretrained(tmp_path)
    config, params = load_weights(tmp_path)
    network = decoder_network(config)
    rng = np.random.default_rng(1)
    lengths = np.array([5, 5, 3, 3]), np.array([9, 1, 6, 11])
    tokens = [np.repeat(rng.integers(1, 47, (2, 6)), 2, axis=0), rng.integers(1, 47, (4, 11))]
    batch = {"prompts": tokens[0], "responses": tokens[1]}
    batch["response_mask"] = np.arange(11) < lengths[1][:, None]

    def log_probs(params, batch, compute):
        decoder = network.bind(params)
        return forward.response_log_probs(decoder, to_slots(batch), 1, compute)

    batch["packing"] = make_packing(*lengths, (6, 11), 2, 24, 1)
    for whole, compute in ((512, Compute()), (0, Compute(kernel_set="backward"))):
        monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", whole)
        found = jax.jit(functools.partial(log_probs, compute=compute))(params, batch)
        order = batch["packing"].order[0]
        for row in range(4):
            prompt, count = tokens[0][row, 6 - lengths[0][row] :], lengths[1][row]
            alone = np.append(prompt, tokens[1][row, :count])
            raw = logits(theirs, alone[None])[0, len(prompt) - 1 : -1]
            raw = raw - np.log(np.exp(raw).sum(-1, keepdims=True))
            expected = raw[np.arange(count), alone[len(prompt) :]]
            np.testing.assert_allclose(found[order == row][0, :count], expected, atol=5e-5)


EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
DENSE = [
    n if n in (*DIFFER, "phi3 longrope") else pytest.param(n, marks=pytest.mark.slow)
    for n in MODELS
    if n in EVERY_DAY and MODELS[n][0] not in EXPERTS
]


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.extended
def test_what_tpus_are_told_another_way_changes_nothing(name, tmp_path):
    """Keys and values by products of their own, queries scaled by their weights, other rotations:
    log-probs and gradients beside the reference set's."""
    model(name).save_pretrained(tmp_path)
    config, params = load_weights(tmp_path)
    network = decoder_network(config)

    def loss(params, kernel_set):
        decoder, mask = network.bind(params), jnp.asarray(TOKENS > 0)
        hidden = sequence_states(decoder, jnp.asarray(TOKENS), mask, Compute(kernel_set=kernel_set))
        found = token_log_probs(decoder, hidden[:, :-1], TOKENS[:, 1:])[0]
        return found.sum(), found

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, expected), gradients = run(params, "reference")
    (_, found), others = run(params, "tpu")
    np.testing.assert_allclose(found, expected, atol=2e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 2e-4), others, gradients)


def test_a_softcap_of_logits_holds_where_they_are_made_in_chunks(tmp_path, monkeypatch):
    model("gemma2").save_pretrained(tmp_path)
    whole = hjax.load_model(tmp_path).log_probs(TOKENS)
    monkeypatch.setattr(forward, "LOGIT_CHUNK_BYTES", 1024)
    chunked = hjax.load_model(tmp_path).log_probs(TOKENS)
    np.testing.assert_allclose(chunked, whole, atol=1e-5)


@pytest.mark.extended
def test_a_program_of_alternating_layers_does_not_grow_with_depth():
    shape = preset("gemma-3-1b")

    def lines(layers):
        kinds = shape.layer_kinds[:6] * (layers // 6)
        network = decoder_network(dataclasses.replace(shape, layers=layers, layer_kinds=kinds))
        tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)

        def loss(params, tokens):
            mask = jnp.ones(tokens.shape, bool)
            return jnp.sum(sequence_states(network.bind(params), tokens, mask, Compute()))

        return len(jax.jit(jax.grad(loss)).lower(network.shapes, tokens).as_text().splitlines())

    assert lines(6) == lines(24)


@pytest.mark.parametrize("size", [12, 80, 96, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_transformers_to_an_ulp(size, theta):
    """A relative error e is 700 e radians at the 700th token; sizes of no power of two are what XLA
    divides by inexactly."""
    config = CONFIG_MAPPING["llama"](**SIZES, head_dim=size, **scaled("default", theta))
    expected = modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    rope = Rope(theta)
    found, _ = jax.jit(lambda at: rope.tables(size, at, lambda f, _: (f, f)))(jnp.arange(700))
    np.testing.assert_allclose(found, expected, rtol=1.2e-7)


def test_every_family_is_here():
    assert {family for family, _ in MODELS.values()} == set(FAMILIES)


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


# Of config.json files as their makers wrote them (2023 to 2025), what is not in every file.
QWEN = {"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "use_cache": True}
WRITTEN = {
    "qwen2.5-0.5b": {
        **QWEN, "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936, "hidden_act": "silu",
    },
    "qwen3-30b-a3b": {
        **QWEN, "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "hidden_act": "silu",
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False,
        "vocab_size": 151936, "torch_dtype": "bfloat16",
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
            "original_max_position_embeddings": 4096, "truncate": False,
        },
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_config_json_as_its_makers_wrote_it_is_the_published_shape(name):
    read = from_hf(WRITTEN[name])
    assert parameter_counts.parameter_count(read) == parameter_counts.parameter_count(preset(name))
    # What a shape is counted and compiled for does not depend on.
    free = ("norm_epsilon", "router_loss", "normalize_router")
    same = {field: getattr(preset(name), field) for field in free}
    assert dataclasses.replace(read, **same) == preset(name)


REFUSED = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'.*gelu_new"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 3 layers"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "needs use_sliding_window=true"),
    ("olmo2", {"mlp_bias": True}, "a olmo2 model with mlp_bias=True is not supported"),
    ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers \[1\] is not supported"),
    ("mistral", {"sliding_window": "wide"}, "sliding_window is 'wide'"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; a whole"),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000; at most 10000"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a finite number"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'; a token id"),
    ("llama", {"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1; a finite number above 1"),
    ("llama", {"rope_parameters": {"rope_theta": 1e308}}, r"rope_theta is 1e\+308; .*at most 1e15"),
    ("gpt_oss", {"rope_parameters": None, "rope_theta": 1e20}, r"rope_theta is 1e\+20; .*at most"),
    ("llama", {"num_attention_heads": 2**31 - 1}, "kv_heads=2 does not divide heads"),
    *(
        ("llama", {"rope_parameters": {"rope_type": kind, "factor": 2.0, **keys}}, says)
        for kind, keys, says in (
            ("linear", {"factor": 1e30}, r"rope factor is 1e\+30; from 1e-6 to 1e6"),
            ("yarn", {"attention_factor": 1e-30}, "attention_factor is 1e-30; from 1e-6 to 1e6"),
            (
                "yarn",
                {"original_max_position_embeddings": 2**62},
                f"original_max_position_embeddings is {2**62}; a whole number from 2 to 2147483647",
            ),
            ("yarn", {"original_max_position_embeddings": 1}, "a whole number from 2 to"),
        )
    ),
    ("llama", {"rms_norm_eps": 1e300}, r"rms_norm_eps is 1e\+300; .*1e-30 to 1e30"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; a finite number, 0 or from"),
    ("llama", {"rms_norm_eps": 1e30}, r"norm_epsilon=1e\+30: from 0 to 1"),
    ("gpt2", {"layer_norm_epsilon": -1}, "layer_norm_epsilon is -1; a finite number, 0 or from"),
    ("gpt2", {"n_embd": 33}, "n_embd is 33; a multiple of n_head, which is 4"),
    ("gemma2", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; a finite number, 0"),
    ("gemma2", {"final_logit_softcapping": -30}, "final_logit_softcapping is -30; a finite"),
    ("gpt_oss", {"swiglu_limit": -7}, "swiglu_limit is -7; a finite number, 0 or"),
    ("mixtral", {"router_aux_loss_coef": -1}, "router_aux_loss_coef is -1; a finite number, 0"),
    ("qwen3", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4'"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; 1 for this family"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "rope factor is 0"),
    ("llama", scaled("yarn", factor=2.0, beta_slow=0), "rope beta_slow is 0; finite and above 0"),
    (
        "phi3",
        {"original_max_position_embeddings": 16}
        | scaled("longrope", short_factor=[1.0], long_factor=[1.0, 2.0, 3.0, 4.0]),
        "rope short_factor has 1 numbers for 4",
    ),
    ("gemma3_text", {"attn_logit_softcapping": 2.0}, "attn_logit_softcapping 2.0 is not supported"),
]


@pytest.mark.parametrize("family, changes, line", REFUSED, ids=[line for *_, line in REFUSED])
def test_what_a_family_does_not_have_is_refused_by_name(family, changes, line):
    content = CONFIG_MAPPING[family](**(GPT2 if family == "gpt2" else SIZES)).to_dict()
    with pytest.raises(ConfigError, match=line) as caught:
        from_hf(content | changes)
    assert "\n" not in str(caught.value)


def test_what_config_json_leaves_out_is_transformers_default():
    """And null is another thing than nothing, where transformers tells them apart."""
    content = CONFIG_MAPPING["olmo2"](**SIZES).to_dict()
    del content["rms_norm_eps"]
    assert from_hf(content).norm_epsilon == CONFIG_MAPPING["olmo2"]().rms_norm_eps
    content = CONFIG_MAPPING["mistral"](**SIZES).to_dict()
    windows = {}
    for how in ("null", "missing"):
        content["sliding_window"] = None
        if how == "missing":
            del content["sliding_window"]
        windows[how] = {kind.window for kind in from_hf(content).layer_kinds}
    assert windows == {"null": set(), "missing": {CONFIG_MAPPING["mistral"]().sliding_window}}
    content = CONFIG_MAPPING["smollm3"](**SIZES).to_dict() | {"num_key_value_heads": None}
    theirs = CONFIG_MAPPING["smollm3"](**SIZES | {"num_key_value_heads": None})
    assert from_hf(content).kv_heads == theirs.num_key_value_heads == 4


def test_an_untied_output_table_stands_for_no_embedding(tmp_path):
    from safetensors.numpy import save_file

    model("qwen2").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tensor 'model.embed_tokens.weight' is missing"):
        hjax.load_model(tmp_path)


def test_the_index_says_what_is_read(tmp_path):
    """Names beside it alone, and every tensor of it is there; without one model.safetensors is all,
    whatever else stands beside it."""
    from safetensors.numpy import save_file

    theirs = model("qwen2")
    theirs.save_pretrained(tmp_path)
    save_file({"layers.0.wq": np.zeros(2, np.float32)}, tmp_path / "consolidated.safetensors")
    np.testing.assert_allclose(
        hjax.load_model(tmp_path).logits(TOKENS), logits(theirs, TOKENS), rtol=2e-5, atol=2e-5
    )
    names = list(load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, line in (
        ({"a": 3}, "shard 3; the name of a file beside the index"),
        ({names[0]: "../whole.safetensors"}, "shard '../whole.safetensors'; the name of a file"),
        (dict.fromkeys([*names, "b"], "whole.safetensors"), "tensor 'b' of the index is not in"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ConfigError, match=line):
            hjax.load_model(tmp_path)


def test_a_single_file_beside_an_index_is_what_transformers_reads(tmp_path):
    model("qwen2").save_pretrained(tmp_path, max_shard_size="20KB")
    single = model("qwen2")
    with torch.no_grad():
        single.model.norm.weight.mul_(2)
    single.save_pretrained(tmp_path / "single")
    (tmp_path / "single" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = logits(theirs, TOKENS)
    np.testing.assert_allclose(expected, logits(single, TOKENS), atol=1e-6)
    np.testing.assert_allclose(hjax.load_model(tmp_path).logits(TOKENS), expected, atol=5e-5)


PREFIXED = {
    "module.": lambda name: f"module.{name}",
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "both wrappers": lambda name: f"_orig_mod.module.{name}",
    "compiled layers": lambda name: name.replace(".self_attn", "._orig_mod.self_attn"),
    "language_model.": lambda name: f"language_model.{name}",
    "model.language_model.": lambda name: name.replace("model.", "model.language_model."),
}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A sound directory, and its tensors."""
    folder = tmp_path_factory.mktemp("qwen2")
    model("qwen2").save_pretrained(folder)
    return folder, load_file(folder / "model.safetensors")


def written(folder, path, tensors):
    """A directory with other tensors."""
    from safetensors.numpy import save_file

    path.mkdir()
    (path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("prefix", PREFIXED)
def test_known_prefixes_of_names_are_taken_off(prefix, qwen2, tmp_path):
    folder, tensors = qwen2
    renamed = {PREFIXED[prefix](name): x for name, x in tensors.items()}
    assert not renamed.keys() & {"model.layers.0.self_attn.q_proj.weight"}
    path = written(folder, tmp_path / "model", renamed)
    _, params = load_weights(path)
    _, expected = load_weights(folder)
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_names_that_are_there_twice_or_have_an_unknown_prefix_are_refused(qwen2, tmp_path):
    folder, tensors = qwen2
    name = "model.layers.1.mlp.up_proj.weight"
    twice = tensors | {f"module.{name}": tensors[name]}
    with pytest.raises(ConfigError, match=f"tensor 'module.{name}' is not one of a qwen2 model"):
        load_weights(written(folder, tmp_path / "twice", twice))
    twice.pop(name)
    twice[f"_orig_mod.{name}"] = tensors[name]
    with pytest.raises(ConfigError, match=f"'(module|_orig_mod).{name}' is not one of a qwen2"):
        load_weights(written(folder, tmp_path / "both", twice))
    unknown = {f"policy.{n}": x for n, x in tensors.items()}
    line = "'model.embed_tokens.weight' is missing; 'policy.model.embed_tokens.weight' is there"
    with pytest.raises(ConfigError, match=line):
        load_weights(written(folder, tmp_path / "unknown", unknown))
    towers = {f"language_model.{n}": x for n, x in tensors.items()}
    towers["vision_tower.patches.weight"] = np.zeros(2, np.float32)
    with pytest.raises(ConfigError, match="tensor 'vision_tower.patches.weight' is not one of"):
        load_weights(written(folder, tmp_path / "towers", towers))


def test_learned_positions_have_an_end(tmp_path):
    from hjax.errors import DataError

    model("gpt2").save_pretrained(tmp_path)
    loaded = hjax.load_model(tmp_path)
    assert loaded.logits(np.zeros((1, 64), int)).shape[1] == 64
    for program in (loaded.logits, loaded.log_probs):
        with pytest.raises(DataError, match="65 tokens; this model has learned 64 positions"):
            program(np.zeros((1, 65), int))


def test_exports_and_runs_refuse_what_they_would_make_unusable(tmp_path, capsys):
    """A tokenizer with more ids than rows; a classifier's head, which no language model has."""
    from safetensors.numpy import save_file

    from hjax.data.tokenizer import Tokenizer
    from hjax.launch.export import main as export

    wide, judge = tmp_path / "wide", tmp_path / "judge"
    for path in (wide, judge):
        model("qwen2 tied").save_pretrained(path)
    Tokenizer.characters("".join(map(chr, range(33, 111)))).save(wide)
    tensors = load_file(judge / "model.safetensors")
    tensors["score.weight"] = np.zeros((1, 32), np.float32)
    save_file(tensors, judge / "model.safetensors")
    capsys.readouterr()
    for path, line in (
        (wide, "its tokenizer has ids up to"),
        (judge, "a sequence classifier's head"),
    ):
        assert export([f"--model={path}", f"--output={tmp_path / 'out'}"]) == 2
        said = capsys.readouterr().err.strip()
        assert line in said and "\n" not in said and not (tmp_path / "out").exists()
    changes = {"actor.path": str(wide), "tokenizer.path": str(wide), "data.task": ""}
    changes |= {"data.path": str(tmp_path / "asked.jsonl")}
    (tmp_path / "asked.jsonl").write_text('{"prompt": "A", "answer": "B"}\n' * 64)
    with pytest.raises(ConfigError, match="its tokenizer has ids up to 80, its embedding 47 rows"):
        hjax.Trainer(hjax.get_config("base.py", changes))


OWN = (pathlib.Path(hjax.__file__).parent / "models/families/olmo2.py").read_text()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file with OLMo 2's family under another name, and a model of transformers' that has it."""
    monkeypatch.setattr(families, "_user_families", {})
    file = tmp_path / "mine.py"
    text = OWN.replace("class Olmo2", "class Mine").replace('"olmo2"', '"mine"')
    file.write_text(text.replace("Olmo2ForCausalLM", "MineForCausalLM"))
    theirs = model("olmo2")
    theirs.save_pretrained(tmp_path / "model")
    path = tmp_path / "model/config.json"
    content = json.loads(path.read_text())
    path.write_text(
        json.dumps(content | {"model_type": "mine", "architectures": ["MineForCausalLM"]})
    )
    return f"{file}:Mine", tmp_path / "model", theirs


def test_a_family_in_a_file_of_ones_own_loads(mine, tmp_path, monkeypatch):
    spec, path, theirs = mine
    with pytest.raises(ConfigError, match="'mine' is not supported.*model.family=path.py:Class"):
        hjax.load_model(path)
    ours = hjax.load_model(path, family=spec)
    np.testing.assert_allclose(ours.logits(TOKENS), logits(theirs, TOKENS), rtol=2e-5, atol=5e-5)
    config, params = load_weights(path)
    save_weights(tmp_path / "ours", config, params)
    assert json.loads((tmp_path / "ours/config.json").read_text())["model_type"] == "mine"
    # In another process, which has the model's shapes alone.
    monkeypatch.setattr(families, "_user_families", {})
    assert families.family_of(ours.config).model_type == "mine"
    assert read_config(tmp_path / "ours") == ours.config


@pytest.mark.extended
def test_commands_take_one_too(mine, tmp_path, capsys):
    spec, path, theirs = mine
    with pytest.raises(ConfigError, match="--family='mine.py': it must look like path.py:name"):
        serve.parse([f"--model={path}", "--protocol=openai", "--family=mine.py"])
    shared = [f"--model={path}", f"--family={spec}"]
    assert export.main([*shared, f"--output={tmp_path}/out"]) == 0
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "mine"
    assert generate.main([*shared, "--prompt=3,4", "--max_new_tokens=2", "--temperature=0"]) == 0
    tokens = [3, 4]
    for _ in range(2):
        tokens.append(int(logits(theirs, np.array([tokens]))[0, -1].argmax()))
    assert f"3 4 → {tokens[2]} {tokens[3]}\n" in capsys.readouterr().out


@pytest.mark.extended
def test_a_run_trains_one_from_scratch(mine):
    spec, _, _ = mine
    changes = {"model.family": spec, "model.kv_heads": 2, "warm_start.steps": 0}
    trainer = hjax.Trainer(tiny_config("GRPO", changes))
    shape = trainer.roles.models["actor"]
    assert (shape.norms, shape.query_key_norm, shape.kv_heads) == ("after", "all", 2)
    assert np.isfinite(trainer.step()["actor/loss"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Mine: pass", "is no subclass of hjax.models.families.family.Family"),
        ("from hjax.models.families.llama import Llama as Mine", "its model_type is 'llama'"),
        ("Other = 1", "has no Mine"),
    ],
)
def test_what_is_no_family_is_refused(text, says, tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_user_families", {})
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=f"config.model.family=.*{says}"):
        tiny_config("PPO", {"model.family": f"{tmp_path}/mine.py:Mine"})
