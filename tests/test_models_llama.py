"""Hugging Face Llama directories, both ways, against transformers' own forward."""

import json
import re
import shutil
import tracemalloc

import jax
import numpy as np
import pytest
from references import LlamaConfig, LlamaForCausalLM, torch

import hjax
from hjax.data.tokenizer import Tokenizer
from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.models.families import from_hf
from hjax.models.huggingface import load_weights, save_weights
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network, to_host
from hjax.models.weights import load_decoder, load_params, read_config
from hjax.sharding.layout import make_layouts

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILY = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "one head per kv head": {"num_key_value_heads": 4},
    "one kv head": {"num_key_value_heads": 1},
    "own head_dim": {"head_dim": 12},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "rope_theta 500000": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "epsilon 1e-3": {"rms_norm_eps": 1e-3},
}
TOKENS = np.array(
    [[1, 5, 9, 2, 40, 3, 3, 17, 22, 31, 46, 0], [7, 7, 7, 1, 0, 2, 5, 44, 9, 8, 6, 12]]
)


def llama(**changes) -> LlamaForCausalLM:
    """A tiny Llama whose parameters are all random, norms included."""
    shapes = {
        "vocab_size": 47,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(shapes | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
    return model


def torch_logits(model: LlamaForCausalLM, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.double().numpy()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The untied model as transformers saves it."""
    path = tmp_path_factory.mktemp("llama") / "model"
    llama().save_pretrained(path)
    return path


# Another family has these in the test line, see families.py.
ELSEWHERE = ("one head per kv head", "one kv head", "own head_dim")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.extended] * (n in ELSEWHERE)) for n in FAMILY]
)
def test_logits_equal_transformers(name, tmp_path):
    theirs = llama(**FAMILY[name])
    theirs.save_pretrained(tmp_path)
    ours = hjax.load_model(tmp_path)
    expected = torch_logits(theirs, TOKENS)
    np.testing.assert_allclose(ours.logits(TOKENS), expected, rtol=2e-5, atol=2e-5)
    # [batch, length - 1]: of each token given those before it.
    shifted = expected[:, :-1] - np.log(np.exp(expected[:, :-1]).sum(-1, keepdims=True))
    picked = np.take_along_axis(shifted, TOKENS[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(ours.log_probs(TOKENS), picked, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["untied", "tied", "own head_dim", "llama3 rope"])
@pytest.mark.extended
def test_transformers_loads_what_we_save(name, tmp_path):
    llama(**FAMILY[name]).save_pretrained(tmp_path / "theirs")
    config, params = load_decoder(tmp_path / "theirs")
    save_weights(tmp_path / "ours", config, params)
    theirs, report = LlamaForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    np.testing.assert_allclose(
        torch_logits(theirs, TOKENS), hjax.load_model(tmp_path / "theirs").logits(TOKENS), atol=2e-5
    )


def test_a_model_created_here_survives_saving_bit_for_bit(tmp_path):
    config = ModelConfig(31, 16, 24, 2, 4, 2, 4, 32, tie_embeddings=False)
    layout = make_layouts(jax.devices()[:1]).train
    params = to_host(decoder_network(config).create(3, layout))
    save_weights(tmp_path, config, params)
    again, loaded = load_weights(tmp_path)
    assert again == config
    assert loaded.keys() == params.keys()
    np.testing.assert_array_equal(loaded["unembedding"], params["unembedding"])
    for name, value in params["layers"].items():
        np.testing.assert_array_equal(loaded["layers"][name], value)


def test_parameters_are_counted_as_torch_counts_them():
    for changes in FAMILY.values():
        theirs = llama(**changes)
        config = from_hf(theirs.config.to_dict())
        assert parameter_counts.parameter_count(config) == theirs.num_parameters()


def test_bfloat16_files_and_shards_load(tmp_path):
    theirs = llama().to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    _, params = load_decoder(tmp_path)
    assert params["embedding"].dtype == np.float32
    again = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    np.testing.assert_allclose(
        hjax.load_model(tmp_path).logits(TOKENS), torch_logits(again, TOKENS), atol=2e-5
    )


def test_one_parameter_at_a_time_is_in_memory_while_a_model_is_read(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 4096}
    llama(num_hidden_layers=6, **shape).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    network = decoder_network(config)
    layout = make_layouts(jax.devices()[:1]).train
    largest = 4 * max(parameter.size for parameter in jax.tree.leaves(network.declared))
    tracemalloc.start()
    params = load_params(tmp_path, network, layout)
    # NumPy's arrays; some that are left in the end are JAX's, which takes them over on a CPU.
    left, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tensor = 4 * 4096 * 256
    assert peak - left < largest + 1.5 * tensor < 0.6 * 4 * parameter_counts.parameter_count(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_bfloat16_compute_stays_close(directory):
    wide, narrow = hjax.load_model(directory), hjax.load_model(directory, dtype="bfloat16")
    exact = np.asarray(wide.log_probs(TOKENS))
    difference = np.abs(np.asarray(narrow.log_probs(TOKENS)) - exact)
    assert narrow.logits(TOKENS).dtype == np.float32
    assert 0 < difference.mean() < 0.02 * np.abs(exact).mean()


def config_with(**changes):
    def change(path):
        file = path / "config.json"
        content = {k: v for k, v in json.loads(file.read_text()).items() if k not in changes}
        content |= {key: value for key, value in changes.items() if value is not ...}
        file.write_text(json.dumps(content))

    return change


def without_weights(path):
    (path / "model.safetensors").unlink()


def truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_tensor(path):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"


def changed(name, change):
    def damage(path):
        from safetensors.numpy import load_file, save_file

        tensors = load_file(path / "model.safetensors")
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
        save_file(tensors, path / "model.safetensors")

    return damage


def without_a_shard(path):
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (path / "model.safetensors").rename(path / shards[0])
    index = {"weight_map": {"model.norm.weight": shards[0], UP: shards[1]}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_config(path):
    (path / "config.json").write_text('{"model_type": ')


REFUSALS = [
    (config_with(model_type="mamba"), "model_type 'mamba'.*supported: llama, qwen2"),
    (config_with(attention_bias=True), r"'model.layers.0.self_attn.\w_proj.bias' is missing"),
    (config_with(mlp_bias=True), r"'model.layers.0.mlp.\w+_proj.bias' is missing"),
    (config_with(residual_multiplier=2.0), "llama model with residual_multiplier=2.0 is not"),
    (config_with(dtype="int8"), "dtype 'int8' is not supported; supported: float32"),
    (config_with(hidden_act="gelu"), "hidden_act 'gelu'.*silu"),
    (config_with(hidden_size=...), "hidden_size is missing"),
    (config_with(vocab_size="many"), "vocab_size is 'many'"),
    (config_with(quantization_config={"quant_method": "gptq"}), "quantized"),
    (config_with(num_key_value_heads=3), "kv_heads=3 does not divide heads=4; it may be 1, 2, 4"),
    (config_with(rope_parameters={"rope_type": "spiral"}), "rope_type 'spiral'.*default, linear"),
    (config_with(rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' needs factor too"),
    (config_with(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope_scaling differ"),
    (config_with(rope_parameters={"rope_type": "llama3", "factor": 2.0}), "needs low_freq_factor"),
    (config_with(vocab_size=50), r"embed_tokens.weight has shape \(47, 32\).*\(50, 32\)"),
    (config_with(num_hidden_layers=4), r"'model.layers.3.\w+.*weight' is missing"),
    (broken_config, "config.json: not valid JSON"),
    (without_weights, "no \\*.safetensors files"),
    (without_tensor, "'model.layers.1.mlp.up_proj.weight' is missing"),
    (truncated, "model.safetensors: not a readable safetensors file"),
    (config_with(num_hidden_layers=2), "'model.layers.2.input_layernorm.weight' is not one of a"),
    (changed(UP, lambda x: x * np.nan), f"{UP} has values that are not finite"),
    (changed(UP, lambda x: x.astype(np.int8)), f"{UP} is of dtype I8; supported: float32"),
    (changed(UP, lambda x: x.T), rf"{UP} has shape \(32, 40\), config.json implies \(40, 32\)"),
    (config_with(tie_word_embeddings=True), "lm_head.weight differs from model.embed_tokens"),
    (without_a_shard, "shard 'model-00002-of-00002.safetensors' of its index is missing"),
]


@pytest.mark.parametrize("damage, line", REFUSALS, ids=[line[:30] for _, line in REFUSALS])
def test_an_unfit_directory_gets_one_line(damage, line, directory, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(directory, path)
    damage(path)
    with pytest.raises(ConfigError, match=line) as caught:
        hjax.load_model(path)
    assert "\n" not in str(caught.value)
    assert "kv_heads" in line or str(path) in str(caught.value)


def test_a_path_that_is_nothing_says_what_would_do(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("nothing-here") + ".*owner/name.*workdir"):
        hjax.load_model(tmp_path / "nothing-here")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no config.json there"):
        hjax.load_model(tmp_path / "empty")


def test_a_tokenizer_larger_than_the_embedding_is_refused(directory, tmp_path):
    shutil.copytree(directory, tmp_path / "model")
    Tokenizer.characters("".join(map(chr, range(65, 120)))).save(tmp_path / "model")
    with pytest.raises(ConfigError, match="its tokenizer has ids up to 57, its embedding 47 rows"):
        hjax.load_model(tmp_path / "model")


def test_an_unknown_dtype_is_refused(directory):
    with pytest.raises(ConfigError, match="dtype='float64'; allowed: float32, bfloat16"):
        hjax.load_model(directory, dtype="float64")
