"""The 3D-HybridEngine's transition: an all-gather over the micro axes and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.sharding.layout import make_layouts
from hjax.sharding.transition import Transition

# A made-up model: name -> (logical axes, shape).
LEAVES = {
    "norm": (("layers", "embed"), (2, 16)),
    "q": (("layers", "embed", "heads", "head_dim"), (2, 16, 8, 4)),
    "down": (("layers", "mlp", "embed"), (2, 32, 16)),
    "embedding": (("vocab", "embed"), (64, 16)),
}
SHAPES = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (_, shape) in LEAVES.items()}


def setup(train, generate, dtypes=None):
    layouts = make_layouts(jax.devices(), train, generate)
    source, target = (
        {name: layout.sharding(*axes) for name, (axes, _) in LEAVES.items()}
        for layout in (layouts.train, layouts.generate)
    )
    rng = np.random.default_rng(0)
    values = {
        name: rng.normal(size=shape).astype(np.float32) for name, (_, shape) in LEAVES.items()
    }
    params = jax.tree.map(jax.device_put, values, source)
    return Transition(source, target, SHAPES, dtypes), values, params, source, target


def collectives(transition, params):
    moved = [jax.tree.leaves(params)[i] for i in transition._moved]
    text = transition._program.lower(moved).compile().as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return text, re.findall(rf"= (\S+) ({kinds})(?:-start)?\(", text)


def groups(text):
    """The device groups of all collectives: XLA writes them out, or as a transposed iota."""
    found = set()
    for listed in re.findall(r"replica_groups=\{(\{.*?\})\}", text):
        found |= {frozenset(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", listed)}
    for shape, dims, order in re.findall(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    ):
        shape, dims, order = ([int(n) for n in x.split(",") if n] for x in (shape, dims, order))
        ranks = np.arange(np.prod(dims)).reshape(dims)
        ranks = ranks.transpose(order) if order else ranks
        found |= {frozenset(row) for row in ranks.reshape(shape).tolist()}
    return found


@pytest.mark.parametrize("t, t_g", [(2, 1), (4, 2), (4, 1), (8, 2)])
def test_values_arrive_in_the_generate_layout(t, t_g):
    transition, values, params, _, target = setup({"data": -1, "tensor": t}, {"tensor": t_g})
    assert transition.moves
    after = transition(params)
    for name, value in values.items():
        np.testing.assert_array_equal(after[name], value)
        assert after[name].sharding.is_equivalent_to(target[name], value.ndim)
        np.testing.assert_array_equal(params[name], value)  # training's copy is still there


def test_untouched_leaves_are_the_same_arrays():
    transition, _, params, _, _ = setup({"data": 2, "tensor": 4}, {"tensor": 2})
    after = transition(params)
    assert after["norm"] is params["norm"]
    assert all(after[name] is not params[name] for name in ("q", "down", "embedding"))


def test_equal_layouts_move_nothing():
    transition, _, params, _, _ = setup({"data": 4, "tensor": 2}, {"tensor": 2})
    assert not transition.moves
    assert transition(params) is params


def test_only_all_gathers_inside_the_micro_groups():
    transition, _, params, _, _ = setup({"data": 2, "tensor": 4}, {"tensor": 2})
    text, found = collectives(transition, params)
    assert {kind for _, kind in found} == {"all-gather"}
    assert len(found) == 3
    # Micro data-parallel groups are consecutive ranks; nothing crosses them.
    assert groups(text) == {
        frozenset({0, 1}),
        frozenset({2, 3}),
        frozenset({4, 5}),
        frozenset({6, 7}),
    }
    # No buffer holds a whole parameter: at most half of one (t_g = 2).
    sizes = {name: int(np.prod(shape)) for name, (_, shape) in LEAVES.items() if name != "norm"}
    for dims in re.findall(r"f32\[([\d,]+)\]", text):
        assert int(np.prod([int(n) for n in dims.split(",")])) <= max(sizes.values()) // 2


def test_received_bytes_are_the_papers():
    """(tp - t_g p_g) / (t_g p_g t p) M per device: 1/4 of M for 1-4-2 -> 1,2."""
    transition, _, params, _, _ = setup({"data": 2, "tensor": 4}, {"tensor": 2})
    _, found = collectives(transition, params)
    outputs = [re.match(r"f32\[([\d,]+)\]", kind)[1] for kind, _ in found]
    held = sum(4 * int(np.prod([int(n) for n in dims.split(",")])) for dims in outputs)
    model = sum(4 * int(np.prod(shape)) for name, (_, shape) in LEAVES.items() if name != "norm")
    assert held == model / 2  # peak: M / t_g
    assert held - model / 4 == model / 4  # received: that less the training shard


def test_fsdp_shards_are_gathered_too():
    transition, values, params, _, target = setup({"fsdp": 4, "tensor": 2}, {"tensor": 2})
    _, found = collectives(transition, params)
    assert {kind for _, kind in found} == {"all-gather"}
    after = transition(params)
    for name, value in values.items():
        np.testing.assert_array_equal(after[name], value)
        assert after[name].sharding.is_equivalent_to(target[name], value.ndim)


def test_a_narrower_copy_keeps_what_is_asked_wide():
    dtypes = {name: jnp.bfloat16 for name in LEAVES} | {"norm": jnp.float32}
    transition, values, params, _, _ = setup({"data": 8}, {}, dtypes)
    after = transition(params)
    assert after["norm"] is params["norm"]
    for name in ("q", "down", "embedding"):
        assert after[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(after[name], values[name].astype(jnp.bfloat16))
