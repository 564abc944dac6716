"""Families beside Llama on 8 simulated devices: loss, gradient and tokens of one device.

A gradient is read off one public update, as in ``test_workers_layouts``.
"""

import jax
import numpy as np
import pytest
from families import model

from hjax.algorithms.losses import PolicyLoss
from hjax.controller import ResourcePool, WorkerGroup
from hjax.models.parameters import to_host
from hjax.models.weights import read_config
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, WorkerContext

DESCENT = OptimizerConfig(learning_rate=1e9, epsilon=1e6, max_grad_norm=0.0)
SCALE = 1e3
SAMPLES, ROWS, PROMPT, LENGTH, VOCAB = 2, 16, 5, 6, 47
# What divides vocabulary 47: nothing, so it is changed.
EVEN = {"vocab_size": 48, "num_hidden_layers": 4, "num_key_value_heads": 2}
EXPERTS = EVEN | {"num_experts": 8}

# name -> (row of MODELS, changes, train sizes, generate sizes, micro_batch).
RUNS = {
    "experts over expert": ("qwen3 experts", EXPERTS, {"expert": 4, "data": 2}, {}, 0),
    "experts, fsdp, tensor": (
        "qwen3 experts", EXPERTS, {"expert": 2, "fsdp": 2, "tensor": 2}, {"tensor": 2}, 8,
    ),
    "experts, context": (
        "qwen3 experts", EXPERTS, {"expert": 2, "context": 2, "data": 2}, {}, 0,
    ),
    "experts, tensor micro": (
        "mixtral", EVEN | {"num_local_experts": 4}, {"expert": 4, "tensor": 2}, {"tensor": 1}, 0,
    ),
    "experts, pipe": (
        "mixtral", EVEN | {"num_local_experts": 4}, {"expert": 2, "pipe": 2, "data": 2}, {}, 0,
    ),
    "biases and norms over tensor": ("qwen2", EVEN, {"tensor": 2, "fsdp": 4}, {"tensor": 2}, 0),
    "norms over all heads": ("olmo2", EVEN, {"tensor": 2, "data": 4}, {"tensor": 1}, 0),
    "kinds over pipe": ("smollm3", EVEN, {"pipe": 2, "fsdp": 4}, {"pipe": 2}, 0),
    "learned positions over context": (
        "gpt2", {"vocab_size": 48, "n_layer": 4}, {"context": 2, "tensor": 2, "fsdp": 2}, {}, 0,
    ),
    "learned positions over pipe": (
        "gpt2", {"vocab_size": 48, "n_layer": 4}, {"pipe": 4, "data": 2}, {"pipe": 2}, 0,
    ),
    "fused tensors, longrope": (
        "phi3 longrope", EVEN, {"pipe": 2, "tensor": 2, "data": 2}, {"pipe": 2}, 0,
    ),
}  # fmt: skip
RUNS["windows and caps over pipe"] = (
    "gemma2 capped", EVEN, {"pipe": 2, "tensor": 2, "fsdp": 2}, {}, 0,
)  # fmt: skip
RUNS["sinks and experts over tensor"] = (
    "gpt-oss", EVEN | {"num_local_experts": 4}, {"expert": 2, "tensor": 2, "context": 2}, {}, 0,
)  # fmt: skip
EVERY_DAY = {"experts, fsdp, tensor"}
NAMES = [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]


def batch_of():
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCAB, (ROWS // SAMPLES, PROMPT), dtype=np.int32)
    prompt_mask = np.arange(PROMPT) >= PROMPT - rng.integers(1, PROMPT + 1, (len(prompts), 1))
    response_mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    shape = (ROWS, LENGTH)
    return {
        "prompts": np.repeat(prompts * prompt_mask, SAMPLES, axis=0),
        "prompt_mask": np.repeat(prompt_mask, SAMPLES, axis=0),
        "responses": rng.integers(1, VOCAB, shape, dtype=np.int32) * response_mask,
        "response_mask": response_mask,
        "row_mask": np.ones(ROWS, bool),
        "advantages": rng.normal(size=shape).astype(np.float32),
        "old_logprobs": rng.normal(-3, 0.5, size=shape).astype(np.float32),
    }


def one_step(path, devices, train, generate, micro_batch):
    """Loss, gradient and sampled tokens of an actor under a layout."""
    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices()[:devices], train, generate, "layout.actor"),
        model=read_config(path),
        path=str(path),
        samples=SAMPLES,
        max_response_length=LENGTH,
        loss=PolicyLoss(),
        optimizer=DESCENT,
        micro_batch=micro_batch,
    )
    group = WorkerGroup(ResourcePool("pool", jax.devices()[:devices]), Actor, context, role="actor")
    group.worker.initialize()
    batch = batch_of()
    prompts = {key: batch[key][::SAMPLES] for key in ("prompts", "prompt_mask")}
    rollout = group.generate_sequences(prompts | {"step": 1}).result()
    drawn = {key: np.asarray(rollout[key]) for key in ("responses", "logprobs")}
    before = to_host(group.worker.params)
    loss = float(group.update_actor(batch).result()["loss"])
    gradient = jax.tree.map(lambda a, b: (a - b) / SCALE, before, to_host(group.worker.params))
    group.pool.close()
    return loss, gradient, drawn


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.extended
def test_loss_gradient_and_tokens_are_those_of_one_device(name, tmp_path, monkeypatch):
    # Few rows go through in pieces too.
    monkeypatch.setattr("hjax.models.expert_dispatch._TILE_ROWS", (2,))
    row, changes, *layout = RUNS[name]
    model(row, **changes).save_pretrained(tmp_path)
    expected_loss, expected, expected_drawn = one_step(tmp_path, 1, {"data": 1}, {}, 0)
    loss, gradient, drawn = one_step(tmp_path, 8, *layout)
    np.testing.assert_array_equal(drawn["responses"], expected_drawn["responses"])
    np.testing.assert_allclose(drawn["logprobs"], expected_drawn["logprobs"], atol=1e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
    ):
        size = np.linalg.norm(theirs)
        assert np.linalg.norm(ours - theirs) <= 1e-5 * size + 1e-7, jax.tree_util.keystr(path)
