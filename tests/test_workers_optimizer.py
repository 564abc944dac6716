"""AdamW, schedules, clipping, accumulation and skipped updates, against torch's optimizer."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from references import torch

from hjax.errors import ConfigError
from hjax.models.model_config import ModelConfig
from hjax.models.parameter_spec import ParameterKind, matrix, vector
from hjax.models.parameters import decoder_network, network_of, scalar_network
from hjax.sharding.layout import make_layouts
from hjax.workers import OptimizerConfig, Updater
from hjax.workers.micro_batching import MicroBatches

ROWS, STEPS = 8, 12
NO_CONFIG = ModelConfig(1, 1, 1, 1, 1, 1, 2, 1)  # of a network that reads none


class Stack(nnx.Module):
    """``scales`` has the shape of a matrix, and is none: it must not be decayed."""

    def __init__(self, keys):
        self.scales = vector(1, layers=2, embed=2).create()
        self.weight = matrix(1.0, "embed", layers=2, embed=2).create(keys[0])


class Affine(nnx.Module):
    def __init__(self, config, key):
        keys = jax.random.split(key, 2)
        self.matrix = matrix(1.0, "embed", embed=3, mlp=2).create(keys[0])
        self.bias = vector(0, mlp=2).create()
        self.stack = Stack(keys[1:])


def initial():
    rng = np.random.default_rng(0)
    shapes = network_of(Affine, NO_CONFIG).shapes
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), shapes)


def batches(rows=ROWS):
    rng = np.random.default_rng(1)
    for step in range(STEPS):
        x = rng.normal(size=(rows, 3)).astype(np.float32) * (1 + step % 3)
        yield {"x": x, "y": rng.normal(size=(rows, 2)).astype(np.float32)}


def predict(params, x):
    """Small enough to write twice; works on jax and torch alike."""
    hidden = (x @ params["matrix"] + params["bias"]) * params["stack"]["scales"][0]
    return hidden @ params["stack"]["weight"] * params["stack"]["scales"][1]


def objective(params, batch, stack):
    error = batch["weights"] * (predict(params, batch["x"]) - batch["y"]) ** 2
    return jnp.sum(error), {"seen": jnp.sum(batch["weights"])}


def prepare(batch):
    rows = batch["x"].shape[0]
    return batch | {"weights": jnp.full((rows, 1), 1 / rows)}


def updater(config, micro_batch=0, devices=1):
    made = make(objective, config, micro_batch, devices)
    params = jax.device_put(initial(), make_layouts(jax.devices()[:devices]).train.replicated)
    return made, params, made.init(params)


def make(objective, config, micro_batch=0, devices=1):
    layout = make_layouts(jax.devices()[:devices]).train
    passes = MicroBatches(layout, {}, micro_batch)
    return Updater(objective, prepare, config, passes, network_of(Affine, NO_CONFIG))


def ours(config, data, **options):
    update, params, state = updater(config, **options)
    rows = []
    for batch in data:
        params, state, metrics = update(params, state, jax.tree.map(jnp.asarray, batch))
        rows.append({key: float(value) for key, value in metrics.items()})
    return jax.tree.map(np.asarray, params), rows


def theirs(config, data, rate):
    """torch's AdamW, its clipping, and the rate of every update by hand."""
    params = jax.tree.map(lambda x: torch.tensor(x, requires_grad=True), initial())
    decayed = [params["matrix"], params["stack"]["weight"]]
    plain = [params["bias"], params["stack"]["scales"]]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    betas = (config.beta1, config.beta2)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=config.epsilon)
    norms = []
    for number, batch in enumerate(data):
        x, y = torch.tensor(batch["x"]), torch.tensor(batch["y"])
        loss = ((predict(params, x) - y) ** 2).sum() / len(x)
        optimizer.zero_grad()
        loss.backward()
        limit = config.max_grad_norm or math.inf
        norms.append(torch.nn.utils.clip_grad_norm_(decayed + plain, limit).item())
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.step()
    return jax.tree.map(lambda x: x.detach().numpy(), params), norms


def close(left, right, rtol=2e-5):
    chex.assert_trees_all_close(left, right, rtol=rtol, atol=1e-6)


PEAK = 0.05
SCHEDULES = {
    "constant": ({}, lambda n: PEAK),
    "warm-up of 4, then constant": ({"warmup_updates": 4}, lambda n: PEAK * min((n + 1) / 4, 1)),
    "linear": ({"schedule": "linear", "total_updates": 12}, lambda n: PEAK * (1 - n / 12)),
    "cosine after a warm-up of 3": (
        {"schedule": "cosine", "warmup_updates": 3, "total_updates": 12},
        lambda n: PEAK * (n + 1) / 3 if n < 3 else PEAK * (1 + math.cos(math.pi * (n - 3) / 9)) / 2,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_updates_equal_torch_adamw(name):
    options, rate = SCHEDULES[name]
    config = OptimizerConfig(PEAK, weight_decay=0.1, beta1=0.8, beta2=0.95, **options)
    params, metrics = ours(config, batches())
    expected, norms = theirs(config, batches(), rate)
    close(params, expected)
    # The norm reported is that before clipping, and some are above the limit of 1, some below.
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], norms, rtol=2e-5)
    np.testing.assert_allclose([m["learning_rate"] for m in metrics], [rate(n) for n in range(12)],
                               rtol=1e-5, atol=1e-9)  # fmt: skip
    assert max(norms) > 1


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_clipping_can_be_set_and_turned_off(limit):
    config = OptimizerConfig(PEAK, max_grad_norm=limit, epsilon=0.1)
    close(ours(config, batches())[0], theirs(config, batches(), lambda n: PEAK)[0])


