"""Weights laid out in memory as a TPU decodes with them, in whole runs on CPUs: equal numbers."""

import jax
import numpy as np
import pytest
from helpers import computed, trainer_of

from hjax.models.model_config import ModelConfig
from hjax.models.parameters import (
    decoder_network,
    decoding_memory_orders,
    in_memory_orders,
    memory_order,
)
from hjax.rollout.generator import Generator
from hjax.sharding.layout import make_layouts

CONFIG = ModelConfig(64, 16, 32, 3, heads=4, kv_heads=2, head_dim=8, max_length=128)
MOVED = {"layout.actor.train.tensor": 4, "layout.actor.generate.tensor": 2}
SHORT = {"steps": 2, "eval.every": 2, "warm_start.steps": 0, "rollout.max_response_length": 12}
CASES = {
    "heads split": SHORT | MOVED,
    "bfloat16, slots": SHORT | MOVED | {"model.dtype": "bfloat16", "rollout.slots": 16},
    "as it trains": SHORT,
    "adapters": SHORT | MOVED | {"actor.lora.rank": 2},
    "apart": SHORT | {"placement": "disaggregate"},
}
EVERYDAY = ("bfloat16, slots",)


def test_orders_put_pairs_and_heads_outside_of_what_is_summed_over():
    axes = {
        "gate_up": ("layers", "embed", "pair", "mlp"),
        "kv": ("layers", "embed", "pair", "kv_heads", "head_dim"),
        "q": ("layers", "embed", "heads", "head_dim"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "down": ("layers", "mlp", "embed"),
        "of experts": ("layers", "experts", "embed", "pair", "mlp"),
    }
    as_declared = {"o": (0, 1, 2, 3), "down": (0, 1, 2), "of experts": (0, 1, 2, 3, 4)}
    whole = {"gate_up": (0, 2, 1, 3), "kv": (0, 2, 3, 1, 4), "q": (0, 2, 1, 3)}
    split = {"gate_up": (0, 2, 1, 3), "kv": (0, 2, 3, 4, 1), "q": (0, 2, 3, 1)}
    assert decoding_memory_orders(axes, heads_split=False) == as_declared | whole
    assert decoding_memory_orders(axes, heads_split=True) == as_declared | split


def test_arrays_are_the_same_numbers_in_another_order_and_what_is_given_up_is_freed():
    layout = make_layouts(jax.devices()[:4], {"data": 2, "tensor": 2}, {"tensor": -1}).generate
    network = decoder_network(CONFIG)
    params = network.create(0, layout)
    host = jax.tree.map(np.array, params)
    orders = decoding_memory_orders(network.axes, heads_split=True)
    given_up = jax.tree.map(lambda x: x.ndim > 4, params)
    laid = in_memory_orders(params, orders, given_up)
    moved = []
    for name, x in laid["layers"].items():
        assert memory_order(x) == orders["layers"][name]
        np.testing.assert_array_equal(x, host["layers"][name])
        if memory_order(x) != tuple(range(x.ndim)):
            moved.append(name)
            assert params["layers"][name].is_deleted() == given_up["layers"][name]
        else:
            assert x is params["layers"][name]
    assert sorted(moved) == ["gate_up", "kv", "q"]
    again = in_memory_orders(laid, orders)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (laid, again)), strict=True))


@pytest.mark.parametrize(
    "name", [n if n in EVERYDAY else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_metrics_are_those_of_weights_as_they_are_declared(name, monkeypatch):
    with trainer_of("GRPO", CASES[name]) as trainer:
        expected = trainer.run()
    monkeypatch.setattr(Generator, "relays", property(lambda _: True))
    with trainer_of("GRPO", CASES[name]) as trainer:
        group = trainer.roles.groups.get("rollout") or trainer.roles.groups["actor"]
        worker = group.worker
        rows = trainer.run()
        if "rollout" not in trainer.roles.groups:
            before = jax.tree.map(np.array, worker.params)
            with worker.generation_weights() as params:
                assert memory_order(params["layers"]["gate_up"]) == (0, 2, 1, 3)
            assert jax.tree.all(jax.tree.map(np.array_equal, worker.params, before))
            assert memory_order(worker.params["layers"]["gate_up"]) == (0, 1, 2, 3)
        else:
            assert memory_order(worker.params["layers"]["gate_up"]) == (0, 2, 1, 3)
    for one, other in zip(rows, expected, strict=True):
        assert computed(one) == pytest.approx(computed(other), rel=2e-3, abs=2e-3)
