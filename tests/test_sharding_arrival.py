"""Parameters from another pool's processes: each part fetched once, every number the sender's."""

import dataclasses
import math
import os
import pathlib
import pickle
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arrival_process import AXES, BUCKET_BYTES, DEVICES, File, targets

from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions, merge, overlap
from hjax.sharding.cross_mesh_transfer import IncomingParameters, cut_regions_to_send
from hjax.sharding.layout import make_layouts
from hjax.sharding.transfer_plan import device_regions, fully_sharded, plan_tree_transfer

SIZES = {"q": (4, 16, 8), "table": (8, 16), "norm": (4, 16), "pair": (2,), "scale": ()}
BF16 = np.dtype(jnp.bfloat16)
# As they cross: the sender casts the table, the receiver q.
SHAPES = {
    name: jax.ShapeDtypeStruct(shape, BF16 if name == "table" else np.dtype(np.float32))
    for name, shape in SIZES.items()
}
DTYPES = {name: BF16 if name == "q" else x.dtype for name, x in SHAPES.items()}


@pytest.fixture(scope="module")
def truth():
    rng = np.random.default_rng(0)
    return {n: np.asarray(rng.normal(size=shape), np.float32) for n, shape in SIZES.items()}


@pytest.fixture(scope="module")
def sender(truth):
    """(parameters on four devices as fsdp 2 x tensor 2, their shardings)."""
    layout = make_layouts(jax.devices()[:4], {"fsdp": 2, "tensor": 2}).train
    source = {name: layout.sharding(*axes) for name, axes in AXES.items()}
    return jax.tree.map(jax.device_put, truth, source), source


def plan(source, target):
    landing = jax.tree.map(fully_sharded, target, SHAPES)
    return plan_tree_transfer(source, landing, SHAPES, [0, 0, 1, 1], [0, 0, 1, 1])


def lent(sender, crossing):
    return merge([cut_regions_to_send(sender[0], crossing, process) for process in (0, 1)])


class Counted:
    def __init__(self, numbers):
        self.numbers, self.fetches = numbers, 0

    def fetch(self):
        self.fetches += 1
        return self.numbers


def counted(pieces):
    return dataclasses.replace(pieces, parts=tuple((r, Counted(x)) for r, x in pieces.parts))


def expected(truth):
    return {name: truth[name].astype(SHAPES[name].dtype).astype(DTYPES[name]) for name in truth}


# In one process


def test_parts_that_are_lent_by_a_plan_are_fetched_once(truth, sender):
    target = targets(jax.devices()[4:])
    crossing = plan(sender[1], target)
    handles = jax.tree.map(counted, lent(sender, crossing))
    # Every part that is lent is one that the plan sends, from the process that it names.
    for process in (0, 1):
        for name, x in cut_regions_to_send(sender[0], crossing, process).items():
            own = {s.region for s in crossing.by_name[name] if s.from_process == process}
            assert {region for region, _ in x.parts} == own
    arrival = IncomingParameters(target, SHAPES, DTYPES, BUCKET_BYTES)
    params = arrival(handles)
    for name, value in expected(truth).items():
        assert params[name].dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(params[name]), value)
        assert params[name].sharding.is_equivalent_to(target[name], value.ndim)
        assert all(part.fetches == 1 for _, part in handles[name].parts)
    assert arrival.fetched_bytes == sum(x.nbytes for x in handles.values())
    # The lender's arrays may be written over: what was lent are copies.
    assert all(
        part.numbers.flags.owndata or part.numbers.base.flags.owndata
        for x in handles.values()
        for _, part in x.parts
    )


def test_parts_cut_otherwise_arrive_too_and_are_counted_in_full(truth):
    """Whole arrays, as a sender without a plan has them, and one that is at hand already."""
    cast = {name: value.astype(SHAPES[name].dtype) for name, value in truth.items()}
    handles = {name: counted(ArrayRegions.of(x)) for name, x in cast.items()}
    handles["norm"] = ArrayRegions.of(cast["norm"])
    arrival = IncomingParameters(targets(jax.devices()[:4]), SHAPES)
    params = arrival(handles)
    for name, value in cast.items():
        np.testing.assert_array_equal(np.asarray(params[name]), value)
    assert arrival.fetched_bytes == sum(x.nbytes for n, x in cast.items() if n != "norm")


def test_nothing_is_fetched_of_parameters_that_are_not_the_expected(truth):
    cast = {name: value.astype(SHAPES[name].dtype) for name, value in truth.items()}
    handles = {name: counted(ArrayRegions.of(x)) for name, x in cast.items()}
    handles["table"] = dataclasses.replace(handles["table"], dtype=np.dtype(np.float32))
    arrival = IncomingParameters(targets(jax.devices()[:4]), SHAPES)
    with pytest.raises(RunError, match="table comes as float32, but must be bfloat16"):
        arrival(handles)
    assert arrival.fetched_bytes == 0
    assert not any(part.fetches for x in handles.values() for _, part in x.parts)
    with pytest.raises(RunError, match=r"a ndarray \[2\] is among the received parameters"):
        arrival(handles | {"table": ArrayRegions.of(cast["table"]), "pair": cast["pair"]})