@pytest.mark.parametrize("micro_batch, devices", [(2, 1), (3, 1), (4, 2), (8, 8), (1, 8)])
def test_micro_batches_and_devices_add_up_to_the_whole_batch(micro_batch, devices):
    config = OptimizerConfig(PEAK, max_grad_norm=0.0)
    [first, *_] = batches(16)
    whole, [metrics] = ours(config, [first])
    parts, [cut] = ours(config, [first], micro_batch=micro_batch, devices=devices)
    close(parts, whole, rtol=1e-5)
    assert cut["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    assert cut["seen"] == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_skips_update_and_schedule(bad):
    config = OptimizerConfig(PEAK, schedule="linear", total_updates=12)
    good = list(batches())
    broken = {**good[0], "y": np.full_like(good[0]["y"], bad)}
    expected, clean = ours(config, good[:4])
    params, rows = ours(config, [*good[:2], broken, broken, *good[2:4]])
    close(params, expected, rtol=0)
    assert [row["skipped"] for row in rows] == [0, 0, 1, 1, 0, 0]
    assert not math.isfinite(rows[2]["loss"])
    rates = [row["learning_rate"] for row in rows if not row["skipped"]]
    assert rates == [row["learning_rate"] for row in clean]


def test_a_gradient_that_is_not_finite_skips_though_the_loss_is():
    def root(params, batch, stack):
        return jnp.sum(jnp.sqrt(params["matrix"])) + 0 * jnp.sum(batch["weights"]), {}

    params = initial() | {"matrix": np.array([[0, 4], [1, 1], [1, 1]], np.float32)}
    kept = jax.tree.map(np.copy, params)
    params = jax.tree.map(jnp.asarray, params)
    update = make(root, OptimizerConfig(PEAK))
    state = update.init(params)
    [batch, *_] = batches()
    params, _, metrics = update(params, state, jax.tree.map(jnp.asarray, batch))
    assert float(metrics["loss"]) == 6 and not math.isfinite(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(params, kept)


def test_a_number_for_all_rows_survives_the_cut():
    def scaled(params, batch, stack):
        loss, stats = objective(params, batch, stack)
        return batch["scale"] * loss, stats

    [batch, *_] = batches()
    batch |= {"scale": np.float32(3.0).reshape(())}
    norms = []
    for micro in (0, 2):
        update = make(scaled, OptimizerConfig(PEAK), micro)
        params = jax.tree.map(jnp.asarray, initial())
        state = update.init(params)
        norms.append(float(update(params, state, jax.tree.map(jnp.asarray, batch))[2]["grad_norm"]))
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def of_leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def test_what_is_decayed_and_cast_of_the_models_there_are():
    """By name, as it was when it was read off names and numbers of axes."""
    shape = dataclasses.replace(NO_CONFIG, tie_embeddings=False)
    stacked = ("q", "kv", "o", "gate_up", "down")
    matrices = {"['embedding']", "['unembedding']", *(f"['layers']['{n}']" for n in stacked)}
    scalar = {f"['decoder']{name}" for name in matrices - {"['unembedding']"}}
    for network, expected in (
        (decoder_network(shape), matrices),
        (scalar_network(shape), scalar),
    ):
        kinds = of_leaves(network.kinds)
        assert {name for name, kind in kinds.items() if kind.decayed} == expected
        dtypes = of_leaves(network.compute_dtypes(jnp.bfloat16))
        assert {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16} == expected
        assert {dtypes[name] for name in dtypes.keys() - expected} == {np.dtype(np.float32)}


def test_stacked_biases_are_neither_decayed_nor_cast():
    class Biased(nnx.Module):
        def __init__(self, config, key):
            self.weight = matrix(1.0, "embed", layers=2, embed=3, mlp=4).create(key)
            self.bias = vector(0, layers=2, mlp=4).create()

    network = network_of(Biased, NO_CONFIG)
    assert network.kinds == {"weight": ParameterKind.MATRIX, "bias": ParameterKind.VECTOR}
    assert network.compute_dtypes(jnp.bfloat16) == {"weight": jnp.bfloat16, "bias": jnp.float32}
    # Without a gradient AdamW takes rate * decay of what is decayed, and nothing else.
    optimizer = OptimizerConfig(0.5, weight_decay=0.1, max_grad_norm=0.0).build(network.declared)
    params = jax.tree.map(lambda x: jnp.ones(x.shape), network.shapes)
    still = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(still, optimizer.init(params), params)
    expected = {"weight": np.full((2, 3, 4), -0.05), "bias": np.zeros((2, 4))}
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="'step' is unknown; allowed: constant, linear, cosine"):
        OptimizerConfig(PEAK, schedule="step").build({})
