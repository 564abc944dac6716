"""The plan of what crosses between disjoint pools, with no device at hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from hjax.errors import ConfigError, RunError
from hjax.sharded_values import within
from hjax.sharding.layout import make_layouts
from hjax.sharding.transfer_plan import (
    TransferArray,
    device_regions,
    fully_sharded,
    plan_transfer,
    plan_tree_transfer,
)


def mesh_of(**sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def random_sharding(rng, mesh, shape):
    """A random split, of what divides, over a random choice of axes in a random order."""
    parts = [[] for _ in shape]
    for axis in rng.permutation(list(mesh.shape)):
        i = int(rng.integers(-1, len(shape)))
        ways = math.prod(mesh.shape[a] for a in parts[i]) * mesh.shape[axis] if shape else 0
        if shape and i >= 0 and shape[i] % ways == 0:
            parts[i].append(str(axis))
    return NamedSharding(mesh, P(*(tuple(axes) or None for axes in parts)))


def slices(region):
    return (..., *(slice(start, stop) for start, stop in region))


@pytest.mark.parametrize("seed", range(25))
def test_every_byte_arrives_once_whatever_the_layouts(seed):
    """Brute force: each device's numbers are marked, sent as planned, and counted."""
    rng = np.random.default_rng(seed)
    pools = [
        mesh_of(a=int(rng.integers(1, 4)), b=int(rng.integers(1, 4)), c=int(rng.integers(1, 3)))
        for _ in range(2)
    ]
    shapes, source, landing = {}, {}, {}
    for name in "uvwxyz":
        shape = tuple(rng.choice([1, 2, 6, 12, 18], size=rng.integers(0, 4)).tolist())
        shapes[name] = jax.ShapeDtypeStruct(shape, rng.choice([jnp.float32, jnp.bfloat16]))
        source[name] = random_sharding(rng, pools[0], shape)
        landing[name] = fully_sharded(random_sharding(rng, pools[1], shape), shapes[name])
    per = [int(rng.choice([n for n in range(1, m.size + 1) if m.size % n == 0])) for m in pools]
    processes = [[i // n for i in range(m.size)] for n, m in zip(per, pools)]
    plan = plan_tree_transfer(source, landing, shapes, *processes)
    assert plan.nbytes == sum(plan.sent.values()) == sum(plan.received.values())
    total = 0
    for name, x in shapes.items():
        truth = np.arange(math.prod(x.shape)).reshape(x.shape)
        held = [truth[slices(r)] for r in device_regions(source[name], x.shape)]
        arrived = {p: np.full(x.shape, -1) for p in processes[1]}
        for send in plan.by_name[name]:
            assert send.from_process == processes[0][send.sender]
            assert send.to_process == processes[1][send.receiver]
            numbers = held[send.sender][within(send.region, send.source_region)]
            assert send.nbytes == numbers.size * x.dtype.itemsize
            place = arrived[send.to_process][slices(send.region)]
            assert (place == -1).all()  # nothing twice
            place[...] = numbers
        wanted = {p: np.zeros(x.shape, bool) for p in processes[1]}
        for process, region in zip(processes[1], device_regions(landing[name], x.shape)):
            wanted[process][slices(region)] = True
        for process, mask in wanted.items():
            np.testing.assert_array_equal(arrived[process], np.where(mask, truth, -1))
            total += mask.sum() * x.dtype.itemsize
        # One device alone sends a region.
        assert len({(s.region, s.sender) for s in plan.by_name[name]}) == len(
            {s.region for s in plan.by_name[name]}
        )
    assert plan.nbytes == total


@pytest.mark.parametrize("seed", range(5))
def test_replicas_share_the_sending(seed):
    """Where all hold all, no process sends more than another by more than one region."""
    rng = np.random.default_rng(seed)
    ours, theirs = mesh_of(data=int(rng.integers(2, 7))), mesh_of(data=2, tensor=4)
    shapes = {
        f"x{i}": jax.ShapeDtypeStruct((8 * int(rng.integers(1, 9)), 3), jnp.float32)
        for i in range(20)
    }
    source = {name: NamedSharding(ours, P()) for name in shapes}
    landing = {name: fully_sharded(NamedSharding(theirs, P()), x) for name, x in shapes.items()}
    plan = plan_tree_transfer(source, landing, shapes)
    assert plan.nbytes == sum(x.size * 4 for x in shapes.values())
    assert len(plan.sent) == ours.size
    largest = max(send.nbytes for send in plan.sends)
    assert max(plan.sent.values()) - min(plan.sent.values()) <= largest
    assert set(plan.received.values()) == {plan.nbytes // 8}


def test_what_one_alone_has_is_given_out_first():
    """Device 0 must send the first array whole, so 1 sends the second, which both have."""
    whole, none = ((0, 4),), ((0, 0),)
    alone = TransferArray("a", (4,), np.dtype("f4"), (whole, none), (whole,))
    both = TransferArray("b", (4,), np.dtype("f4"), (whole, whole), (whole,))
    for order in ([alone, both], [both, alone]):
        plan = plan_transfer(order)
        assert {send.name: send.sender for send in plan.sends} == {"a": 0, "b": 1}


def test_a_process_takes_once_what_several_of_its_devices_want():
    shapes = {"scale": jax.ShapeDtypeStruct((), jnp.float32)}
    source = {"scale": NamedSharding(mesh_of(data=4), P())}
    landing = {"scale": fully_sharded(NamedSharding(mesh_of(data=4), P()), shapes["scale"])}
    assert plan_tree_transfer(source, landing, shapes).received == dict.fromkeys(range(4), 4)
    plan = plan_tree_transfer(source, landing, shapes, [0, 0, 1, 1], [5, 5, 7, 7])
    assert plan.received == {5: 4, 7: 4} and plan.sent == {0: 8}
    assert [(send.receiver, send.to_process) for send in plan.sends] == [(0, 5), (2, 7)]


def test_regions_are_those_of_the_devices():
    layouts = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": 2})
    abstract = make_layouts(8, {"data": 2, "tensor": 4}, {"tensor": 2})
    shape = (4, 16, 8)
    for axes in (("layers", "embed", "heads"), ("batch", "vocab"), ()):
        for stage in ("train", "generate"):
            sharding = getattr(layouts, stage).sharding(*axes)
            known = sharding.devices_indices_map(shape)
            expected = tuple(
                tuple(s.indices(n)[:2] for s, n in zip(known[device], shape))
                for device in sharding.mesh.devices.flat
            )
            assert device_regions(sharding, shape) == expected
            assert device_regions(getattr(abstract, stage).sharding(*axes), shape) == expected


def test_pools_of_hundreds_of_devices_that_are_not_there():
    """7B's largest arrays, fsdp 32 x tensor 8 to data 32 x tensor 16."""
    train = make_layouts(256, {"fsdp": 32, "tensor": 8}).train
    generate = make_layouts(512, {"data": 32, "tensor": 16}).generate
    axes = {"up": ("layers", "embed", "mlp"), "table": ("vocab", "embed")}
    shapes = {
        "up": jax.ShapeDtypeStruct((32, 4096, 11008), jnp.bfloat16),
        "table": jax.ShapeDtypeStruct((32000, 4096), jnp.bfloat16),
    }
    source = {name: train.sharding(*axes[name]) for name in shapes}
    landing = {n: fully_sharded(generate.sharding(*axes[n]), x) for n, x in shapes.items()}
    hosts = [i // 8 for i in range(256)], [i // 8 for i in range(512)]
    plan = plan_tree_transfer(source, landing, shapes, *hosts)
    assert plan.nbytes == 2 * sum(x.size for x in shapes.values())
    assert set(plan.sent.values()) == {plan.nbytes // 32}
    assert set(plan.received.values()) == {plan.nbytes // 64}


def test_spread_over_what_is_free():
    layouts = make_layouts(8, {"data": 2, "tensor": 4}, {"tensor": 2})
    q = jax.ShapeDtypeStruct((4, 16, 8), jnp.float32)
    landing = fully_sharded(layouts.generate.sharding("layers", "embed", "heads"), q)
    assert int(np.prod(landing.shard_shape(q.shape))) == 4 * 16 * 8 // 8


def test_layouts_that_make_no_plan_are_refused():
    half, rest, whole = ((0, 2),), ((2, 4),), ((0, 4),)
    f4 = np.dtype("f4")
    with pytest.raises(RunError, match=r"q \[4\]: no part holds the region \(\(2, 4\),\)"):
        plan_transfer([TransferArray("q", (4,), f4, (half, half), (whole,))])
    with pytest.raises(RunError, match=r"q \[4\]: the regions .* overlap in \(\(0, 2\),\)"):
        plan_transfer([TransferArray("q", (4,), f4, (half, rest), (half, whole))])
    with pytest.raises(ConfigError, match="source_processes has 3 entries, but .* 2 devices"):
        plan_transfer([TransferArray("q", (4,), f4, (half, rest), (whole,))], [0, 0, 1])
    with pytest.raises(ConfigError, match=r"dimension 0 of an array \[6\] .* over data=4"):
        device_regions(NamedSharding(mesh_of(data=4), P("data")), (6,))
    with pytest.raises(ConfigError, match="lay it out by a NamedSharding"):
        device_regions(jax.sharding.SingleDeviceSharding(jax.devices()[0]), (6,))
