"""The pipeline by itself: a chain of matrices against the closed gradient, and its schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.sharding.layout import make_layouts
from hjax.sharding.pipeline import Pipeline, run_all_layers
from hjax.xla.collectives import collectives

LAYERS, WIDTH, VOCAB, ROWS = 4, 8, 6, 4
AXES = {"table": ("vocab", "embed"), "layers": ("layers", "embed", "mlp"), "bias": ()}


def objective(params, part, stack):
    """A linear model, so that its loss is one product of matrices."""

    def layers(stacked, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]

    x = stack(layers, params["layers"], lambda: params["table"][part["tokens"]])
    score = jnp.sum(part["weights"] * (x.sum(-1) + params["bias"]))
    return score, {"rows": jnp.float32(x.shape[0])}


def inputs(parts):
    rng = np.random.default_rng(0)
    params = {
        "table": rng.normal(size=(VOCAB, WIDTH)),
        "layers": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / 3,
        "bias": rng.normal(size=()),
    }
    batch = {
        "tokens": rng.integers(0, VOCAB, (parts, ROWS)),
        "weights": rng.normal(size=(parts, ROWS)),
    }
    return params, batch


def by_hand(params, batch):
    """Value and gradient of sum_i w_i (e_i L1 L2 L3 L4 1 + b), in float64 numpy."""
    weights, ones = batch["weights"].reshape(-1), np.ones(WIDTH)
    x = params["table"][batch["tokens"].reshape(-1)]
    before = [x]
    for matrix in params["layers"]:
        before.append(before[-1] @ matrix)
    after = [ones]
    for matrix in params["layers"][::-1]:
        after.append(matrix @ after[-1])
    table = np.zeros((VOCAB, WIDTH))
    np.add.at(table, batch["tokens"].reshape(-1), weights[:, None] * after[-1])
    layers = [np.outer(weights @ before[i], after[LAYERS - 1 - i]) for i in range(LAYERS)]
    value = weights @ (before[-1] @ ones + params["bias"])
    return value, {"table": table, "layers": np.stack(layers), "bias": weights.sum()}


def place(layout, params, batch):
    shardings = {name: layout.sharding(*axes) for name, axes in AXES.items()}
    params = {k: jax.device_put(np.float32(v), shardings[k]) for k, v in params.items()}
    split = layout.sharding(None, "batch")
    kinds = {"tokens": np.int32, "weights": np.float32}
    return params, {k: jax.device_put(v.astype(kinds[k]), split) for k, v in batch.items()}


@pytest.mark.parametrize(
    "sizes, parts",
    [
        pytest.param(sizes, parts, marks=[pytest.mark.extended] * (parts not in everyday))
        for sizes, everyday in (
            ({"pipe": 2, "data": 4}, (2,)),
            ({"pipe": 4, "tensor": 2}, (1, 7)),
        )
        for parts in (1, 2, 7)
    ],
)
def test_value_and_gradient_equal_the_closed_form(sizes, parts):
    layout = make_layouts(jax.devices(), sizes).train
    pipeline = Pipeline(layout, AXES)
    params, batch = inputs(parts)
    run = jax.jit(lambda p, b: pipeline.gradients(objective, p, b))
    (value, stats), gradient = run(*place(layout, params, batch))
    expected, expected_gradient = by_hand(params, batch)
    assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert float(stats["rows"]) == parts * ROWS
    for name, wanted in expected_gradient.items():
        error = np.linalg.norm(gradient[name] - wanted) / np.linalg.norm(wanted)
        assert error < 1e-5, name


def test_forward_returns_every_micro_batch_in_order():
    layout = make_layouts(jax.devices(), {"pipe": 4, "data": 2}).train
    params, batch = inputs(3)

    def scores(params, part, stack):
        return {"scores": jnp.tanh(objective(params, part, stack)[0])[None]}

    pipeline = Pipeline(layout, AXES)
    placed = place(layout, params, batch)
    piped = jax.jit(lambda p, b: pipeline.forward(scores, p, b))(*placed)["scores"]
    for index in range(3):
        part = {key: value[index : index + 1] for key, value in batch.items()}
        assert float(piped[index, 0]) == pytest.approx(np.tanh(by_hand(params, part)[0]), abs=1e-5)
    assert piped.shape == (3, 1)
    assert run_all_layers(lambda s, x: s + x, 1, lambda: 2) == 3


@pytest.mark.parametrize(
    "stages, parts, idle",
    [
        # A forward pass lasts 1, a backward pass, which runs it again, 3; the last stage's forward
        # is part of its backward. Two stages, one micro-batch: ticks of 1, 3, 3; work 4 + 3.
        (2, 1, 1 - 7 / (2 * 7)),
        # Two stages, two: ticks 1, max(1, 3), max(3, 3), 3 = 10; work 2 * 4 + 2 * 3.
        (2, 2, 1 - 14 / (2 * 10)),
        # Four stages, one: ticks 1, 1, 1, 3, 3, 3, 3 = 15; work 3 * 4 + 3.
        (4, 1, 1 - 15 / (4 * 15)),
    ],
)
def test_the_bubble_is_that_of_the_slots_by_hand(stages, parts, idle):
    layout = make_layouts(jax.devices(), {"pipe": stages, "data": -1}).train
    pipeline = Pipeline(layout, AXES)
    run = jax.jit(lambda p, b: pipeline.gradients(objective, p, b))
    (_, stats), _ = run(*place(layout, *inputs(parts)))
    assert float(stats["pipeline_bubble"]) == pytest.approx(idle, abs=1e-6)


@pytest.mark.extended
def test_more_micro_batches_shrink_the_bubble_and_keep_the_memory():
    layout = make_layouts(jax.devices(), {"pipe": 4, "data": 2}).train
    pipeline = Pipeline(layout, AXES)
    run = jax.jit(lambda p, b: pipeline.gradients(objective, p, b))
    temporary, bubbles = [], []
    for parts in (8, 32):
        placed = place(layout, *inputs(parts))
        compiled = run.lower(*placed).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        bubbles.append(float(compiled(*placed)[0][1]["pipeline_bubble"]))
    # Embeddings and their gradients of every micro-batch stand outside the stages.
    outside = 2 * 4 * 24 * ROWS * WIDTH
    assert temporary[1] - temporary[0] <= 2 * outside
    assert bubbles[1] < bubbles[0] / 2


@pytest.mark.parametrize(
    "sizes, parts", [({"pipe": 2, "context": 2, "tensor": 2}, 8), ({"pipe": 2, "fsdp": 4}, 4)]
)
@pytest.mark.extended
def test_stages_in_different_branches_exchange_nothing_with_neighbours(sizes, parts):
    """Only the two hand-overs of a tick may shift between devices: branches differ by stage."""
    from test_workers_layouts import DESCENT, LOSS

    from hjax.models.model_config import ModelConfig
    from hjax.workers import Actor, WorkerContext

    context = WorkerContext(
        role="actor",
        layouts=make_layouts(jax.devices(), sizes),
        model=ModelConfig(48, 32, 40, 2, 8, 4, 4, 32),
        samples=2,
        max_response_length=6,
        loss=LOSS,
        optimizer=DESCENT,
    )
    [update] = [p for p in Actor(context).programs(16, 5) if p.name == "update"]
    found = collectives(update.trace().lower().compile().as_text())
    # m micro-batches pass two stages in m + 2 ticks; what runs m times embeds them before.
    shifts = [c.times for c in found if c.kind == "collective-permute" and c.times != parts]
    assert shifts == [parts + 2] * 2
