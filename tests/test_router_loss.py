"""The loss that balances experts, and its metrics: transformers' on one device, the same on every
layout, in packs, recomputed and beside adapters.

A gradient is read off one public update, as in ``test_workers_layouts``: before - after = 1000 g.
The policy's own loss is zero here (no advantages), so that what is left is the router's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import model
from helpers import trainer_of
from references import torch
from test_models_layouts import DESCENT, EVEN, EXPERTS, LENGTH, PROMPT, ROWS, SAMPLES, SCALE
from test_models_layouts import batch_of as answered

from hjax.algorithms.losses import PolicyLoss, SupervisedLoss, ValueLoss
from hjax.data.tasks import get_task
from hjax.errors import ConfigError
from hjax.models.compute import Compute
from hjax.models.huggingface import load_weights
from hjax.models.load_balancing import RoutingStats, balance_loss, balance_metrics
from hjax.models.lora import Lora
from hjax.models.parameters import to_host
from hjax.models.weights import read_config
from hjax.sharding.layout import make_layouts
from hjax.workers import Actor, Critic, OptimizerConfig, WorkerContext

WEIGHT = 10.0
FAMILIES = [
    "gpt-oss",
    pytest.param("mixtral", marks=pytest.mark.slow),
    pytest.param("qwen3 experts", marks=pytest.mark.slow),
]


def batch_of(advantages=0.0):
    """Ragged prompts and responses, one row unscored, one without a response."""
    batch = answered()
    batch["response_mask"][5] = False
    batch["row_mask"][2] = False
    groups = np.repeat(np.arange(ROWS // SAMPLES), SAMPLES)
    return batch | {"advantages": advantages * batch["advantages"], "prompt_id": groups}


def update(path, batch, kind=Actor, devices=1, train=None, **changes):
    """Metrics and gradient of one update of the model at a path."""
    options = {
        "layouts": make_layouts(jax.devices()[:devices], train or {"data": devices}),
        "model": read_config(path),
        "path": str(path),
        "samples": SAMPLES,
        "max_response_length": LENGTH,
        "loss": PolicyLoss() if kind is Actor else ValueLoss(),
        "supervised_loss": SupervisedLoss(),
        "optimizer": DESCENT,
        "warm_start": DESCENT,
        "router_loss": WEIGHT,
    }
    stage, more = changes.pop("stage", "main"), changes.pop("more", {})
    worker = kind(WorkerContext(role=kind.__name__.lower(), **(options | changes)))
    worker.initialize()
    if stage != "main":
        worker.begin_stage(stage)
    before = to_host(worker.params)
    metrics = worker.update(batch, **more)
    gradient = jax.tree.map(lambda a, b: (a - b) / SCALE, before, to_host(worker.params))
    return {key: float(x) for key, x in metrics.items()}, gradient


def same(found, expected, more=()):
    (metrics, gradient), (other_metrics, other) = found, expected
    assert metrics.keys() - set(more) == other_metrics.keys()
    for key, value in other_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    errors(gradient, other)


def errors(gradient, other, floor=1e-8):
    for (path, a), b in zip(
        jax.tree.leaves_with_path(gradient), jax.tree.leaves(other), strict=True
    ):
        bound = 1e-5 * np.linalg.norm(b) + floor
        assert np.linalg.norm(a - b) <= bound, jax.tree_util.keystr(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of models, by row of MODELS and changes."""
    made = {}

    def of(row, **changes):
        key = row, tuple(sorted(changes.items()))
        if key not in made:
            made[key] = tmp_path_factory.mktemp("weights")
            model(row, **changes).save_pretrained(made[key])
        return made[key]

    return of


def aux_loss(theirs, batch):
    """transformers' loss of the rows that weigh something and their tokens but for the last."""
    rows = batch["row_mask"] & batch["response_mask"].any(1)
    followed = np.zeros_like(batch["response_mask"])
    followed[:, :-1] = batch["response_mask"][:, 1:]
    mask = np.concatenate([batch["prompt_mask"], followed], axis=1)[rows]
    tokens = np.concatenate([batch["prompts"], batch["responses"]], axis=1)[rows]
    return theirs(
        input_ids=torch.tensor(tokens).long(),
        attention_mask=torch.tensor(mask).long(),
        position_ids=torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)).long(),
        output_router_logits=True,
    ).aux_loss


