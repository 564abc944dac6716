"""Dropout of adapters' inputs: PEFT's numbers under the same masks, layouts, updates alone."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import model
from helpers import computed, trainer_of
from references import peft, torch
from test_dora import moved
from test_lora import TOKENS, adapted, network_with, one_device
from test_lora_runs import LORA, slow
from test_quantized import dequantize, quantized_network

from hjax.errors import ConfigError
from hjax.models.attention_strategies import Causal
from hjax.models.compute import Compute
from hjax.models.dropout import Dropout
from hjax.models.lora import TARGETS, Lora
from hjax.models.parameter_spec import parts
from hjax.models.peft_files import CONFIG, save_adapter
from hjax.models.weights import load_params

RATE = 0.4
DROPS = {**LORA, "actor.lora.dropout": 0.3}


def masks(row, positions, layer, target, features):
    """bool [1, length, features], each token's drawn for itself as the module says."""
    kept = []
    for key, position in zip(row, positions, strict=True):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        for number in (position, layer, TARGETS.index(target)):
            key = jax.random.fold_in(key, int(number))
        kept.append(np.asarray(jax.random.uniform(key, (features,)) < 1 - RATE))
    return np.stack(kept)


def masked(kept):
    class Masked(torch.nn.Module):
        def forward(self, x):
            return torch.where(torch.tensor(kept), x / (1 - RATE), 0.0)

    return Masked()


@pytest.mark.parametrize("unroll", [False, slow(True)])
@pytest.mark.parametrize(
    ("name", "dora", "form"),
    [
        ("qwen3 tied", False, ""),
        ("qwen3 tied", True, ""),
        slow("qwen3 tied", True, "int8"),
        slow("phi3", False, ""),
        slow("gemma3", False, ""),
        slow("gemma3", True, "fp8"),
        slow("qwen2", True, ""),
    ],
)
def test_under_the_same_masks_peft_has_the_same_loss_and_gradient(
    tmp_path, name, dora, form, unroll
):
    fused = name == "phi3"
    targets = ("down",) if fused else ("q", "v", "o", "gate", "up", "down")
    wanted = [f"{target}_proj" for target in targets]
    theirs = adapted(name, tmp_path, wanted, lora_dropout=RATE, use_dora=dora)
    if dora:
        moved(theirs, tmp_path)
    if form:
        plain = model(name)
        dequantize(plain, form)
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter", is_trainable=True)
    theirs.train()
    lora = Lora(3, 7.0, targets, dropout=RATE, dora=dora)
    network = quantized_network(tmp_path, form, lora)
    params = load_params(tmp_path / "adapter", network, one_device())
    rows, length = TOKENS.shape
    keys = np.random.default_rng(0).integers(0, 2**32, (rows, length, 2), np.uint32)
    positions = np.tile(np.arange(length), (rows, 1))
    for module, layer in theirs.named_modules():
        if hasattr(layer, "lora_dropout"):
            number, target = int(module.split(".layers.")[1].split(".")[0]), module.split(".")[-1]
            target = target.removesuffix("_proj")
            of = number, target, layer.in_features
            kept = [masks(keys[row], positions[row], *of) for row in range(rows)]
            layer.lora_dropout["default"] = masked(np.stack(kept))
    weights = np.sin(np.arange(47.0)).astype(np.float32)
    scores = torch.log_softmax(theirs(torch.tensor(TOKENS)).logits, -1) @ torch.tensor(weights)
    scores.mean().backward()
    expected = {key: x.grad.numpy() for key, x in theirs.named_parameters() if x.grad is not None}
    learned, frozen = network.partition.split(params)

    def loss(learned):
        decoder = network.bind(network.partition.join(learned, frozen))
        compute = Compute(dropout=Dropout.of(jnp.asarray(keys), positions), unroll_layers=unroll)
        attention = Causal(jnp.ones(TOKENS.shape, bool))
        states = decoder.hidden_states(TOKENS, positions, attention, compute)
        return jnp.mean(jax.nn.log_softmax(decoder.logits(states)) @ weights)

    value, found = jax.jit(jax.value_and_grad(loss))(learned)
    np.testing.assert_allclose(value, scores.mean().item(), atol=1e-5)
    of = network.declared["layers"]
    for name, grads in found["layers"].items():
        for part in parts(of[name]):
            key = f"base_model.model.{part.name}".removesuffix(".weight") + ".default.weight"
            bound = 5e-5 * max(1, np.abs(expected[key]).max())
            np.testing.assert_allclose(part.read(expected[key]), grads[part.at], atol=bound)


def test_updates_alone_drop_something(base):
    """Scores are those of the same adapters without dropout; only gradients differ at first."""
    changes = {"actor.path": base, "steps": 3}
    with trainer_of("GRPO", {**changes, **DROPS}) as trainer:
        dropped = [computed(row) for row in trainer.run()]
        batch, actor = trainer.batch, trainer.roles.groups["actor"].worker
        scores = np.asarray(actor.compute_log_prob(batch)["old_logprobs"])
        learned = jax.tree.map(np.asarray, actor.learned_weights())
    with trainer_of("GRPO", {**changes, **LORA}) as trainer:
        plain = [computed(row) for row in trainer.run()]
        other = trainer.roles.groups["actor"].worker
        _, frozen = other.network.partition.split(other.params)
        placed = jax.device_put(learned, other.network.partition.split(other.shardings)[0])
        other.params = other.network.partition.join(placed, frozen)
        again = np.asarray(other.compute_log_prob(batch)["old_logprobs"])
    np.testing.assert_array_equal(scores, again)
    # What is added is 0 until the first update.
    assert dropped[0]["actor/loss"] == pytest.approx(plain[0]["actor/loss"], abs=1e-6)
    assert dropped[0]["rollout/token_prob_error"] == pytest.approx(1, abs=1e-5)
    assert dropped[0]["actor/grad_norm"] != pytest.approx(plain[0]["actor/grad_norm"], rel=0.01)
    assert dropped[2]["rollout/token_prob_error"] > 1.0001 > plain[2]["rollout/token_prob_error"]


def test_peft_files_carry_the_rate(tmp_path):
    adapted("qwen2", tmp_path, lora_dropout=RATE)
    lora = Lora(3, 7.0, ("q", "v", "o", "gate", "down"), dropout=RATE)
    network = network_with(tmp_path, lora)
    params = load_params(tmp_path / "adapter", network, one_device())
    learned, _ = network.partition.split(jax.tree.map(np.asarray, params))
    save_adapter(tmp_path / "ours", network.declared, learned, lora, str(tmp_path / "base"))
    assert json.loads((tmp_path / "ours" / CONFIG).read_text())["lora_dropout"] == RATE
    other = network_with(tmp_path, dataclasses.replace(lora, dropout=0.0))
    with pytest.raises(ConfigError, match=r"lora_dropout=0.4, lora.dropout is 0; set lora.dropout"):
        load_params(tmp_path / "ours", other, one_device())
