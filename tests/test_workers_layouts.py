"""Loss, gradient and tokens of the actor: torch's on one device, the same on every mesh.

AdamW with a huge epsilon is plain gradient descent, so parameters before and after one public
update give the gradient: with rate 1e9 and epsilon 1e6, before - after = 1000 g.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from references import LlamaConfig, LlamaForCausalLM, torch

from hjax.algorithms.losses import PolicyLoss
from hjax.controller import ResourcePool, WorkerGroup
from hjax.errors import ConfigError
from hjax.kernels import cudnn
from hjax.kernels.registry import make_kernel_set
from hjax.models.huggingface import load_weights
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import to_host
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, OptimizerConfig, WorkerContext

DESCENT = OptimizerConfig(learning_rate=1e9, epsilon=1e6, max_grad_norm=0.0)
SCALE = 1e3
SAMPLES, ROWS, PROMPT, LENGTH = 2, 16, 5, 6
VOCAB = 48
LOSS = PolicyLoss(clip_low=0.2, clip_high=0.3, kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01)

# name -> (devices, train sizes, generate sizes, micro_batch). KV heads: 4.
LAYOUTS = {
    "data 8": (8, {"data": 8}, {}, 0),
    "fsdp 8": (8, {"fsdp": 8}, {}, 0),
    "data 2, fsdp 4": (8, {"data": 2, "fsdp": 4}, {}, 0),
    "data 4, tensor 2": (8, {"data": 4, "tensor": 2}, {"tensor": 2}, 0),
    "data 2, tensor 4, one micro": (8, {"data": 2, "tensor": 4}, {"tensor": 1}, 0),
    "fsdp 2, tensor 2 x 2 micro, 2 passes": (8, {"fsdp": 2, "tensor": 4}, {"tensor": 2}, 8),
    "data 2, fsdp 2, tensor 2 micro": (8, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 1}, 0),
    "tensor 8, KV heads kept whole": (8, {"tensor": 8}, {"tensor": 8}, 0),
    "one device, 4 passes": (1, {"data": 1}, {}, 4),
    "data 2, context 2, tensor 2": (8, {"data": 2, "context": 2, "tensor": 2}, {"tensor": 2}, 0),
    "fsdp 2, context 4, 2 passes": (8, {"fsdp": 2, "context": 4}, {}, 8),
    "expert 2, data 4": (8, {"expert": 2, "data": 4}, {}, 0),
    "data 4, pipe 2": (8, {"data": 4, "pipe": 2}, {"pipe": 1}, 0),
    "data 2, pipe 4": (8, {"data": 2, "pipe": 4}, {"pipe": 1}, 4),
    "data 2, pipe 4 kept": (8, {"data": 2, "pipe": 4}, {"pipe": 4}, 8),
    "pipe 2, tensor 4, 4 passes": (8, {"pipe": 2, "tensor": 4}, {"pipe": 1, "tensor": 2}, 4),
    "data 2, pipe 2 kept, tensor 2": (8, {"data": 2, "pipe": 2, "tensor": 2}, {"pipe": 2}, 4),
    "fsdp 2, pipe 2, tensor 2": (8, {"fsdp": 2, "pipe": 2, "tensor": 2}, {"tensor": 2}, 0),
    "pipe 2, context 2, tensor 2": (8, {"pipe": 2, "context": 2, "tensor": 2}, {"tensor": 2}, 0),
}

# Each axis once, and one device.
EVERYDAY = {
    "fsdp 2, tensor 2 x 2 micro, 2 passes",
    "one device, 4 passes",
    "data 2, context 2, tensor 2",
    "expert 2, data 4",
    "data 2, pipe 4 kept",
}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            p.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("weights")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def batch(model):
    """A step with ragged prompts and responses, one row unscored, old policy off by some noise."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, VOCAB, (ROWS // SAMPLES, PROMPT), dtype=np.int32)
    prompt_mask = np.arange(PROMPT) >= PROMPT - rng.integers(1, PROMPT + 1, (len(prompts), 1))
    response_mask = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    shape = (ROWS, LENGTH)
    batch = {
        "prompts": np.repeat(prompts * prompt_mask, SAMPLES, axis=0),
        "prompt_mask": np.repeat(prompt_mask, SAMPLES, axis=0),
        "responses": rng.integers(1, VOCAB, shape, dtype=np.int32) * response_mask,
        "response_mask": response_mask,
        "row_mask": np.arange(ROWS) != 3,
        "advantages": rng.normal(size=shape).astype(np.float32),
    }
    with torch.no_grad():
        exact = torch_log_probs(model, batch)[0].numpy() * response_mask
    batch["old_logprobs"] = exact + 0.3 * rng.normal(size=shape).astype(np.float32)
    batch["ref_logprobs"] = exact + 0.3 * rng.normal(size=shape).astype(np.float32)
    return batch


