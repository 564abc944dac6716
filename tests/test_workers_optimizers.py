"""Optimizers by their names, and one of a file's, against plain optax on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import computed, tiny_config, trainer_of

from hjax.errors import ConfigError
from hjax.models.lora import Lora
from hjax.models.model_config import ModelConfig
from hjax.models.parameters import decoder_network
from hjax.roles import OPTIMIZERS
from hjax.sharding.layout import make_layouts
from hjax.workers import OptimizerConfig, Updater
from hjax.workers.micro_batching import MicroBatches
from hjax.workers.optimizer import load_optimizer

SHAPE = ModelConfig(
    vocab_size=160,
    hidden_size=128,
    mlp_size=256,
    layers=2,
    heads=2,
    kv_heads=2,
    head_dim=128,
    max_length=16,
)
MOE = {"experts": 4, "experts_per_token": 2, "family": "mixtral"}
RATE, DECAY, UPDATES = 0.02, 0.1, 4
BETAS = {"b1": 0.8, "b2": 0.95}
LAYOUTS = {
    "fsdp and tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp": {"fsdp": 8},
}


def rate(count):
    """A rise over two updates."""
    return RATE * jnp.minimum((count + 1) / 2, 1)


def is_matrix(path, _):
    return not jax.tree_util.keystr(path).endswith("norm']")


def decayed(params):
    return jax.tree.map_with_path(is_matrix, params)


def dimensions(params):
    """By hand: of stacked layers a matrix each, of keys and values, gate and up one each too."""
    joined = {
        "q": ((1,), (2, 3)),
        "kv": ((1,), (3, 4)),
        "o": ((1, 2), (3,)),
        "gate_up": ((1,), (3,)),
        "down": ((1,), (2,)),
    }
    layers = {
        name: optax.contrib.MuonDimensionNumbers(*joined[name]) if name in joined else None
        for name in params["layers"]
    }
    return {name: None for name in params} | {"layers": layers}


def momentum(learning_rate):
    """An optimizer of a user's own: nothing in its state counts."""
    return optax.chain(optax.trace(0.5), optax.stateless(lambda u, _: optax.tree.scale(-RATE, u)))


PLAIN = {
    "adamw": optax.adamw(rate, **BETAS, weight_decay=DECAY, mask=decayed),
    "adam": optax.adam(rate, **BETAS),
    "sgd": optax.sgd(rate),
    "lion": optax.lion(rate, **BETAS, weight_decay=DECAY, mask=decayed),
    "adafactor": optax.adafactor(rate),
    "muon": optax.contrib.muon(
        rate,
        weight_decay=DECAY,
        adam_b1=BETAS["b1"],
        adam_b2=BETAS["b2"],
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    ),
    "own": momentum(rate),
}
WITH_DECAY = ("adamw", "lion", "muon")


def settings(name):
    return OptimizerConfig(
        RATE,
        warmup_updates=2,
        weight_decay=DECAY if name in WITH_DECAY else 0.0,
        beta1=BETAS["b1"],
        beta2=BETAS["b2"],
        optimizer=momentum if name == "own" else name,
    )


def waves(params, batch, stack):
    """A loss that pulls at every parameter; gradients of more and of less than the limit's norm."""
    numbered = enumerate(jax.tree.leaves(params), 1)
    return jnp.mean(batch["scale"]) * sum(jnp.sum(jnp.sin(x * i)) for i, x in numbered), {}


def batches():
    return [{"scale": np.full(8, 1e-4 * (1 + 99 * (i % 2)), np.float32)} for i in range(UPDATES)]


def whole(params, batch):
    return waves(params, batch, None)[0]


def update_all(name, layout):
    """Parameters and state after the updates."""
    train = make_layouts(jax.devices(), LAYOUTS[layout]).train
    network = decoder_network(SHAPE)
    updater = Updater(waves, lambda batch: batch, settings(name), MicroBatches(train, {}), network)
    params = network.create(0, train)
    state = updater.init(params)
    for batch in batches():
        params, state, metrics = updater(params, state, jax.tree.map(jnp.asarray, batch))
    assert float(metrics["learning_rate"]) == pytest.approx(RATE)
    return network, train, params, state


def update_plainly(name):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), PLAIN[name])
    params = decoder_network(SHAPE).create(0, make_layouts(jax.devices()[:1]).train)
    if name == "muon":  # its Adam decays nothing, ours the embedding
        optimizer = optax.chain(optimizer, decay_of("embedding"))
    state, norms = optimizer.init(params), []
    for batch in batches():
        gradients = jax.grad(whole)(params, batch)
        norms.append(float(optax.tree.norm(gradients)))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert min(norms) < 1 < max(norms)
    return params


def decay_of(name):
    def update(updates, state, params):
        pulled = updates[name] - rate(state) * DECAY * params[name]
        return updates | {name: pulled}, state + 1

    return optax.GradientTransformation(lambda _: jnp.int32(0), update)


@pytest.fixture(scope="module")
def plainly():
    found = {}

    def of(name):
        if name not in found:
            found[name] = jax.tree.map(np.asarray, update_plainly(name))
        return found[name]

    return of


