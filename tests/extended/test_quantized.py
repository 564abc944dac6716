"""Frozen bases of one byte per element: rounding by formula, transformers' numbers, runs."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from families import MODELS, logits, model
from helpers import computed, save_model, tiny_config, trainer_of
from references import peft, torch
from test_lora import ASKED, TOKENS, adapted, network_with, one_device, run
from test_lora_experts import ALL as EXPERTS
from test_lora_experts import FAMILIES, with_experts
from test_lora_runs import AHEAD, LORA, slow

import hjax
from hjax.dryrun.programs import abstract_workers, step_programs
from hjax.errors import ConfigError
from hjax.models import huggingface
from hjax.models.attention_strategies import Causal
from hjax.models.compute import Compute
from hjax.models.cost_inputs import model_counts
from hjax.models.lora import Lora
from hjax.models.lora_compute import merge_adapters
from hjax.models.parameters import decoder_network
from hjax.models.peft_files import Adapter
from hjax.models.quantized import quantize
from hjax.models.weights import load_params
from hjax.sharding.layout import make_layouts
from hjax.workers.memory import RoleMemory

LARGEST = {"int8": 127, "float8_e4m3fn": 448}
INT8 = {**LORA, "actor.lora.base": "int8"}
EVENS = {
    "reward.function": f"{pathlib.Path(__file__).parents[1] / 'evens_reward.py'}:evens",
    "rollout.samples": 8,
    "actor.learning_rate": 0.02,
}


@pytest.mark.parametrize("over", [(0,), (1,), (1, 2)])
@pytest.mark.parametrize("dtype", list(LARGEST))
def test_rounding_is_by_half_a_step_at_most(dtype, over):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 40, 8)) * rng.lognormal(0, 3, size=(300, 40, 1))
    values = values.astype(ml_dtypes.bfloat16)
    values[:, 3], values[7] = 0, 0
    small, scale = quantize(values, over, dtype)
    assert small.dtype == dtype and scale.dtype == np.float32 and small.shape == values.shape
    most = np.abs(values.astype(np.float64)).max(axis=over, keepdims=True)
    step = most / LARGEST[dtype]
    np.testing.assert_allclose(np.expand_dims(scale, over), step, rtol=1e-6, atol=1e-37)
    found = small.astype(np.float64) * np.expand_dims(scale, over)
    exact = values.astype(np.float64)
    if dtype == "int8":
        bound = step / 2
    else:  # three bits after the first, down to 2**-6; below steps of 2**-9
        bound = np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * step)
    assert (np.abs(found - exact) <= bound * (1 + 1e-5) + 1e-37).all()
    assert (np.abs(found - exact) > bound / 2).mean() > 0.1  # and not much finer either
    at = np.abs(exact) == most
    np.testing.assert_allclose(found[at], exact[at], rtol=1e-6)


def dequantize(module, form):
    """Round a torch model's layers' matrices as ``form`` holds them, in torch."""
    from transformers.pytorch_utils import Conv1D

    for each in module.model.layers if hasattr(module, "model") else module.transformer.h:
        for part in each.modules():
            if isinstance(part, torch.nn.Linear | Conv1D):
                part.weight.data = rounded(
                    part.weight.data, 0 if isinstance(part, Conv1D) else 1, form
                )
            for name in ("gate_up_proj", "down_proj"):  # of experts
                weight = getattr(part, name, None)
                if isinstance(weight, torch.nn.Parameter):
                    weight.data = rounded(weight.data, 1 if part.is_transposed else 2, form)


def rounded(weight, over, form):
    most = weight.abs().amax(dim=over, keepdim=True)
    if form == "int8":
        scale = most / 127
        return torch.round(weight / scale) * scale
    scale = most / 448
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def quantized_network(folder, form, lora):
    config = network_with(folder, lora).config
    return decoder_network(dataclasses.replace(config, quantized=form))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3 tied", "int8"),
        ("gpt2", "fp8"),
        ("gpt-oss", "int8"),
        ("qwen3 experts", "fp8"),
        slow("mixtral", "int8"),
        slow("gpt-oss", "fp8"),
        slow("phi3", "int8"),
        slow("gemma3", "fp8"),
        slow("olmo2", "int8"),
    ],
)
def test_a_quantized_base_gives_transformers_numbers_of_its_weights(tmp_path, name, form):
    name = next(n for n in MODELS if n == name or MODELS[n][0] == name)
    experts = name in FAMILIES
    theirs = with_experts(name, tmp_path) if experts else adapted(name, tmp_path)
    exact = logits(theirs, TOKENS)
    with_base = peft.PeftModel.from_pretrained
    plain = model(name)
    dequantize(plain, form)
    expected_base = logits(plain, TOKENS)
    expected = logits(with_base(plain, tmp_path / "adapter").eval(), TOKENS)
    assert np.abs(expected - exact).max() > 1e-3
    targets = ASKED.get(MODELS[name][0], (0, ("q", "v", "o", "gate", "down")))[1]
    targets = EXPERTS if experts else targets
    network = quantized_network(tmp_path, form, Lora(3, 7.0, targets))
    params = load_params(tmp_path / "adapter", network, one_device())
    np.testing.assert_allclose(run(network, params), expected, atol=1e-4)
    bare = run(network.bare, network.bare_of(params))
    np.testing.assert_allclose(bare, expected_base, atol=1e-4)
    floats = merge_adapters(params, network)
    assert jax.tree.map(lambda x: x.shape, floats) == jax.tree.map(
        lambda x: x.shape, network.base.shapes
    )
    np.testing.assert_allclose(run(network.base, floats), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qwen3 tied", "fp8"),
        ("mixtral", "int8"),
        slow("qwen3 tied", "int8"),
        slow("gpt-oss", "fp8"),
    ],
)
def test_gradients_are_those_beside_the_dequantized_base(tmp_path, name, form):
    if name in FAMILIES:
        with_experts(name, tmp_path)
        lora = Lora(3, 7.0, EXPERTS)
    else:
        adapted(name, tmp_path)
        lora = Lora(3, 7.0, ("q", "v", "o", "gate", "down"))
    network = quantized_network(tmp_path, form, lora)
    params = load_params(tmp_path / "adapter", network, one_device())
    learned, frozen = network.partition.split(params)
    floats = network_with(tmp_path, lora)
    off = jax.tree.map(jnp.zeros_like, learned)  # adding nothing
    plain = merge_adapters(network.partition.join(off, frozen), network)

    def loss(network, learned, frozen):
        joined = network.partition.join(learned, frozen)
        return jnp.mean(jax.nn.log_softmax(run(network, joined)) @ jnp.sin(jnp.arange(47.0)))

    found = jax.jit(jax.grad(functools.partial(loss, network)))(learned, frozen)
    expected = jax.jit(jax.grad(functools.partial(loss, floats)))(learned, plain)
    assert float(jnp.abs(expected["layers"]["q_a"]).max()) > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("", {"fsdp": 2, "tensor": 2}),
        slow("phi3", {"data": 1, "fsdp": 4}),
        ("gpt-oss one expert", {"expert": 2, "fsdp": 2}),
        slow("mixtral one of many", {"expert": 4}),
    ],
)
def test_a_base_is_the_same_on_every_layout(tmp_path, name, sizes):
    if name:
        model(name).save_pretrained(tmp_path / "base")
    else:
        save_model(tmp_path / "base")
    network = quantized_network(tmp_path, "int8", Lora(2, 4.0))
    layout = make_layouts(jax.devices()[:4], sizes).train
    here = load_params(tmp_path / "base", network, one_device())
    there = load_params(tmp_path / "base", network, layout)
    jax.tree.map(np.testing.assert_array_equal, here, there)
    placed = there["layers"]["gate_up"], there["layers"]["gate_up_scale"]
    specs = [x.sharding.spec for x in placed]
    assert placed[0].dtype == jnp.int8 and placed[1].dtype == jnp.float32
    inputs = network.declared["layers"]["gate_up"].names.index("embed")
    outputs = [x for i, x in enumerate(specs[0]) if i != inputs]
    whole = [(x, "fsdp") if x == "expert" else x for x in specs[1]]  # experts that FSDP splits too
    assert outputs in (list(specs[1]), whole)


@pytest.mark.parametrize("changes", [slow({}), slow({"actor.lora.base": "fp8", **AHEAD})])
def test_a_run_learns_and_resumes_bit_for_bit(base, tmp_path, changes):
    changes = {"actor.path": base, **INT8, **EVENS, "checkpoint.every": 3, **changes}
    with trainer_of("GRPO", {**changes, "steps": 12}, tmp_path / "whole") as trainer:
        whole = [computed(row) for row in trainer.run()]
    with trainer_of("GRPO", {**changes, "steps": 6}, tmp_path / "two") as trainer:
        trainer.run()
    with trainer_of("GRPO", {**changes, "steps": 12}, tmp_path / "two") as trainer:
        rest = [computed(row) for row in trainer.run()]
    assert rest == whole[6:]
    rewards = [row["reward/mean"] for row in whole]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.05
    folder = tmp_path / "two" / "checkpoints" / "12"
    assert {p.name for p in folder.iterdir()} == {
        "actor.params", "actor.optimizer", "controller.json",
    }  # fmt: skip


def test_what_a_run_learned_goes_out_as_it_generated(base, tmp_path):
    changes = {"actor.path": base, **INT8, "checkpoint.every": 1, "steps": 2}
    with trainer_of("GRPO", changes, tmp_path / "run") as trainer:
        trainer.run()
        trainer.export(tmp_path / "merged")
        trainer.export(tmp_path / "adapter", adapter=True)
        actor = trainer.roles.groups["actor"].worker
        with actor.generation_weights() as params:
            generated = jax.tree.map(np.asarray, params)
    _, of_workdir = hjax.models.weights.load_decoder(tmp_path / "run")
    _, of_export = hjax.models.weights.load_decoder(tmp_path / "merged")
    for found in (of_workdir, of_export):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, generated)
    exact = hjax.models.weights.load_decoder(base)[1]["layers"]["q"]
    assert np.abs(of_export["layers"]["q"] - exact).max() > 1e-4
    assert Adapter(tmp_path / "adapter").base == base


def test_a_matrix_takes_a_byte_per_element(base):
    def held(**changes):
        with trainer_of("GRPO", {"actor.path": base, **LORA, **changes}) as trainer:
            trainer.prepare()
            actor = trainer.roles.groups["actor"].worker
            bytes_of = {name: x.nbytes for name, x in actor.params["layers"].items()}
            rehearsal = abstract_workers(trainer.roles, trainer.machines.devices)
            of = trainer.config, trainer.algorithm_class, rehearsal, trainer.inputs.prompt_length
            [update] = [p for p in step_programs(*of)[0] if p.name == "update"]
            used = update.program.trace().lower().compile().memory_analysis()
            total = sum(x.nbytes for x in jax.tree.leaves(actor.params))
            estimate = RoleMemory.from_worker(actor).memory.resident(trained=False)
            assert estimate == total
            counted = model_counts(actor.network.config).bytes_each
            small = (x.size for x in jax.tree.leaves(actor.params) if x.dtype.itemsize == 1)
            assert counted == sum(small)
            return bytes_of, total, used.argument_size_in_bytes

    layers, total, arguments = held(**{"actor.lora.base": "int8"})
    floats, more, arguments_before = held()
    saved = 0
    for name in ("q", "kv", "o", "gate_up", "down"):
        assert layers[name] * 4 == floats[name]
        saved += floats[name] - layers[name] - layers[f"{name}_scale"]
    assert more - total == saved > 0
    assert arguments_before - arguments == saved  # by the compiler
    assert layers["q_scale"] == 2 * 32 * 4 and layers["gate_up_scale"] == 2 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor.lora.base": "int4"}, "actor.lora.base='int4'"),
        ({"actor.lora.base": "int8"}, "config.actor.lora.base=int8 quantizes weights as they are"),
        (
            {"actor.lora.base": "int8", "actor.lora.rank": 0, "actor.lora.alpha": 32.0},
            "config.actor.lora.base='int8' is for adapters, of which config.actor.lora.rank=0",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(changes, said):
    with pytest.raises(ConfigError) as error:
        hjax.Trainer(tiny_config("GRPO", {**LORA, **changes}))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("experts", [0, 6])
def test_no_layers_stack_is_made_of_floats(experts):
    """Neither a forward nor a backward pass through scanned layers keeps a cast copy of them."""
    config = huggingface.ModelConfig(31, 16, 24, 5, 4, 2, 4, 32)
    config = dataclasses.replace(config, lora=Lora(2, 4.0), quantized="int8")
    if experts:
        more = {"experts": experts, "experts_per_token": 2, "family": "mixtral"}
        config = dataclasses.replace(config, **more)
    network = decoder_network(config)

    def loss(learned, frozen):
        decoder = network.bind(network.partition.join(learned, frozen))
        mask = jnp.ones(TOKENS.shape, bool)
        positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
        compute = Compute(kernel_set="backward")
        return jnp.mean(decoder.hidden_states(TOKENS, positions, Causal(mask), compute) ** 2)

    parts = network.partition.split(network.shapes)
    text = jax.jit(jax.grad(loss)).lower(*parts).compile().as_text()
    for name in ("q", "kv", "o", "gate_up", "down"):
        shape = ",".join(map(str, network.shapes["layers"][name].shape))
        assert f"s8[{shape}]" in text and f"f32[{shape}]" not in text


def test_values_that_are_not_read_are_not_drawn(tmp_path):
    config = huggingface.ModelConfig(31, 16, 24, 2, 4, 2, 4, 32)
    network = decoder_network(dataclasses.replace(config, lora=Lora(2, 4.0), quantized="int8"))
    with pytest.raises(ConfigError, match="a base in int8 is read from a path, not drawn"):
        network.create(0, one_device())