def torch_log_probs(model, batch):
    """[rows, length] log-probs and entropies, every row run by itself without padding."""
    logprobs, entropy = torch.zeros(ROWS, LENGTH), torch.zeros(ROWS, LENGTH)
    for row in range(ROWS):
        prompt = batch["prompts"][row][batch["prompt_mask"][row]].tolist()
        response = batch["responses"][row][batch["response_mask"][row]].tolist()
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        table = torch.log_softmax(logits, -1)
        logprobs[row, : len(response)] = table[range(len(response)), response]
        entropy[row, : len(response)] = -(table.exp() * table).sum(-1)
    return logprobs, entropy


@pytest.fixture(scope="module")
def truth(model, batch, tmp_path_factory):
    """Loss and gradient of PPO's clipped loss with k3 KL and entropy bonus, by torch."""
    logprobs, entropy = torch_log_probs(model, batch)
    arrays = {key: torch.tensor(batch[key]) for key in batch}
    mask = arrays["response_mask"] & arrays["row_mask"][:, None]
    ratio = (logprobs - arrays["old_logprobs"]).exp()
    gain = arrays["advantages"] * ratio
    clipped = arrays["advantages"] * ratio.clamp(0.8, 1.3)
    difference = arrays["ref_logprobs"] - logprobs
    k3 = difference.exp() - 1 - difference
    terms = -torch.minimum(gain, clipped) + 0.1 * k3 - 0.01 * entropy
    loss = terms[mask].mean()
    loss.backward()
    copy = LlamaForCausalLM(model.config)
    with torch.no_grad():
        for target, source in zip(copy.parameters(), model.parameters(), strict=True):
            target.copy_(source.grad)
    path = tmp_path_factory.mktemp("gradient")
    copy.save_pretrained(path)
    return loss.item(), load_weights(path)[1]


def make_actor(directory, devices, train, generate, micro_batch):
    config = ModelConfig(VOCAB, 32, 40, 4, 8, 4, 4, 32, norm_epsilon=1e-6)
    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices()[:devices], train, generate, "layout.actor"),
        model=config,
        path=str(directory),
        samples=SAMPLES,
        max_response_length=LENGTH,
        loss=LOSS,
        optimizer=DESCENT,
        micro_batch=micro_batch,
    )
    group = WorkerGroup(ResourcePool("pool", jax.devices()[:devices]), Actor, context, role="actor")
    group.worker.initialize()
    return group


def one_step(directory, batch, *layout):
    """Loss, gradient and sampled tokens, as a user sees them: through a rollout and an update."""
    group = make_actor(directory, *layout)
    prompts = {key: batch[key][::SAMPLES] for key in ("prompts", "prompt_mask")}
    rollout = group.generate_sequences(prompts | {"step": 1}).result()
    drawn = {key: np.asarray(rollout[key]) for key in ("responses", "logprobs")}
    before = to_host(group.worker.params)
    metrics = group.update_actor(batch).result()
    after = to_host(group.worker.params)
    group.pool.close()
    gradient = jax.tree.map(lambda a, b: (a - b) / SCALE, before, after)
    return {key: float(value) for key, value in metrics.items()}, gradient, drawn


def errors(gradient, expected):
    return {
        jax.tree_util.keystr(path): np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        for (path, ours), theirs in zip(
            jax.tree.leaves_with_path(gradient), jax.tree.leaves(expected), strict=True
        )
    }


@pytest.fixture(scope="module")
def one_device(directory, batch):
    return one_step(directory, batch, 1, {"data": 1}, {}, 0)


def test_one_update_equals_torch(one_device, truth):
    metrics, gradient, _ = one_device
    loss, expected = truth
    assert metrics["loss"] == pytest.approx(loss, rel=1e-5)
    norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(expected)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert max(errors(gradient, expected).values()) <= 2e-5


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in EVERYDAY else [pytest.mark.slow]) for n in LAYOUTS],
)
@pytest.mark.extended
def test_loss_gradient_and_tokens_are_the_same_on_every_layout(name, directory, batch, one_device):
    metrics, gradient, drawn = one_step(directory, batch, *LAYOUTS[name])
    bubble = metrics.pop("pipeline_bubble", None)
    assert (bubble is not None) == ("pipe" in name)
    expected_metrics, expected, expected_drawn = one_device
    # No two leading logits of these draws lie within 1e-4, so tokens are equal, one for one.
    np.testing.assert_array_equal(drawn["responses"], expected_drawn["responses"])
    np.testing.assert_allclose(drawn["logprobs"], expected_drawn["logprobs"], atol=1e-5)
    assert max(errors(gradient, expected).values()) <= 1e-5
    assert metrics.keys() == expected_metrics.keys()
    for key, value in metrics.items():
        assert value == pytest.approx(expected_metrics[key], rel=1e-5, abs=1e-7), key