@pytest.mark.parametrize("row", FAMILIES)
@pytest.mark.extended
def test_loss_and_gradient_are_those_of_transformers(row, tmp_path, saved):
    theirs = model(row)
    loss = aux_loss(theirs, batch_of())
    (WEIGHT * loss).backward()
    with torch.no_grad():
        for parameter in theirs.parameters():
            gradient = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if gradient is None else gradient)
    theirs.save_pretrained(tmp_path)
    metrics, gradient = update(saved(row), batch_of())
    assert metrics["router_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(WEIGHT * loss.item(), rel=1e-5)
    expected = load_weights(tmp_path)[1]
    for name in ("router", "gate_up", "down"):
        assert np.linalg.norm(expected["layers"][name]) > 1e-3
    errors(gradient, expected)


def test_loss_and_metrics_by_hand():
    # Two layers of three experts, four tokens with two experts each.
    probabilities = [[2.0, 1.0, 1.0], [3.0, 0.5, 0.5]]
    chosen = [[4.0, 3.0, 1.0], [4.0, 4.0, 0.0]]
    entropy = [[1.2, 0.8, 0.4], [0.8, 0.4, 0.4]]
    sums = jnp.asarray([list(rows) for rows in zip(probabilities, chosen, entropy)])
    routed = RoutingStats(sums, jnp.float32(4))
    # f = (8, 7, 1) / 8, P = (5, 1.5, 1.5) / 8.
    assert float(balance_loss(routed)) == pytest.approx(3 * (40 + 10.5 + 1.5) / 64)
    found = {key: float(x) for key, x in balance_metrics(routed).items()}
    # Eight choices over three experts: an even share is 8 / 3.
    wanted = {"router_entropy": 4 / 8, "expert_load_max": 4 / (8 / 3), "experts_unused": 1 / 6}
    assert found == pytest.approx(wanted)
    nothing = RoutingStats(jnp.zeros((2, 3, 3)), jnp.float32(0))
    assert float(balance_loss(nothing)) == 0
    assert all(np.isfinite(float(x)) for x in balance_metrics(nothing).values())


# name -> (row of MODELS, changes, train sizes, micro_batch, passes).
RUNS = {
    "data": ("mixtral", EVEN, {"data": 8}, 0, 1),
    "fsdp, passes": ("mixtral", EVEN, {"fsdp": 4, "data": 1}, 8, 2),
    "expert, tensor, fsdp": ("qwen3 experts", EXPERTS, {"expert": 2, "fsdp": 2, "tensor": 2}, 0, 1),
    "expert, context": ("qwen3 experts", EXPERTS, {"expert": 2, "context": 2, "data": 2}, 0, 1),
    "sinks, context, tensor": (
        "gpt-oss", EVEN | {"num_local_experts": 4}, {"expert": 2, "tensor": 2, "context": 2}, 0, 1,
    ),
    "pipe, expert, context": (
        "mixtral", EVEN | {"num_local_experts": 4}, {"pipe": 2, "expert": 2, "context": 2}, 8, 2,
    ),
    "pipe, fsdp, tensor, default passes": (
        "qwen3 experts", EXPERTS, {"pipe": 2, "fsdp": 2, "tensor": 2}, 0, 8,
    ),
    "pipe of kinds": (
        "gpt-oss", EVEN | {"num_local_experts": 4}, {"pipe": 2, "data": 2, "context": 2}, 4, 4,
    ),
}  # fmt: skip
EVERY_DAY: set[str] = set()


@pytest.mark.parametrize(
    "name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_every_layout_has_the_loss_of_one_device(name, saved):
    """With the same micro-batches: those of several parts are made of rows of each."""
    row, changes, train, micro_batch, passes = RUNS[name]
    path, batch = saved(row, **changes), batch_of(advantages=1.0)
    devices = int(np.prod(list(train.values())))
    found = update(path, batch, devices=devices, train=train, micro_batch=micro_batch)
    parts = make_layouts(jax.devices()[:devices], train).train.shard_count("batch")
    order = np.arange(ROWS).reshape(parts, passes, -1).swapaxes(0, 1).reshape(-1)
    ordered = {key: x[order] for key, x in batch.items()}
    alone = {} if passes == 1 else {"micro_batch": ROWS // passes}
    same(found, update(path, ordered, **alone), more={"pipeline_bubble"})
    assert found[0]["router_loss"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["expert, context", "pipe, expert, context"])
def test_the_kernels_of_long_sequences_change_nothing(name, saved, monkeypatch):
    row, changes, train, micro_batch, _ = RUNS[name]
    path, batch = saved(row, **changes), batch_of(advantages=1.0)
    options = {"devices": 8, "train": train, "micro_batch": micro_batch}
    expected = update(path, batch, **options)
    monkeypatch.setattr("hjax.models.attention_strategies.DENSE_LENGTH", 0)  # any length is long
    same(update(path, batch, **options), expected)


# What the loss is the same with: changes of the update.
TOGETHER = {
    "packs": {"packing": PROMPT + 3 * LENGTH},
    "packs of one prompt each": {"packing": PROMPT + 3 * LENGTH, "samples": 1},
    "rows of their own": {"samples": 1},
    "packs, parts": {"packing": PROMPT + 3 * LENGTH, "devices": 4},
    "unrolled": {"compute": Compute(unroll_layers=True)},
    "recomputed": {"compute": Compute(remat="full")},
    "recomputed but attention": {"compute": Compute(remat="attention")},
    "recomputed but products": {"compute": Compute(remat="products")},
    "recomputed from the host's memory": {"compute": Compute(remat="offload")},
}


@pytest.mark.parametrize(
    "name",
    [n if n == "packs" else pytest.param(n, marks=pytest.mark.slow) for n in TOGETHER],
)
@pytest.mark.extended
def test_the_loss_is_the_same(name, saved):
    path, batch = saved("qwen3 experts"), batch_of(advantages=1.0)
    found = update(path, batch, **TOGETHER[name])
    same(found, update(path, batch), more={"padding"})


@pytest.mark.extended
def test_a_step_is_the_sum_of_its_micro_batches_by_share_of_tokens(saved):
    """Of two passes each has a loss of its own, weighted by the tokens that it counts."""
    path, batch = saved("mixtral", num_hidden_layers=1), batch_of()
    whole = update(path, batch, micro_batch=ROWS // 2)[0]
    halves = [{k: x[rows] for k, x in batch.items()} for rows in np.split(np.arange(ROWS), 2)]
    theirs = model("mixtral", num_hidden_layers=1)
    with torch.no_grad():
        losses = [aux_loss(theirs, half).item() for half in halves]
    counts = []
    for half in halves:
        tokens = half["prompt_mask"].sum(1) + half["response_mask"].sum(1) - 1
        counts.append(tokens[half["row_mask"] & half["response_mask"].any(1)].sum())
    assert whole["router_loss"] == pytest.approx(np.average(losses, weights=counts), rel=1e-5)
    # What is shown beside it is of all tokens at once.
    once = update(path, batch)[0]
    for key in ("router_entropy", "expert_load_max", "experts_unused"):
        assert whole[key] == pytest.approx(once[key], rel=1e-5)
    assert whole["router_loss"] != pytest.approx(once["router_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind, stage", [(Critic, "main"), (Actor, "warm_start")])
def test_every_update_has_it(kind, stage, saved):
    path, batch = saved("mixtral"), batch_of() | {"returns": np.ones((ROWS, LENGTH), np.float32)}
    batch["values"] = batch["returns"]
    on, off = (update(path, batch, kind, stage=stage, router_loss=w)[0] for w in (WEIGHT, 0.0))
    with torch.no_grad():
        loss = aux_loss(model("mixtral"), batch).item()
    assert on["router_loss"] == pytest.approx(loss, rel=1e-5)
    assert on["loss"] - off["loss"] == pytest.approx(WEIGHT * loss, rel=1e-5)
    assert on.keys() - off.keys() == {
        "router_loss", "router_entropy", "expert_load_max", "experts_unused"
    }  # fmt: skip


@pytest.mark.slow
def test_pretraining_has_none_of_its_own(saved):
    path, batch = saved("mixtral"), batch_of()
    keys = ("prompts", "prompt_mask", "responses", "response_mask")
    pretrain = {key: batch[key][::2] for key in keys} | {"coefficient": np.float32(0.5)}
    more = {"pretrain": pretrain}
    on, off = (update(path, batch, router_loss=w, more=more)[0] for w in (WEIGHT, 0.0))
    with torch.no_grad():
        loss = aux_loss(model("mixtral"), batch).item()
    assert on["pretrain_loss"] == pytest.approx(off["pretrain_loss"], rel=1e-6)
    assert on["loss"] - off["loss"] == pytest.approx(WEIGHT * loss, rel=1e-5)


@pytest.mark.slow
def test_adapters_learn_from_it_and_a_frozen_router_does_not(saved):
    """An adapter's B starts at 0, where its gradient is scaling * A^T times its matrix's."""
    path, batch = saved("mixtral"), batch_of()
    lora = Lora(2, 6.0, ("q", "o"))
    changed = dataclasses.replace(read_config(path), lora=lora)
    metrics, gradient = update(path, batch, model=changed)
    plain, whole = update(path, batch)
    assert metrics["router_loss"] == pytest.approx(plain["router_loss"], rel=1e-6)
    worker = Actor(
        WorkerContext(
            role="actor",
            layouts=make_layouts(jax.devices()[:1]),
            model=changed,
            path=str(path),
            loss=PolicyLoss(),
            optimizer=DESCENT,
        )
    )
    worker.initialize()
    drawn = to_host(worker.params)["layers"]
    for name, spec in (("q", "ldr,ldhe->lrhe"), ("o", "lher,lhed->lrd")):
        expected = 3.0 * np.einsum(spec, drawn[f"{name}_a"], whole["layers"][name])
        error = np.linalg.norm(gradient["layers"][f"{name}_b"] - expected)
        assert error <= 1e-5 * np.linalg.norm(expected) + 1e-8, name
        assert np.linalg.norm(expected) > 1e-4
    assert not gradient["layers"]["router"].any() and whole["layers"]["router"].any()


def test_a_model_without_experts_is_refused(saved):
    with pytest.raises(ConfigError, match=r"actor: router_loss=10.0 is for models with experts"):
        update(saved("qwen3"), batch_of())


@pytest.mark.extended
def test_a_run_takes_the_weight_of_its_key_or_of_config_json(tmp_path):
    ours = get_task("sorting").tokenizer()
    folders = {}
    for row, more in (("mixtral", {"router_aux_loss_coef": 0.25}), ("qwen3", {})):
        folders[row] = tmp_path / row
        model(row, vocab_size=16, num_hidden_layers=1, **more).save_pretrained(folders[row])
        ours.save(folders[row])
    base = {"actor.path": str(folders["mixtral"]), "steps": 1}
    with trainer_of("GRPO", base | {"actor.router_loss": -1.0}) as trainer:
        (row,) = trainer.run()
        assert trainer.roles.builds["actor"].arguments[0].router_loss == 0.25
    assert row["actor/router_loss"] >= 1 and 0 < row["actor/router_entropy"] <= np.log(5)
    assert row["actor/expert_load_max"] >= 1 and 0 <= row["actor/experts_unused"] < 1
    with trainer_of("GRPO", base) as trainer:
        (row,) = trainer.run()
    assert not any("router" in key or "expert" in key for key in row)
    said = r"config.actor.router_loss=0.1 balances experts, and the actor's model has none; use 0"
    keys = {"actor.path": str(folders["qwen3"]), "actor.router_loss": 0.1}
    with pytest.raises(ConfigError, match=said), trainer_of("GRPO", keys):
        pass


@pytest.mark.slow
def test_routers_that_prefer_two_experts_learn_to_spread(saved):
    """gpt-oss, a bias of whose routers sends nearly every token to two of five experts."""
    path, batch = saved("gpt-oss"), batch_of()
    loss, load = {}, {}
    for weight in (1.0, 1e-9):
        worker = Actor(
            WorkerContext(
                role="actor",
                layouts=make_layouts(jax.devices()[:1]),
                model=read_config(path),
                path=str(path),
                samples=SAMPLES,
                max_response_length=LENGTH,
                loss=PolicyLoss(),
                optimizer=OptimizerConfig(1e-2, epsilon=1e-5),
                router_loss=weight,
            )
        )
        worker.initialize()
        layers = worker.params["layers"]
        bias = jnp.zeros_like(layers["router_bias"]).at[:, :2].set(3.0)
        worker.params = worker.params | {"layers": layers | {"router_bias": bias}}
        rows = [worker.update(batch) for _ in range(60)]
        loss[weight] = [float(row["router_loss"]) for row in rows]
        load[weight] = [float(row["expert_load_max"]) for row in rows]
    # Two of five experts per token: 2.5 even shares are all there is, and an even spread loses 2.
    assert loss[1.0][0] == loss[1e-9][0] > 3.9 and load[1.0][0] == load[1e-9][0] > 2.4
    assert loss[1.0][-1] < 2.1 and load[1.0][-1] < 2.1
    assert loss[1e-9][-1] > 3.9 and load[1e-9][-1] > 2.4
