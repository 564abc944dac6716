"""Meshes on physical wires: devices that are neighbours in a mesh stand next to each other.

Stand-ins have the coordinates; a slow test holds them against libtpu's own.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest

from hjax.dryrun.topologies import list_devices
from hjax.dryrun.transition_cost import lay_out, measure
from hjax.dryrun.transition_groups import Table2Case
from hjax.sharding import layout
from hjax.sharding.device_mesh import place_devices, ring_table
from hjax.sharding.interconnect import domain_of, interconnect_of, partition_devices, ring_load
from hjax.sharding.layout import MESH_AXES


def shape_of(**axes):
    return dict.fromkeys(MESH_AXES, 1) | axes


def in_order(devices, shape):
    grid = np.empty(len(devices), object)
    grid[:] = devices
    return grid.reshape(tuple(shape.values()))


# Mean hops of a ring (and back): as JAX lists the devices, and as they are placed. By hand: along a
# line of 8 without a way around 7 steps of 1 and one of 7, 14 / 8; around, 1; in a box of 2 x 2, 1.
HOPS = [
    ("v5e:8x8", {"data": 8, "tensor": 8}, {"data": (5.5, 1.75), "tensor": (1.75, 1.75)}),
    ("v6e:8x8", {"fsdp": 8, "tensor": 8}, {"fsdp": (5.5, 1.75), "tensor": (1.75, 1.75)}),
    ("v5e:16x16", {"data": 16, "tensor": 16}, {"data": (9.0, 1.0), "tensor": (1.875, 1.0)}),
    ("v5p:4x4x8", {"data": 16, "tensor": 8}, {"data": (2.5, 1.0), "tensor": (1.5, 1.0)}),
    ("v5p:8x8x8", {"data": 64, "tensor": 8}, {"data": (5.125, 1.0), "tensor": (1.75, 1.0)}),
    ("h100:2x8", {"data": 2, "tensor": 8}, {"data": (0.0, 0.0), "tensor": (1.0, 1.0)}),
]


@pytest.mark.parametrize("name, axes, hops", HOPS, ids=[name for name, _, _ in HOPS])
def test_hops_of_each_axis(name, axes, hops):
    devices, shape = list_devices(name), shape_of(**axes)
    before = ring_table(shape, in_order(devices, shape))
    after = ring_table(shape, place_devices(devices, shape))
    assert {axis: (before[axis].hops, after[axis].hops) for axis in after} == hops


def links_between(wires):
    """Neighbours of each device, from the definition of a torus alone."""
    at = {tuple(place): i for i, place in enumerate(wires.places.tolist())}
    found = {i: set() for i in at.values()}
    for place, i in at.items():
        for axis, side in enumerate(wires.sides):
            after = list(place)
            after[axis] += 1
            if after[axis] == side and wires.wraps[axis]:
                after[axis] = 0
            if tuple(after) in at and tuple(after) != place:
                found[i].add(at[tuple(after)])
                found[at[tuple(after)]].add(i)
    return found


@pytest.mark.parametrize("name", ["v5e:4x8", "v5e:16x16", "v5p:4x4x4", "v5p:2x2x4", "tpu7x:2x2x2"])
def test_hops_are_the_shortest_ways_over_links(name):
    wires = interconnect_of(list_devices(name))
    links, far = links_between(wires), {0: 0}
    for reached in itertools.count(1):
        new = {j for i, n in far.items() if n == reached - 1 for j in links[i]} - set(far)
        if not new:
            break
        far |= dict.fromkeys(new, reached)
    others = np.arange(len(far))
    assert wires.hops(np.zeros_like(others), others).tolist() == [far[i] for i in others.tolist()]


def random_shapes(count, devices):
    draw = random.Random(devices)
    for _ in range(count):
        shape = shape_of()
        left = devices
        while left > 1:
            factor = next(n for n in (2, 3, 5, 7) if left % n == 0)
            shape[draw.choice([a for a in MESH_AXES if a not in ("context", "expert")])] *= factor
            left //= factor
        yield shape


NAMES = ["v5e:8x8", "v5p:4x4x8", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x2", "h100:4x8", "h100:3x4"]


@pytest.mark.parametrize("name", NAMES)
def test_every_device_has_one_place_whatever_the_order_and_no_axis_is_far(name):
    devices = list_devices(name)
    mixed = list(devices)
    random.Random(0).shuffle(mixed)
    for shape in random_shapes(4, len(devices)):
        grid = place_devices(devices, shape)
        assert {d.id for d in grid.ravel()} == {d.id for d in devices}
        assert (place_devices(mixed, shape) == grid).all()
        before = ring_table(shape, in_order(devices, shape))
        after = ring_table(shape, grid)
        assert sum(r.network for r in after.values()) <= sum(r.network for r in before.values())


def test_a_step_s_ways_are_shorter_by_far():
    """Tensor axes, used in every layer, never lose; all together are less than two thirds."""
    ways = {"before": [], "after": []}
    for name, t, t_g in itertools.product(("v5e:8x8", "v5p:4x4x8"), (2, 4, 8), (1, 2, 4)):
        devices = list_devices(name)
        if t_g <= t:
            data = len(devices) // t
            shape = shape_of(fsdp=data, tensor=t_g, tensor_micro=t // t_g)
            before = ring_table(shape, in_order(devices, shape))
            after = ring_table(shape, place_devices(devices, shape))
            assert after["tensor"].hops <= before["tensor"].hops
            ways["before"] += [r.hops for r in before.values()]
            ways["after"] += [r.hops for r in after.values()]
    assert np.mean(ways["after"]) < min(1.4, 0.65 * np.mean(ways["before"]))


def test_the_cost_model_knows_the_sharing_of_links():
    """``ring_load`` against rings that are routed link by link on the placed devices."""
    same, wrong, off = 0, 0, []
    for name in ("v5e:8x8", "v5e:4x4", "v5p:4x4x4", "v5p:4x4x8"):
        devices = list_devices(name)
        wires, n = interconnect_of(devices), len(devices)
        for t, f in itertools.product((1, 2, 4, 8, 16), repeat=2):
            if n % (t * f) == 0:
                axes = {"data": (n // t // f, t * f), "fsdp": (f, t), "tensor": (t, 1)}
                shape = shape_of(**{axis: size for axis, (size, _) in axes.items()})
                table = ring_table(shape, place_devices(devices, shape))
                for axis, (size, stride) in axes.items():
                    if size > 1:
                        load = ring_load(wires.sides, wires.wraps, size, stride)
                        ratio = load / table[axis].busiest
                        same, wrong = same + (ratio == 1), wrong + (ratio != 1)
                        off.append(abs(math.log2(ratio)))
    assert same > 8 * wrong and np.mean(off) < 0.15


def test_a_part_of_a_slice_closes_only_where_it_is_whole():
    @dataclasses.dataclass(frozen=True)
    class Client:
        every: list

        def devices(self):
            return self.every

    class Device:
        def __init__(self, stand_in):
            self.__dict__ |= dataclasses.asdict(stand_in)

    devices = [Device(d) for d in list_devices("v5p:4x4x8")]
    for d in devices:
        d.client = Client(devices)
    assert interconnect_of(devices).wraps[:3] == (True, True, True)
    first, second = partition_devices(devices, [64, 64])
    for half in (first, second):
        assert interconnect_of(half).sides[:3] == (4, 4, 4)
        assert interconnect_of(half).wraps[:3] == (True, True, False)


@pytest.mark.parametrize(
    "name, counts, boxes",
    [
        ("v5e:8x8", (16, 32, 16), [(4, 4), (4, 8), (4, 4)]),
        ("v5p:4x4x8", (8, 64, 32, 16), [(2, 2, 2), (4, 4, 4), (2, 4, 4), (2, 2, 4)]),
        ("v6e:8x8", (16,), [(4, 4)]),
    ],
)
def test_sets_are_boxes_of_a_slice(name, counts, boxes):
    parts = partition_devices(list_devices(name), counts)
    assert len({d.id for part in parts for d in part}) == sum(counts)
    for part, box in zip(parts, boxes, strict=True):
        sides = np.ptp([d.coords for d in part], axis=0) + 1
        assert sorted(sides[sides > 1].tolist()) == sorted(box)


def test_sets_of_gpus_stay_in_a_host_where_they_fit():
    for part in partition_devices(list_devices("h100:2x8"), (4, 8, 4)):
        assert len({d.process_index for d in part}) == 1
    # Simulated devices are dealt out as they come.
    assert partition_devices(list(range(6)), (2, 3)) == [[0, 1], [2, 3, 4]]


def test_a_rack_that_nvlink_joins_is_one_domain():
    rack = [dataclasses.replace(d, device_kind="NVIDIA GB200") for d in list_devices("b200:18x4")]

    class Gpu:
        def __init__(self, stand_in, fabric):
            self.__dict__ |= dataclasses.asdict(stand_in) | {"fabric_uuid": fabric}

    joined = [Gpu(d, "5f-1") for d in rack]
    assert interconnect_of(joined).sides == (72,) and interconnect_of(joined).boxes == 1
    assert interconnect_of(rack).boxes == 18
    # An H100 may report a fabric that joins no hosts.
    other = Gpu(dataclasses.replace(rack[0], device_kind="NVIDIA H100"), "5f-1")
    assert domain_of(other) == (1, 0)
    told = [
        dataclasses.replace(d, slice_index=d.process_index // 2) for d in list_devices("h100:4x4")
    ]
    assert interconnect_of(told).boxes == 2 and interconnect_of(told).sides == (8,)


def test_axes_over_several_slices_take_the_major_axes():
    slices = [
        dataclasses.replace(d, slice_index=s, id=d.id + 16 * s)
        for s in range(2) for d in list_devices("v5e:4x4")
    ]  # fmt: skip
    shape = shape_of(data=2, fsdp=4, tensor=4)
    table = ring_table(shape, place_devices(slices, shape))
    assert [table[axis].network for axis in ("data", "fsdp", "tensor")] == [1, 0, 0]


def mixed_up(devices, shape):
    """Any order of the devices, another for each mesh: what a torus may do to it."""
    grid = np.empty(len(devices), object)
    grid[:] = random.Random(str(shape)).sample(list(devices), len(devices))
    return grid.reshape(tuple(shape.values()))


@pytest.mark.parametrize("case", [(1, 4, 2, 1, 2), (2, 4, 1, 1, 2), (1, 8, 1, 1, 1)])
def test_the_grouping_holds_in_any_order_of_the_devices(case, monkeypatch):
    """Zero redundancy, and the formula's bytes: they follow from ranks, not from devices."""
    monkeypatch.setattr(layout, "place_devices", mixed_up)
    leaves = {"matrix": (("layers", "embed", "heads"), jax.ShapeDtypeStruct((8, 4, 8), "float32"))}
    asked = Table2Case(*case)
    setup = lay_out(asked, "hybridflow", jax.devices(), leaves)
    assert list(setup.layouts.train.mesh.devices.ravel()) != jax.devices()[: asked.devices]
    found = measure(asked, "hybridflow", setup, bucket_bytes=1)
    assert found["executed"]
    for what in ("communication", "redundancy"):
        assert found["measured"][what] == found["analytic"][what]


