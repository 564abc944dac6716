"""The 3D-HybridEngine's transition: there by the planned bytes, back for nothing."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from hjax.errors import RunError
from hjax.sharding.layout import make_layouts, replicate_axes
from hjax.sharding.live_memory import PeakWatch, live_bytes
from hjax.sharding.transition import Transition
from hjax.xla.collectives import collectives, received_bytes

# A made-up model: name -> (logical axes, shape).
LEAVES = {
    "norm": (("layers", "embed"), (4, 16)),
    "q": (("layers", "embed", "heads", "head_dim"), (4, 16, 8, 4)),
    "kv": (("layers", "embed", "pair", "kv_heads", "head_dim"), (4, 16, 2, 8, 4)),
    "down": (("layers", "mlp", "embed"), (4, 32, 16)),
    "embedding": (("vocab", "embed"), (64, 16)),
}
SHAPES = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (_, shape) in LEAVES.items()}
NARROW = {name: jnp.bfloat16 for name in LEAVES} | {"norm": jnp.float32}
# 8 devices, train -> generate; the axes not named are 1, data takes what is left.
LAYOUTS = [
    ({"tensor": 8}, {"tensor": 2}),
    ({"tensor": 4}, {"tensor": 1}),
    ({"fsdp": 4, "tensor": 2}, {"tensor": 2}),
    ({"fsdp": 2, "tensor": 4}, {"tensor": 2}),
    ({"fsdp": 8}, {}),
    ({"pipe": 4, "tensor": 2}, {"pipe": 2, "tensor": 1}),
    ({"pipe": 2, "fsdp": 2, "tensor": 2}, {"pipe": 1, "tensor": 1}),
    ({"pipe": 4}, {"pipe": 1}),
    ({"context": 2, "fsdp": 2, "tensor": 2}, {"tensor": 1}),
]


def bytes_of(names, per=4):
    return sum(per * int(np.prod(LEAVES[name][1])) for name in names)


def shardings(train, generate, whole=()):
    """Of both stages; ``whole``: logical axes that training does not split."""
    layouts = make_layouts(jax.devices()[:8], {"data": -1} | train, generate)
    stages = (replicate_axes(layouts.train, whole), layouts.generate)
    return [{n: s.sharding(*axes) for n, (axes, _) in LEAVES.items()} for s in stages]


def parameters(source, seed=0):
    rng = np.random.default_rng(seed)
    values = {n: rng.normal(size=s).astype(np.float32) for n, (_, s) in LEAVES.items()}
    return values, jax.tree.map(jax.device_put, values, source)


def setup(train, generate, dtypes=None, bucket_bytes=2**24):
    source, target = shardings(train, generate)
    values, params = parameters(source)
    return Transition(source, target, SHAPES, dtypes, bucket_bytes), values, params, source, target


def texts(transition):
    return [trace().lower().compile().as_text() for _, trace in transition.programs()]


def check(params, values, shardings):
    for name, value in values.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value.astype(params[name].dtype))
        assert params[name].sharding.is_equivalent_to(shardings[name], value.ndim), name


@pytest.mark.parametrize(
    "number, dtypes",
    [
        pytest.param(
            number,
            dtypes,
            marks=[pytest.mark.extended] * ((dtypes is None) == bool(number % 2)),
            id=f"{number}-{'narrow' if dtypes else 'same'}",
        )
        for number in range(len(LAYOUTS))
        for dtypes in (None, NARROW)
    ],
)
def test_there_and_back(number, dtypes):
    train, generate = LAYOUTS[number]
    bucket_bytes = [1, 2048, 2**24][number % 3]
    transition, values, params, source, target = setup(train, generate, dtypes, bucket_bytes)
    assert transition.moves
    before = dict(params)
    held = transition.start(params)
    there = transition.to_generate(held)
    check(there, values, target)
    assert {n: x.dtype for n, x in there.items()} == (dtypes or dict.fromkeys(LEAVES, "float32"))
    for name, route in zip(sorted(LEAVES), transition.routes, strict=True):
        assert route.to_generate.name == name
        stays = there[name].dtype != jnp.float32 or route.to_generate.unchanged
        assert before[name].is_deleted() != stays, name
    back = transition.to_train(held)
    check(back, values, source)
    for name, copy in there.items():
        assert copy.is_deleted() == (copy is not back[name])
    cost = transition.cost()
    assert (cost.received, cost.received_back, cost.by_compiler) == (cost.planned, 0, ())


def test_leaves_alike_in_both_layouts_are_the_same_arrays():
    transition, _, params, _, _ = setup({"tensor": 4}, {"tensor": 2})
    held = transition.start(params)
    there = transition.to_generate(held)
    assert there["norm"] is params["norm"]
    assert transition.to_train(held)["norm"] is params["norm"]
    assert not params["norm"].is_deleted()


def test_equal_layouts_move_nothing():
    transition, _, params, _, _ = setup({"data": 4, "tensor": 2}, {"tensor": 2})
    assert not transition.moves and transition.programs() == []
    held = transition.start(params)
    there = transition.to_generate(held)
    assert all(there[name] is params[name] for name in LEAVES)
    assert all(x is params[name] for name, x in transition.to_train(held).items())


def test_only_all_gathers_inside_the_micro_groups():
    transition, *_ = setup({"data": 2, "tensor": 4}, {"tensor": 2})
    (text,) = texts(transition)
    found = collectives(text)
    assert {c.kind for c in found} == {"all-gather"} and len(found) == 4
    # Micro data-parallel groups are consecutive ranks; nothing crosses them.
    groups = {frozenset(group) for c in found for group in c.groups}
    assert groups == {frozenset(pair) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]}


def test_received_bytes_are_the_papers():
    """(tp - t_g p_g) / (t_g p_g t p) M per device, of what is split over all of t p."""
    split = ("q", "kv", "down", "embedding")
    transition, *_ = setup({"data": 2, "tensor": 4}, {"tensor": 2})
    assert transition.cost().received == bytes_of(split) / 4
    transition, *_ = setup({"pipe": 4, "tensor": 2}, {"pipe": 2, "tensor": 1})
    # The embedding is split over tensor alone, the norm over pipe alone.
    rest = bytes_of(["embedding"]) / 2 + bytes_of(["norm"]) / 4
    assert transition.cost().received == bytes_of(("q", "kv", "down")) * (1 / 2 - 1 / 8) + rest
    # With fsdp f as well: M (1 / (p_g t_g) - 1 / (p t f)).
    transition, *_ = setup({"fsdp": 2, "tensor": 4}, {"tensor": 2})
    expected = bytes_of(split) * (1 / 2 - 1 / 8) + bytes_of(["norm"]) / 2
    assert transition.cost().received == expected


def test_half_the_bytes_travel_for_half_the_width():
    split = ("q", "kv", "down", "embedding")
    transition, *_ = setup({"fsdp": 2, "tensor": 4}, {"tensor": 2}, NARROW)
    cost = transition.cost()
    assert cost.received == bytes_of(split, per=2) * (1 / 2 - 1 / 8) + bytes_of(["norm"]) / 2
    assert cost.masters == bytes_of(split) / 8 and cost.redundant == 0
    assert cost.target == bytes_of(split, per=2) / 2 + bytes_of(["norm"])


def test_rows_to_columns_take_the_cheap_route():
    """Fully sharded rows to column tensor parallelism: XLA alone takes a full replica."""
    mesh = make_layouts(jax.devices()[:8], {"fsdp": 2, "tensor": 4}, {"tensor": 4}).train.mesh
    source = {"w": NamedSharding(mesh, P(("fsdp", "tensor"), None))}
    target = {"w": NamedSharding(mesh, P(None, "tensor"))}
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    transition = Transition(source, target, shapes)
    values = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    params = {"w": jax.device_put(values, source["w"])}
    held = transition.start(params)
    np.testing.assert_array_equal(transition.to_generate(held)["w"], values)
    # The new shard does not contain the old one, so that is kept: the way back is free.
    assert not params["w"].is_deleted()
    assert transition.to_train(held)["w"] is params["w"]
    (text,) = texts(transition)
    assert [c.kind for c in collectives(text)] == ["all-to-all", "all-gather"]
    whole = 64 * 64 * 4
    assert received_bytes(text) == transition.cost().planned == whole // 4 * 7 // 8
    assert transition.cost().redundant == whole // 8
    assert "f32[64,64]" not in text


@pytest.mark.parametrize("dtypes", [None, NARROW], ids=["same", "narrow"])
@pytest.mark.extended
def test_a_hundred_round_trips_change_and_lose_nothing(dtypes):
    transition, values, params, source, _ = setup({"fsdp": 2, "tensor": 4}, {"tensor": 2}, dtypes)
    for trip in range(100):
        held = transition.start(params)
        transition.to_generate(held)
        params = transition.to_train(held)
        if trip == 0:
            gc.collect()
            before = live_bytes(jax.devices()), len(jax.live_arrays())
    del held
    gc.collect()
    assert (live_bytes(jax.devices()), len(jax.live_arrays())) == before
    check(params, values, source)


@pytest.mark.extended
def test_no_second_copy_of_the_model():
    """At most M / t_g, a bucket (here a leaf) and nothing else; after the way back M / t again."""
    source, target = shardings({"tensor": 8}, {"tensor": 2})
    transition = Transition(source, target, SHAPES, bucket_bytes=1)
    start = PeakWatch(jax.devices())
    _, params = parameters(source)
    train = start()
    watch = PeakWatch(jax.devices())
    held = transition.start(params)
    transition.to_generate(held, watch)
    split = ("q", "kv", "down", "embedding")
    generate = bytes_of(split) / 2 + bytes_of(["norm"])
    largest = bytes_of(["kv"]) / 8
    assert start() == generate
    transition.to_train(held, watch)
    assert start() == train == bytes_of(split) / 8 + bytes_of(["norm"])
    assert generate - train <= watch.peak <= generate - train + largest
    assert watch.peak + train == transition.cost().peak == transition.peak_bytes()


@pytest.mark.parametrize("dtypes", [None, NARROW], ids=["same", "narrow"])
def test_what_stands_beside_each_program_is_told(dtypes):
    """Counted from shapes, and found alive when it runs."""
    transition, _, _, source, _ = setup({"tensor": 8}, {"tensor": 2}, dtypes, bucket_bytes=1)

    def size(arrays):
        shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in arrays]
        return sum(int(np.prod(shape)) * per for shape, per in shards)

    alive = []
    watch = PeakWatch(jax.devices())
    _, params = parameters(source)
    held = transition.start(params)
    transition.to_generate(held, lambda: alive.append(watch()))
    for number, bucket in enumerate(transition.buckets):
        leaves = [transition.routes[i].to_generate for i in bucket]
        moved = sum(leaf.source_bytes + leaf.target_bytes for leaf in leaves)
        assert alive[number] == size(transition.live_during(number)) + moved
    assert watch() == size(transition.kept_arrays()) + transition.cost().target


def test_a_large_stacked_leaf_goes_slice_by_slice():
    source, target = shardings({"tensor": 8}, {"tensor": 2})
    slices = Transition(source, target, SHAPES, bucket_bytes=1)
    whole = Transition(source, target, SHAPES)
    assert (slices.cost().buckets, whole.cost().buckets) == (4, 1)
    assert slices.cost().received == whole.cost().received
    kv = bytes_of(["kv"])
    # What goes in and comes out of one layer's all-gather, and loop counters.
    assert slices.cost().temporary <= (kv / 8 + kv / 2) / 4 + 256
    found = [c for text in texts(slices) for c in collectives(text)]
    assert sorted(c.times for c in found) == [1, 4, 4, 4]  # the embedding's rows need no loop


def test_pipeline_stages_are_gathered_layer_by_layer():
    """Layers themselves are split, so each slice has a place in every stage's part."""
    source, target = shardings({"pipe": 2, "tensor": 4}, {"pipe": 1, "tensor": 2})
    transition = Transition(source, target, SHAPES, bucket_bytes=1)
    times = [c.times for text in texts(transition) for c in collectives(text)]
    assert max(times) == 2  # layers of a stage
    values, params = parameters(source)
    check(transition.to_generate(transition.start(params)), values, target)