LONG = (
    "fsdp 2, tensor 2 x 2 micro, 2 passes",
    "tensor 8, KV heads kept whole",
    "data 2, context 2, tensor 2",
    "data 2, pipe 4 kept",
    "fsdp 2, pipe 2, tensor 2",
    "pipe 2, context 2, tensor 2",
)
LONG_EVERYDAY = ("data 2, context 2, tensor 2",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in LONG_EVERYDAY else [pytest.mark.slow])
        for name in LONG
    ],
)
@pytest.mark.extended
def test_the_kernels_of_long_sequences_change_nothing(
    name, directory, batch, one_device, monkeypatch
):
    monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", 0)  # any length is long
    metrics, gradient, drawn = one_step(directory, batch, *LAYOUTS[name])
    expected_metrics, expected, expected_drawn = one_device
    np.testing.assert_array_equal(drawn["responses"], expected_drawn["responses"])
    assert max(errors(gradient, expected).values()) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)


CUDNN = (
    "fsdp 2, tensor 2 x 2 micro, 2 passes",
    "tensor 8, KV heads kept whole",
    "data 2, pipe 4 kept",
)


@pytest.mark.parametrize(
    "name", [CUDNN[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CUDNN[1:])]
)
@pytest.mark.extended
def test_what_cudnn_is_asked_changes_nothing(name, directory, batch, one_device, monkeypatch):
    """By JAX's own implementation of the same arguments, which computes in float32 on CPUs."""
    attend = functools.partial(cudnn.attend, implementation="xla")
    asked = []

    def kernels(*arguments, **how):
        asked.append(arguments)
        return dataclasses.replace(make_kernel_set(*arguments, **how), attention=attend)

    monkeypatch.setattr("hjax.models.compute.make_kernel_set", kernels)
    monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", 0)
    metrics, gradient, drawn = one_step(directory, batch, *LAYOUTS[name])
    expected_metrics, expected, expected_drawn = one_device
    np.testing.assert_array_equal(drawn["responses"], expected_drawn["responses"])
    assert asked and max(errors(gradient, expected).values()) <= 1e-5
    assert metrics["loss"] == pytest.approx(expected_metrics["loss"], rel=1e-5)


GENERATE = (
    "data 8",
    "fsdp 2, tensor 2 x 2 micro, 2 passes",
    "data 2, fsdp 2, tensor 2 micro",
    "tensor 8, KV heads kept whole",
    "data 2, pipe 4 kept",
)


@pytest.fixture(scope="module")
def greedy(model, batch):
    """Greedy answers of transformers' generate, prompt by prompt."""
    answers = []
    for row in range(0, ROWS, SAMPLES):
        prompt = batch["prompts"][row][batch["prompt_mask"][row]].tolist()
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False, eos_token_id=None
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.extended
def test_greedy_tokens_are_transformers_on_every_layout(name, directory, batch, greedy):
    group = make_actor(directory, *LAYOUTS[name])
    prompts = {key: batch[key][::SAMPLES] for key in ("prompts", "prompt_mask")}
    out = group.generate_sequences(prompts, greedy=True).result()
    group.pool.close()
    assert np.asarray(out["responses"]).tolist() == greedy


def test_kv_heads_kept_whole_are_reported(directory):
    group = make_actor(directory, *LAYOUTS["tensor 8, KV heads kept whole"])
    assert group.worker.unsharded_axes == ["kv_heads"]
    group.pool.close()


@pytest.mark.parametrize("rows, micro, passes", [(48, 32, 2), (48, 16, 3), (40, 16, 4), (8, 32, 1)])
def test_micro_batch_is_the_most_rows_of_a_pass(rows, micro, passes, directory):
    group = make_actor(directory, 2, {"data": 2}, {}, micro)
    assert group.worker.micro_batches.count({"responses": np.zeros((rows, 4))}) == passes
    group.pool.close()


def test_a_mesh_that_does_not_fit_the_model_is_refused(directory):
    config = dataclasses.replace(ModelConfig(VOCAB, 32, 40, 4, 8, 4, 4, 32), mlp_size=42)
    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices(), {"tensor": 4, "data": 2}, {}),
        model=config,
        loss=LOSS,
        optimizer=DESCENT,
    )
    with pytest.raises(ConfigError, match="layout.actor.train: mlp of size 42 .* 1, 2, 3, 6, 7"):
        Actor(context)


@pytest.mark.extended
def test_a_copy_shares_nothing_with_its_source(directory):
    source = make_actor(directory, *LAYOUTS["data 2, pipe 2 kept, tensor 2"]).worker
    copy = make_actor(directory, *LAYOUTS["data 4, pipe 2"]).worker
    expected = to_host(source.params)
    copy.take_weights(source.params)
    for leaf in jax.tree.leaves(copy.params):
        leaf.delete()
    jax.tree.map(np.testing.assert_array_equal, source.params, expected)