RUN = """
import json, random, sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 8)
import hjax
from hjax.sharding import layout
from tests.extended.test_sharding_wires import mixed_up
if sys.argv[1] == "mixed":
    layout.place_devices = mixed_up
from hjax.settings.config_checks import check_config
config = check_config({
    "algorithm.name": "GRPO", "algorithm.kl_coef": 0.01, "rollout.samples": 2,
    "data.task": "sorting", "model.dtype": "float32", "steps": 2,
    "model.hidden_size": 32, "model.layers": 1, "model.heads": 4, "model.kv_heads": 4,
    "model.mlp_size": 64, "rollout.prompts": 8, "rollout.max_response_length": 8,
    "layout.actor.train.fsdp": 2, "layout.actor.train.tensor": 4,
    "layout.actor.generate.tensor": 2, "warm_start.steps": 0,
    "eval.every": 0, "checkpoint.every": 0, "display.enabled": False,
})
trainer = hjax.Trainer(config)
trainer.run()
rows = [{k: v for k, v in row.items() if k.split("/")[0] in ("reward", "actor", "kl")}
        for row in trainer.history]
trainer.close()
print(json.dumps(rows))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_s_results_are_the_same_in_any_order_of_the_devices():
    def rows(order):
        done = subprocess.run(
            [sys.executable, "-c", RUN, order], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    plain, mixed = rows("plain"), rows("mixed")
    assert len(plain) == 2 and len(plain[0]) > 4
    for before, after in zip(plain, mixed, strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


LIBTPU = """
import json, sys
from hjax.dryrun.topologies import find_topology, prepare_environment
prepare_environment()
from hjax.sharding.device_mesh import place_devices
found = {}
for name in sys.argv[1:]:
    devices = find_topology(name).devices
    shape = dict(data=2, fsdp=len(devices) // 8, tensor=2, tensor_micro=2)
    grid = place_devices(devices, shape).ravel()
    say = lambda d: [d.device_kind, *d.coords, d.core_on_chip, d.process_index]
    found[name] = [[say(d) for d in devices], [say(d) for d in grid]]
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_stand_ins_stand_where_libtpu_s_devices_stand():
    names = ["v5e:8x8", "v5e:16x16", "v5p:4x4x8", "v5p:2x2x2", "v6e:8x8", "v4:4x4x4", "tpu7x:2x2x2"]
    done = subprocess.run(
        [sys.executable, "-c", LIBTPU, *names], capture_output=True, text=True, timeout=600,
        env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for name, (order, grid) in json.loads(done.stdout.splitlines()[-1]).items():
        devices = list_devices(name)
        shape = {"data": 2, "fsdp": len(devices) // 8, "tensor": 2, "tensor_micro": 2}
        say = functools.partial(
            lambda d: [d.device_kind, *d.coords, d.core_on_chip, d.process_index]
        )
        assert [say(d) for d in devices] == order, name
        assert [say(d) for d in place_devices(devices, shape).ravel()] == grid, name
