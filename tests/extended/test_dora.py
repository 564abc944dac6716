"""DoRA beside PEFT's: numbers, gradients, files both ways, runs, what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import MODELS, logits, model
from helpers import computed, tiny_config, trainer_of
from references import AutoModelForCausalLM, peft, torch
from safetensors.numpy import load_file
from test_lora import BROKEN, FIRST, TOKENS, adapted, network_with, one_device, run
from test_lora import tensors as rewritten
from test_lora_runs import LORA, slow
from test_quantized import dequantize, quantized_network

import hjax
from hjax.errors import ConfigError
from hjax.models.lora import Lora
from hjax.models.lora_compute import merge_adapters
from hjax.models.parameter_spec import parts
from hjax.models.parameters import to_host
from hjax.models.peft_files import WEIGHTS, save_adapter
from hjax.models.weights import load_params

TARGETS = ("q", "v", "o", "gate", "down")
DORA = {**LORA, "actor.lora.dora": True}


def with_magnitudes(name, folder):
    """PEFT's model with random adapters, and magnitudes that are not norms any more."""
    return moved(adapted(name, folder, use_dora=True), folder)


def moved(theirs, folder):
    """The same with magnitudes that are not norms any more, saved again."""
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "magnitude" in key:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape))
    theirs.save_pretrained(folder / "adapter")
    return theirs


def loaded(folder, lora, name="adapter", quantized=""):
    network = quantized_network(folder, quantized, lora)
    return network, load_params(folder / name, network, one_device())


@pytest.mark.parametrize("name", ["qwen3 tied", slow("gemma3"), slow("olmo2"), slow("qwen2")])
def test_peft_has_the_same_numbers_and_gradients(tmp_path, name):
    theirs = with_magnitudes(name, tmp_path)
    expected = logits(theirs, TOKENS)
    network, params = loaded(tmp_path, Lora(3, 7.0, TARGETS, dora=True))
    np.testing.assert_allclose(run(network, params), expected, atol=1e-4)
    for plain in (merge_adapters(params, network), merge_adapters(to_host(params), network)):
        np.testing.assert_allclose(run(network.base, plain), expected, atol=1e-4)
    found = hjax.load_model(tmp_path / "adapter").logits(TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    bare = run(network.without_adapters, network.without_adapters_of(params))
    np.testing.assert_allclose(bare, logits(model(name), TOKENS), atol=1e-4)

    weights = np.sin(np.arange(47.0)).astype(np.float32)
    scores = torch.log_softmax(theirs.train()(torch.tensor(TOKENS)).logits, -1)
    (scores @ torch.tensor(weights)).mean().backward()
    learned, frozen = network.partition.split(params)

    def loss(learned):
        scores = jax.nn.log_softmax(run(network, network.partition.join(learned, frozen)))
        return jnp.mean(scores @ weights)

    grads = jax.jit(jax.grad(loss))(learned)["layers"]
    theirs = {key: x.grad.numpy() for key, x in theirs.named_parameters() if x.grad is not None}
    assert set(grads) == {f"{n}_{x}" for n in ("q", "kv", "o", "gate_up", "down") for x in "abm"}
    for each, values in grads.items():
        for part in parts(network.declared["layers"][each]):
            key = f"base_model.model.{part.name}".removesuffix(".weight") + ".default.weight"
            bound = 1e-4 * max(1, np.abs(theirs[key]).max())
            np.testing.assert_allclose(part.read(theirs[key]), values[part.at], atol=bound)


def test_they_go_to_peft_and_back_bit_for_bit(tmp_path):
    theirs = with_magnitudes("qwen2", tmp_path)
    network, params = loaded(tmp_path, Lora(3, 7.0, TARGETS, dora=True))
    learned, _ = network.partition.split(to_host(params))
    lora = network.config.lora
    save_adapter(tmp_path / "ours", network.declared, learned, lora, str(tmp_path / "base"))
    before, after = (load_file(tmp_path / x / WEIGHTS) for x in ("adapter", "ours"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(after[key], tensor)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    np.testing.assert_array_equal(logits(again, TOKENS), logits(theirs, TOKENS))


@pytest.mark.parametrize("form", ["", slow("int8")])
def test_magnitudes_start_as_norms_and_change_nothing(tmp_path, form):
    name = "qwen3 tied"
    model(name).save_pretrained(tmp_path / "base")
    network, params = loaded(tmp_path, Lora(3, 7.0, ("v", "down"), dora=True), "base", form)
    plain = model(name)
    if form:
        dequantize(plain, form)
    np.testing.assert_allclose(run(network, params), logits(plain, TOKENS), atol=1e-4)
    weight = plain.model.layers[1].self_attn.v_proj.weight.detach().numpy()
    found = np.asarray(params["layers"]["kv_m"])
    assert found.shape[:2] == (3, 1)
    np.testing.assert_allclose(found[1, 0].ravel(), np.linalg.norm(weight, axis=1), rtol=1e-5)
    assert MODELS[name][0] == "qwen3"


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_goes_out(base, tmp_path):
    changes = {"actor.path": base, **DORA, "checkpoint.every": 1}
    with trainer_of("GRPO", {**changes, "steps": 3}, tmp_path / "whole") as trainer:
        whole = [computed(row) for row in trainer.run()]
    with trainer_of("GRPO", {**changes, "steps": 2}, tmp_path / "two") as trainer:
        trainer.run()
    with trainer_of("GRPO", {**changes, "steps": 3}, tmp_path / "two") as trainer:
        rest = [computed(row) for row in trainer.run()]
        trainer.export(tmp_path / "adapter", adapter=True)
        trainer.export(tmp_path / "merged")
        magnitudes = np.asarray(trainer.roles.groups["actor"].worker.params["layers"]["q_m"])
    assert rest == whole[2:]
    start = np.linalg.norm(hjax.models.weights.load_decoder(base)[1]["layers"]["q"], axis=1)
    assert 0.1 > np.abs(magnitudes - start).max() > 1e-3
    tokens = np.arange(3, 12)[None]
    expected = hjax.load_model(tmp_path / "two").logits(tokens)
    for name in ("adapter", "merged"):
        found = hjax.load_model(tmp_path / name).logits(tokens)
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "config.actor.lora.dora=True starts from the norms of weights that are read; give"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(changes, said):
    with pytest.raises(ConfigError) as error:
        hjax.Trainer(tiny_config("GRPO", {**DORA, **changes}))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_tensors_of_several_matrices_are_refused_and_other_forms_named(tmp_path):
    model("phi3").save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"lora.dora: files of this family have several matrices"):
        network_with(tmp_path, Lora(3, 7.0, dora=True))
    with_magnitudes("qwen2", tmp_path)
    with pytest.raises(ConfigError, match="use_dora=True, lora.dora is False; set lora.dora=true"):
        loaded(tmp_path, Lora(3, 7.0, TARGETS))
    magnitude = FIRST.replace(".lora_A.weight", ".lora_magnitude_vector")
    rewritten(lambda x: {k: v for k, v in x.items() if k != magnitude})(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"q_proj.lora_magnitude_vector' is missing"):
        hjax.load_model(tmp_path / "adapter")
    assert dataclasses.asdict(Lora(3, 7.0))["dora"] is False and "DoRA" not in BROKEN