@pytest.mark.parametrize(
    "name, layout",
    [*((name, "fsdp and tensor") for name in PLAIN), ("adafactor", "fsdp"), ("muon", "fsdp")],
)
@pytest.mark.extended
def test_updates_are_optax_s_on_every_mesh(name, layout, plainly):
    network, train, params, state = update_all(name, layout)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6),
        jax.tree.map(np.asarray, params),
        plainly(name),
    )

    # What is kept of a parameter lies in its parts, as the estimate counts them.
    def bytes_of(arrays):
        shards = (s for x in arrays for s in x.addressable_shards)
        return sum(s.data.nbytes for s in shards if s.device == jax.devices()[0])

    held = bytes_of(x for x in jax.tree.leaves(state) if x.shape not in ((), (3,)))  # no constants
    assert held == settings(name).state_bytes(network, train)
    size = bytes_of(jax.tree.leaves(params))
    copies = {"adamw": 2, "adam": 2, "sgd": 0, "lion": 1, "own": 1}
    if name in copies:
        assert held == copies[name] * size
    elif name == "adafactor":  # a mean per row and column, of shards too
        assert held < 0.1 * size
    else:  # Muon's momentum of matrices, Adam's two moments of the rest
        assert size < held < 1.5 * size


@pytest.mark.extended
def test_adamw_keeps_what_optax_s_keeps_where_it_did():
    """Checkpoints of before go on, bit for bit."""
    network = decoder_network(SHAPE)
    params = network.create(0, make_layouts(jax.devices()[:1]).train)
    ours = settings("adamw").build(network.declared)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), PLAIN["adamw"])
    states = ours.init(params), theirs.init(params)
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    gradients = jax.tree.map(jnp.cos, params)
    for _ in range(2):
        (mine, first), (other, second) = (
            tx.update(gradients, state, params)
            for tx, state in zip((ours, theirs), states, strict=True)
        )
        states = first, second
        jax.tree.map(np.testing.assert_array_equal, (mine, first), (other, second))


@pytest.mark.parametrize(
    "changes, expected",
    [
        (MOE | {"tie_embeddings": False},
         {"q", "kv", "o", "router", "gate_up", "down"}),
        ({"lora": Lora(rank=2, alpha=2.0, targets=("q", "down"), dora=True)},
         {"q_a", "q_b", "down_a", "down_b"}),
    ],
    ids=["experts", "adapters"],
)  # fmt: skip
def test_which_parameters_are_matrices_to_muon(changes, expected):
    network = decoder_network(dataclasses.replace(SHAPE, **changes))
    learned, _ = network.partition.split(network.shapes)
    declared, _ = network.partition.split(network.declared)
    state = jax.eval_shape(OptimizerConfig(1.0, optimizer="muon").build(declared).init, learned)
    named = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    assert {n.split("'")[-2] for n in named if "['muon']" in n and "['layers']" in n} == expected


@pytest.mark.extended
def test_muon_turns_each_expert_s_matrix_by_itself_and_a_router_s_whole():
    network = decoder_network(dataclasses.replace(SHAPE, **MOE))
    params = network.create(0, make_layouts(jax.devices()[:1]).train)
    optimizer = OptimizerConfig(1.0, max_grad_norm=0.0, optimizer="muon").build(network.declared)
    gradients = jax.tree.map(jnp.cos, params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    # One matrix alone, as optax knows it.
    alone = optax.contrib.muon(1.0, consistent_rms=0.2)
    for name, at in (("down", (1, 3)), ("router", (1,)), ("gate_up", (0, 2, slice(None), 1))):
        matrix = gradients["layers"][name][at]
        expected, _ = alone.update(matrix, alone.init(matrix), matrix)
        np.testing.assert_allclose(updates["layers"][name][at], expected, rtol=1e-4, atol=1e-5)


OWN = """
import optax

def momentum(learning_rate):
    return optax.sgd(learning_rate, 0.5, nesterov=True)

def unfit(learning_rate):
    return learning_rate

def broken(learning_rate):
    return optax.sgd(learning_rat)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


@pytest.mark.extended
def test_runs_go_on_from_checkpoints_and_offloaded_bit_for_bit(own, tmp_path):
    changes = {"steps": 2, "actor.optimizer": "muon", "critic.optimizer": f"{own}:momentum"}
    with trainer_of("PPO", changes) as trainer:
        expected = trainer.run()
    kept = changes | {"checkpoint.every": 1, "actor.offload": "all", "critic.offload": "optimizer"}
    with trainer_of("PPO", kept, tmp_path / "run") as trainer:
        rows = trainer.run(1)
    with trainer_of("PPO", kept, tmp_path / "run") as trainer:
        rows += trainer.run()
    assert [computed(row) for row in rows] == [computed(row) for row in expected]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"actor.optimizer": "sophia"},
         "config.actor.optimizer='sophia': must be one of adamw, adam, sgd, lion, adafactor, muon, "
         "or path.py:function of yours"),
        ({"critic.optimizer": "adam", "critic.weight_decay": 0.1},
         "config.critic.weight_decay=0.1: adam takes none; use 0, or config.critic.optimizer="
         "adamw"),
    ],
)  # fmt: skip
def test_what_is_no_optimizer_is_refused_in_a_line(changes, message):
    with pytest.raises(ConfigError) as refused:
        tiny_config("PPO", changes)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "name, end",
    [
        ("unfit", "it returned function; it must make an optax.GradientTransformation of the "
                  "learning rate (an optax.Schedule)"),
        ("broken", "own.py:11: NameError: name 'learning_rat' is not defined. Did you mean: "
                   "'learning_rate'?"),
        ("mine", "has no mine; it has momentum, unfit, broken"),
    ],
)  # fmt: skip
def test_a_function_that_makes_none_is_refused_in_a_line(name, end, own):
    with pytest.raises(ConfigError) as refused:
        load_optimizer(f"{own}:{name}", "actor.optimizer")
    said = str(refused.value)
    assert said.startswith(f"actor.optimizer='{own}:{name}': ") and "\n" not in said
    assert said.endswith(end) or said.endswith(end.partition(". Did")[0])


def test_every_name_of_the_table_is_tried():
    assert set(OPTIMIZERS) == PLAIN.keys() - {"own"}
