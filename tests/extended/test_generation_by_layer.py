"""Weights by layer while generating and the kernel of filled columns, as GPUs have them, in whole
runs: the metrics are those of a CPU's own way."""

import jax
import numpy as np
import pytest
from helpers import computed, trainer_of

from hjax.kernels import decode
from hjax.models.compute import Compute
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import Layered, decoder_network
from hjax.rollout import generator as module
from hjax.rollout.generator import Generator
from hjax.rollout.language_model import LanguageModel
from hjax.sharding.layout import make_layouts

CONFIG = ModelConfig(64, 16, 32, 3, heads=4, kv_heads=2, head_dim=8, max_length=128)
SHORT = {"steps": 1, "eval.every": 0, "warm_start.steps": 0, "rollout.max_response_length": 12}
LONG = {"steps": 2, "eval.every": 2, "rollout.max_response_length": 70}
MOVED = {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 2}
# What is run, and whether generation's stacked arrays are freed meanwhile.
CASES = {
    "bfloat16": ("GRPO", MOVED | {"model.dtype": "bfloat16"}, True),
    "bfloat16, slots": (
        "GRPO", MOVED | LONG | {"model.dtype": "bfloat16", "rollout.slots": 16}, True),
    "float32": ("PPO", MOVED | LONG, False),
    "adapters": ("GRPO", MOVED | LONG | {"actor.lora.rank": 2}, False),
    "apart, guesses": (
        "GRPO", LONG | {"placement": "disaggregate", "rollout.speculative_tokens": 2}, False
    ),
}  # fmt: skip
EVERYDAY = ("bfloat16",)


def layout_of(sizes):
    count = int(np.prod(list(sizes.values())))
    return make_layouts(jax.devices()[:count], sizes, {"tensor": -1}).generate


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_metrics_are_those_of_a_cpu(name, tmp_path, monkeypatch):
    algorithm, changes, freed = CASES[name]
    with trainer_of(algorithm, SHORT | changes, workdir=tmp_path / "cpu") as trainer:
        expected = trainer.run()
    monkeypatch.setattr(module.decode, "choose_form", lambda *_: decode.GPU_INTERPRETED)
    with trainer_of(algorithm, SHORT | changes, workdir=tmp_path / "gpu") as trainer:
        group = trainer.roles.groups.get("rollout") or trainer.roles.groups["actor"]
        assert group.worker.generator.unstacks_layers
        rows = trainer.run()
        if "rollout" not in trainer.roles.groups:
            actor = group.worker
            advance, stacked = actor.transition.to_generate, []
            monkeypatch.setattr(
                actor.transition,
                "to_generate",
                lambda held: stacked.append(advance(held)) or stacked[-1],
            )
            before = jax.tree.map(np.array, actor.params)
            with actor.generation_weights() as params:
                assert isinstance(params, Layered)
                assert stacked[0]["layers"]["q"].is_deleted() == freed
            assert jax.tree.all(jax.tree.map(np.array_equal, actor.params, before))
    for one, other in zip(rows, expected, strict=True):
        found, right = computed(one), computed(other)
        assert set(found) == set(right)
        if "model.dtype" in changes:  # a token drawn otherwise by a rounding changes what follows
            assert found["rollout/token_prob_error"] == pytest.approx(1, abs=2e-2)
        elif one["step"] == 1:  # gradients here are as small as 1e-4
            assert found == pytest.approx(right, rel=1e-4, abs=1e-4)
        else:  # and Adam makes steps of one size of them
            assert found["rollout/token_prob_error"] == pytest.approx(1, abs=1e-4)


def test_layers_are_the_slices_of_their_stacks_and_what_is_given_up_is_freed():
    layout = layout_of({"data": 2, "tensor": 2})
    network = decoder_network(CONFIG)
    params = network.create(0, layout)
    host = jax.tree.map(np.array, params)
    made = Generator(network, layout, Compute(), decode.ROWS)
    given_up = jax.tree.map(lambda x: x.ndim > 2, params)
    layered = made.decoding_params(params, given_up)
    assert made.decoding_params(layered) is layered
    assert len(layered.layers) == 3 and "layers" not in layered.rest
    for name, x in params["layers"].items():
        for number, layer in enumerate(layered.layers):
            np.testing.assert_array_equal(layer[name], host["layers"][name][number])
        assert x.is_deleted() == given_up["layers"][name]
    whole, part = layered.layers[0]["q"], layered.layers[0]["q"].addressable_shards[0].data
    assert whole.shape == (16, 4, 8) and part.shape == (16, 2, 8)
    # Others want them as they are: on CPUs, and with stages.
    assert Generator(network, layout, Compute(), decode.TILES).decoding_params(host) is host


def test_a_model_reads_its_weights_by_layer_too(monkeypatch):
    params = decoder_network(CONFIG).create(1, layout_of({"data": 1}))
    prompts = [[1, 2, 3], [4, 5]]
    plain = LanguageModel(CONFIG, params)
    monkeypatch.setattr(module.decode, "choose_form", lambda *_: decode.GPU_INTERPRETED)
    model = LanguageModel(CONFIG, params)
    assert isinstance(model.params, Layered)
    asked = {"max_new_tokens": 6, "temperature": 0.0}
    assert [c.tokens for c in model.generate(prompts, **asked)] == [
        c.tokens for c in plain.generate(prompts, **asked)
    ]
    tokens = [[1, 2, 3, 4, 5]]
    np.testing.assert_allclose(model.log_probs(tokens), plain.log_probs(tokens), atol=1e-5)
    assert [p.tokens for p in model.stream(prompts[0], **asked)] != []


def test_weights_are_kept_as_they_are_read():
    """In bfloat16, with the numbers of float32 weights that are read so."""
    params = decoder_network(CONFIG).create(1, layout_of({"data": 1}))
    model = LanguageModel(CONFIG, params, dtype="bfloat16")
    assert model.params["layers"]["q"].dtype == model.params["embedding"].dtype == "bfloat16"
    assert model.params["layers"]["mlp_norm"].dtype == "float32"
    wide = LanguageModel(CONFIG, params, dtype="bfloat16")
    wide.params = params
    tokens = [[1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(model.log_probs(tokens), wide.log_probs(tokens))