def test_a_failure_halfway_gives_everything_back(monkeypatch):
    transition, values, params, source, _ = setup({"tensor": 8}, {"tensor": 2}, bucket_bytes=1)
    held = transition.start(params)

    def fail(arrays):
        raise MemoryError("no room")

    programs = [*transition._programs[:2], fail, *transition._programs[3:]]
    monkeypatch.setattr(transition, "_programs", programs)
    with pytest.raises(MemoryError, match="no room"):
        transition.to_generate(held)
    assert sum(x.is_deleted() for x in params.values()) == 2
    check(transition.to_train(held), values, source)


def test_a_leaf_that_is_narrowed_by_generation_is_kept():
    """KV heads too few for training's tensor axis: whole there, split while generating."""
    source, target = shardings({"tensor": 8}, {"tensor": 2}, whole=("kv_heads",))
    transition = Transition(source, target, SHAPES)
    values, params = parameters(source)
    held = transition.start(params)
    check(transition.to_generate(held), values, target)
    assert not params["kv"].is_deleted()
    cost = transition.cost()
    assert cost.redundant == bytes_of(["kv"]) and cost.received_back == 0
    assert transition.to_train(held)["kv"] is params["kv"]


def test_what_no_move_does_is_left_to_the_compiler_and_named():
    """Another mesh over the same devices: ranks dealt out the other way round."""
    source, target = shardings({"tensor": 8}, {"tensor": 8})
    other = make_layouts(jax.devices()[:8], {"data": 4, "tensor": 2}, {"tensor": 2}).train
    target = target | {"down": other.sharding("layers", "mlp", "embed")}
    transition = Transition(source, target, SHAPES)
    assert transition.cost().by_compiler == ("down",)
    values, params = parameters(source)
    held = transition.start(params)
    check(transition.to_generate(held), values, target)
    check(transition.to_train(held), values, source)


def test_parameters_laid_out_otherwise_are_refused():
    transition, _, params, _, target = setup({"tensor": 8}, {"tensor": 2})
    wrong = params | {"q": jax.device_put(params["q"], target["q"])}
    with pytest.raises(RunError, match="q is laid out as"):
        transition.start(wrong)
