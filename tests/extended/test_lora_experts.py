"""Adapters of experts' matrices beside PEFT's: numbers, gradients, files both ways, refusals."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import MODELS, logits, model
from references import AutoModelForCausalLM, peft, torch
from safetensors.numpy import load_file, save_file
from test_lora import TOKENS, adapted, network_with, one_device, run
from test_lora_runs import slow

import hjax
from hjax.errors import ConfigError
from hjax.models import parameter_counts
from hjax.models.lora import Lora
from hjax.models.lora_compute import merge_adapters
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import parts
from hjax.models.parameters import decoder_network, to_host
from hjax.models.peft_files import CONFIG, WEIGHTS, save_adapter
from hjax.models.weights import load_params
from hjax.sharding.layout import make_layouts

ALL = ("q", "gate", "up", "down")
ARRAYS = {
    ALL: ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ("q", "down"): ["mlp.experts.down_proj"],
    ("q", "gate", "up"): ["mlp.experts.gate_up_proj"],
}
FAMILIES = ("mixtral", "qwen3 experts", "gpt-oss")


def with_experts(name, folder, targets=ALL, **options):
    """PEFT's model with random adapters of ``q_proj`` and of experts' arrays."""
    arrays = {"target_parameters": ARRAYS[targets]}
    return adapted(name, folder, ["q_proj"], **arrays, **options)


def loaded(folder, lora, layout=None):
    network = network_with(folder, lora)
    return network, load_params(folder / "adapter", network, layout or one_device())


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *(slow(name, ALL) if name == "mixtral" else (name, ALL) for name in FAMILIES),
        *(slow(name, targets) for name in FAMILIES for targets in list(ARRAYS)[1:]),
        slow("mixtral one of many", ALL),
    ],
)
def test_peft_has_the_same_numbers_and_gradients(tmp_path, name, targets):
    theirs = with_experts(name, tmp_path, targets)
    expected = logits(theirs, TOKENS)
    bare = logits(model(name), TOKENS)
    assert np.abs(expected - bare).max() > 0.1
    found = hjax.load_model(tmp_path / "adapter").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    network, params = loaded(tmp_path, Lora(3, 7.0, targets))
    apart = run(network, params)
    np.testing.assert_allclose(apart, expected, atol=1e-4)
    bound = 1e-5 * np.abs(expected).max()
    for plain in (merge_adapters(params, network), merge_adapters(to_host(params), network)):
        np.testing.assert_allclose(run(network.base, plain), apart, rtol=0, atol=bound)
    found = run(network.base, network.without_adapters_of(params))
    np.testing.assert_allclose(found, bare, atol=1e-4)

    weights = np.sin(np.arange(47.0)).astype(np.float32)
    scores = torch.log_softmax(theirs.train()(torch.tensor(TOKENS)).logits, -1)
    (scores @ torch.tensor(weights)).mean().backward()
    learned, frozen = network.partition.split(params)

    def loss(learned):
        scores = jax.nn.log_softmax(run(network, network.partition.join(learned, frozen)))
        return jnp.mean(scores @ weights)

    grads = jax.jit(jax.grad(loss))(learned)["layers"]
    theirs = {key: x.grad.numpy() for key, x in theirs.named_parameters() if x.grad is not None}
    for each, values in grads.items():
        for part in parts(network.declared["layers"][each]):
            key = f"base_model.model.{part.name}".removesuffix(".weight") + ".default.weight"
            bound = 1e-4 * max(1, np.abs(theirs[key]).max())
            np.testing.assert_allclose(part.read(theirs[key]), values[part.at], atol=bound)


@pytest.mark.parametrize(
    ("name", "targets", "rslora"),
    [
        ("qwen3 experts", ALL, False),
        ("gpt-oss", ALL, True),
        slow("mixtral", ALL, False),
        slow("mixtral", ("q", "gate", "up"), True),
        slow("qwen3 experts", ("q", "down"), False),
    ],
)
def test_they_go_to_peft_and_back_bit_for_bit(tmp_path, name, targets, rslora):
    theirs = with_experts(name, tmp_path, targets, use_rslora=rslora)
    network, params = loaded(tmp_path, Lora(3, 7.0, targets, rslora))
    learned, _ = network.partition.split(to_host(params))
    base = str(tmp_path / "base")
    save_adapter(tmp_path / "ours", network.declared, learned, network.config.lora, base)
    before, after = (load_file(tmp_path / x / WEIGHTS) for x in ("adapter", "ours"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor)
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(plain, tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits(again, TOKENS), logits(theirs, TOKENS))


@pytest.mark.parametrize("name", ["qwen3 experts", slow("mixtral")])
def test_files_with_adapters_of_each_expert_are_read_merged(tmp_path, name):
    """As PEFT wrote them beside transformers 4, where experts were modules."""
    theirs = with_experts(name, tmp_path, rank=3)
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    qwen = MODELS[name][0] == "qwen3_moe"
    at = "mlp.experts" if qwen else "block_sparse_moe.experts"
    names = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    config |= {"target_modules": list(names), "target_parameters": None}
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(3):
        experts = theirs.base_model.model.model.layers[layer].mlp.experts
        for expert in range(experts.num_experts):
            for number, module in enumerate(names):
                sizes = (32, experts.get_base_layer().intermediate_dim)
                into, out = sizes if number < 2 else sizes[::-1]
                key = f"base_model.model.model.layers.{layer}.{at}.{expert}.{module}"
                for part, shape in (("A", (3, into)), ("B", (out, 3))):
                    drawn = 0.2 * rng.normal(size=shape)
                    tensors[f"{key}.lora_{part}.weight"] = drawn.astype(np.float32)
    (tmp_path / "adapter" / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    expected = logits(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval(), TOKENS)
    assert np.abs(expected - logits(model(name), TOKENS)).max() > 0.1
    found = hjax.load_model(tmp_path / "adapter").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    with pytest.raises(ConfigError, match="is of one expert, as beside transformers 4; such"):
        loaded(tmp_path, Lora(3, 7.0, ("gate", "up", "down")))


@pytest.mark.parametrize(
    "sizes, fsdp",
    [
        # Four experts over four devices, or their width where that is not to be.
        ({"expert": 2, "fsdp": 2}, {"gate_up_a": (3, 1, 32, 3), "down_b": (3, 1, 3, 32)}),
        ({"expert": 2, "fsdp": 4}, {"gate_up_a": (3, 2, 8, 3), "down_b": (3, 2, 3, 8)}),
    ],
    ids=["experts", "width"],
)
def test_each_device_has_its_experts_adapters(tmp_path, sizes, fsdp):
    with_experts("gpt-oss one expert", tmp_path)
    layout = make_layouts(jax.devices()[: math.prod(sizes.values())], sizes).train
    network, here = loaded(tmp_path, Lora(3, 7.0, ALL))
    _, there = loaded(tmp_path, Lora(3, 7.0, ALL), layout)
    jax.tree.map(np.testing.assert_array_equal, here, there)
    layers = there["layers"]
    local = {n: x.sharding.shard_shape(x.shape) for n, x in layers.items()}
    expected = {"gate_up_b": (3, 2, 3, 2, 40), "down_a": (3, 2, 40, 3), **fsdp}
    assert {name: local[name] for name in expected} == expected
    config = network.config
    each = (32 * 3 + 3 * 2 * 40) + (40 * 3 + 3 * 32)
    attention = 32 * 3 + 3 * 32
    assert parameter_counts.learned_parameters(config) == 3 * (4 * each + attention)
    assert parameter_counts.active_layer_parameters(
        config
    ) == parameter_counts.active_layer_parameters(network.base.config)


def test_an_update_makes_no_gradient_of_what_is_frozen():
    """By the compiler: two thirds of the products of an update of all weights, and a bit."""
    config = ModelConfig(31, 32, 128, 2, 4, 2, 8, 32, experts=4, experts_per_token=2)
    config = dataclasses.replace(config, family="mixtral", lora=Lora(1, 4.0, ALL))
    network = decoder_network(config)

    def flops(split):
        def loss(some, others):
            return jnp.mean(run(network, network.partition.join(*split(some, others))) ** 2)

        parts = split(*network.partition.split(network.shapes))
        program = jax.jit(jax.grad(loss)).lower(*parts).compile()
        return program.cost_analysis()["flops"]

    thin = flops(lambda learned, frozen: (learned, frozen))
    whole = flops(lambda some, others: (others, some))
    assert 0.6 < thin / whole < 0.75


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (Lora(2, 4.0, ("q", "gate")), "lora.targets=q,gate: an expert's gate and up have one"),
        (Lora(2, 4.0, ALL, dropout=0.1), "lora.dropout=0.1: adapters of experts' matrices have no"),
        (Lora(2, 4.0, ALL, dora=True), "lora.dora=True: adapters of experts' matrices have no"),
    ],
)
def test_what_peft_has_not_is_refused_in_one_line(tmp_path, lora, said):
    model("mixtral").save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError) as error:
        network_with(tmp_path, lora)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    with_experts("qwen3 experts", folder)
    return folder


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (Lora(2, 7.0, ALL), "lora.rank=2 and the base imply (12, 24)"),
        (Lora(3, 8.0, ALL), "lora.alpha=8 with rank 3 by 2.66667; set lora.alpha"),
        (Lora(3, 7.0, ("q",)), "experts.base_layer.lora_A.weight' is not among lora.targets"),
        (Lora(3, 7.0, ("q", "gate", "up")), "experts.base_layer.lora_A.weight' is not among lora"),
    ],
)
def test_training_goes_on_only_from_adapters_of_the_same_form(sound, lora, said):
    with pytest.raises(ConfigError) as error:
        load_params(sound / "adapter", network_with(sound, lora), one_device())
    assert said in str(error.value)


@pytest.mark.parametrize(
    "shapes",
    [((15, 32), (48, 15)), ((18, 30), (48, 18)), ((18, 32), (50, 18)), ((17, 32), (48, 17))],
)
def test_adapters_of_other_experts_are_named(sound, tmp_path, shapes):
    inner = "base_model.model.model.layers.1.mlp.experts.base_layer.lora_"
    (tmp_path / "adapter").mkdir()
    tensors = load_file(sound / "adapter" / WEIGHTS)
    for part, shape in zip("AB", shapes):
        tensors[f"{inner}{part}.weight"] = np.zeros(shape, np.float32)
    save_file(tensors, tmp_path / "adapter" / WEIGHTS)
    (tmp_path / "adapter" / CONFIG).write_text((sound / "adapter" / CONFIG).read_text())
    with pytest.raises(ConfigError, match="these adapters are for another base"):
        hjax.load_model(tmp_path / "adapter")