def test_a_part_of_another_size_than_was_said_is_refused(truth):
    handles = {n: ArrayRegions.of(x.astype(SHAPES[n].dtype)) for n, x in truth.items()}
    [(region, numbers)] = handles["q"].parts
    handles["q"] = dataclasses.replace(handles["q"], parts=((region, Counted(numbers[:, :8])),))
    with pytest.raises(RunError, match=r"came as float32\[4, 8, 8\], not as \[4, 16, 8\]"):
        IncomingParameters(targets(jax.devices()[:4]), SHAPES)(handles)


def test_only_what_the_plan_was_made_for_is_lent(sender):
    params, source = sender
    crossing = plan(source, targets(jax.devices()[4:]))
    with pytest.raises(RunError, match=r"q \(float32\[4, 16, 8\]\) is missing"):
        cut_regions_to_send({name: x for name, x in params.items() if name != "q"}, crossing, 0)
    turned = make_layouts(jax.devices()[:4], {"fsdp": 4}).train.sharding(*AXES["q"])
    moved = params | {"q": jax.device_put(params["q"], turned)}
    with pytest.raises(RunError, match="q is laid out as .* but the plan has device"):
        cut_regions_to_send(moved, crossing, 0)


# In two processes


def saved(name, x, folder):
    """The same with its numbers in files."""
    parts = []
    for i, (region, numbers) in enumerate(x.parts):
        path = folder / f"{name}.{i}"
        numbers.tofile(path)
        parts.append((region, File(str(path), numbers.dtype, numbers.shape)))
    return dataclasses.replace(x, parts=tuple(parts))


def run_processes(folder, count):
    """Outputs of the processes of a receiving pool, each stopped after 60 seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = pathlib.Path(__file__).with_name("arrival_process.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    children = [
        subprocess.Popen(
            [sys.executable, program, folder, str(rank), str(count), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]
    try:
        for child in children:
            output, _ = child.communicate(timeout=60)
            assert child.returncode == 0, output
    finally:
        for child in children:
            child.kill()
            child.wait()
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(count)]


@pytest.mark.extended
def test_two_processes_take_in_what_a_third_layout_lent(truth, sender, tmp_path):
    """The landing layout is split over both; each fetches its half, gloo shares it."""
    target = targets(2 * DEVICES)
    crossing = plan(sender[1], target)
    pieces = {name: saved(name, x, tmp_path) for name, x in lent(sender, crossing).items()}
    # A part that process 1 alone lands is not there; a parameter is missing in part.
    landing = device_regions(fully_sharded(target["q"], SHAPES["q"]), SIZES["q"])
    damaged = [
        (r, dataclasses.replace(h, path=h.path + ".gone") if not_for_zero(r, landing) else h)
        for r, h in pieces["q"].parts
    ]
    sent = {
        "pieces": pieces,
        "shapes": SHAPES,
        "dtypes": DTYPES,
        "damaged": pieces | {"q": dataclasses.replace(pieces["q"], parts=tuple(damaged))},
        "short": pieces | {"q": dataclasses.replace(pieces["q"], parts=pieces["q"].parts[1:])},
    }
    (tmp_path / "sent.pickle").write_bytes(pickle.dumps(sent))
    told = run_processes(tmp_path, 2)

    for name, value in expected(truth).items():
        held = device_regions(target[name], value.shape)
        for rank, one in enumerate(told):
            mine = held[rank * DEVICES : (rank + 1) * DEVICES]
            assert sorted(region for region, _ in one["shards"][name]) == sorted(mine)
            for region, numbers in one["shards"][name]:
                assert numbers.dtype == value.dtype
                cut = value[(..., *(slice(a, b) for a, b in region))]
                assert numbers.shape == cut.shape and numbers.tobytes() == cut.tobytes()
    assert {rank: one["fetched"] for rank, one in enumerate(told)} == crossing.received
    # Each byte once, but for the scalar, of which both processes have a copy.
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in SHAPES.values())
    assert crossing.nbytes == total + SHAPES["scale"].dtype.itemsize
    # Whoever fails says why, the other does not wait; afterwards both go on.
    assert "process 1 of the receiving pool could not" in told[0]["errors"]["damaged"]
    assert told[1]["errors"]["damaged"].startswith("FileNotFoundError")
    for one in told:
        assert "q [4, 16, 8]: no part holds the region" in one["errors"]["short"]
        assert all(one["same"].values())


def not_for_zero(region, landing):
    return not any(overlap(region, wanted) for wanted in landing[:DEVICES])
