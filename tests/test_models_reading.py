"""Weights go from their files onto devices a tensor at a time."""

import tracemalloc

import jax
import numpy as np
import pytest
from families import model
from safetensors.numpy import load_file

from hjax.models import huggingface
from hjax.models.parameters import decoder_network
from hjax.models.weights import load_params
from hjax.sharding.layout import make_layouts

WIDE = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 6, "vocab_size": 64}


@pytest.mark.parametrize("name", ["qwen3 tied", "gpt2", "phi3", "mixtral"])
@pytest.mark.parametrize("sizes", [{"data": 1}, {"fsdp": 2, "tensor": 2}, {"pipe": 3, "data": 1}])
@pytest.mark.extended
def test_every_device_gets_its_part_of_what_the_files_hold(tmp_path, name, sizes):
    even = {} if name == "gpt2" else {"num_key_value_heads": 2}
    vocab = {"vocab_size": 48} | ({"bos_token_id": 0, "eos_token_id": 0} if name == "gpt2" else {})
    model(name, **even, **vocab).save_pretrained(tmp_path)
    config, expected = huggingface.load_weights(tmp_path)
    count = int(np.prod(list(sizes.values())))
    layout = make_layouts(jax.devices()[:count], sizes).train
    found = load_params(tmp_path, decoder_network(config), layout)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    shardings = decoder_network(config).shardings(layout)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or 1 / 0, found, shardings)


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.extended
def test_the_host_holds_one_tensor_at_a_time(tmp_path, devices):
    model("qwen3 tied", **WIDE).save_pretrained(tmp_path)
    largest = max(x.nbytes for x in load_file(tmp_path / "model.safetensors").values())
    network = decoder_network(huggingface.read_config(tmp_path))
    layout = make_layouts(jax.devices()[:devices], {"fsdp": devices}).train
    load_params(tmp_path, network, layout)  # what is compiled stays
    tracemalloc.start()
    load_params(tmp_path, network, layout)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = max(4 * x.size for x in jax.tree.leaves(network.shapes))
    assert peak < 1.1 * largest
    assert 4 * largest < whole
