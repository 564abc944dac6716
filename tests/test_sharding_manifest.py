"""Parameters are checked by name, shape, dtype, regions and version before one is read."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.errors import RunError
from hjax.sharded_values import ArrayRegions
from hjax.sharding.layout import make_layouts
from hjax.sharding.parameter_manifest import check_manifest, check_regions, manifest_of


class Unread:
    def fetch(self):
        raise AssertionError("read before it was checked")


def pieces(shape, regions, dtype="float32"):
    return ArrayRegions(shape, np.dtype(dtype), tuple((region, Unread()) for region in regions))


TOP, BOTTOM = ((0, 2), (0, 6)), ((2, 4), (0, 6))
SHAPES = {
    "decoder": {
        "norm": jax.ShapeDtypeStruct((6,), jnp.float32),
        "q": jax.ShapeDtypeStruct((4, 6), jnp.float32),
    }
}


def tree(**changes):
    sound = {"norm": pieces((6,), [((0, 6),)]), "q": pieces((4, 6), [TOP, BOTTOM])}
    return {"decoder": {k: x for k, x in (sound | changes).items() if x is not None}}


def test_what_is_sound_passes_and_can_be_pickled():
    manifest = pickle.loads(pickle.dumps(manifest_of(tree(), 3)))
    assert list(manifest.entries) == ["decoder.norm", "decoder.q"]
    assert manifest.entries["decoder.q"].regions == (TOP, BOTTOM)
    check_manifest(manifest, SHAPES)
    check_manifest(manifest, SHAPES, newer_than=2)
    check_manifest(manifest, manifest_of(tree(q=pieces((4, 6), [BOTTOM, TOP])), 3))


MISMATCHES = {
    "missing": (
        {"norm": None},
        r"decoder\.norm \(float32\[6\]\) is missing among the weights of version 3 \(1 param",
    ),
    "unknown": (
        {"bias": pieces((2,), [((0, 2),)])},
        r"decoder\.bias \(float32\[2\]\) is among the weights of version 3, but .* no such",
    ),
    "another shape": (
        {"q": pieces((6, 4), [((0, 6), (0, 4))])},
        r"decoder\.q comes in the shape \[6, 4\], but must be \[4, 6\]",
    ),
    "another dtype": (
        {"q": pieces((4, 6), [TOP, BOTTOM], jnp.bfloat16)},
        r"decoder\.q comes as bfloat16, but must be float32",
    ),
    "a hole": (
        {"q": pieces((4, 6), [TOP, ((2, 4), (0, 5))])},
        r"decoder\.q \[4, 6\]: no part holds the region \(\(2, 4\), \(5, 6\)\)",
    ),
    "no parts": (
        {"q": pieces((4, 6), [])},
        r"decoder\.q \[4, 6\]: no part holds the region \(\(0, 4\), \(0, 6\)\)",
    ),
    "an overlap": (
        {"q": pieces((4, 6), [TOP, ((1, 4), (0, 6))])},
        r"decoder\.q \[4, 6\]: the regions .* and .* overlap in \(\(1, 2\), \(0, 6\)\)",
    ),
    # The count of elements is right: neither may hide the other.
    "an overlap and a hole": (
        {"q": pieces((4, 6), [TOP, ((1, 3), (0, 6))])},
        r"decoder\.q \[4, 6\]: the regions .* overlap in \(\(1, 2\), \(0, 6\)\)",
    ),
    "outside of the array": (
        {"q": pieces((4, 6), [TOP, ((2, 5), (0, 6))])},
        r"decoder\.q: the region \(\(2, 5\), \(0, 6\)\) is not within the array \[4, 6\]",
    ),
    "another rank": (
        {"q": pieces((4, 6), [((0, 4),)])},
        r"decoder\.q: the region \(\(0, 4\),\) is not within the array \[4, 6\]",
    ),
    "no array": ({"q": "weights"}, r"decoder\.q is a str; parameters are"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_each_mismatch_is_one_clear_error(name):
    changes, message = MISMATCHES[name]
    with pytest.raises(RunError, match=message) as told:
        check_manifest(manifest_of(tree(**changes), 3), SHAPES)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("version", [2, 3])
def test_a_version_that_is_not_newer_is_refused(version):
    with pytest.raises(RunError, match=f"version {version} came while version 3 .* 4 or more"):
        check_manifest(manifest_of(tree(), version), SHAPES, newer_than=3)


def test_what_came_is_held_against_what_was_promised():
    promised = manifest_of(tree(), 3)
    came = manifest_of(tree(q=pieces((4, 6), [TOP])), 3)
    with pytest.raises(RunError, match=r"decoder\.q \[4, 6\]: no part holds"):
        check_manifest(came, promised)
    broken = dataclasses.replace(promised.entries["decoder.q"], dtype=np.dtype("f8"))
    promised.entries["decoder.q"] = broken
    with pytest.raises(RunError, match=r"decoder\.q comes as float32, but must be float64"):
        check_manifest(manifest_of(tree(), 3), promised)


def test_replicas_of_an_array_are_named_once():
    layout = make_layouts(jax.devices(), {"data": 2, "tensor": 4}).train
    x = jax.device_put(np.zeros((8, 4), np.float32), layout.sharding("vocab"))
    entries = manifest_of({"x": x, "y": np.zeros((), np.int32)}, 0).entries
    assert entries["x"].regions == tuple(((i, i + 2), (0, 4)) for i in (0, 2, 4, 6))
    assert entries["y"].regions == ((),)
    check_regions("x", (8, 4), entries["x"].regions)
    check_regions("y", (), [()])


@pytest.mark.parametrize("seed", range(10))
def test_a_hole_is_found_wherever_it_is(seed):
    """Of a grid with one cell left out, the region that is named lies in that cell."""
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(2, 9, size=3).tolist())
    edges = [sorted({0, n, *rng.integers(1, n, size=2).tolist()}) for n in shape]
    spans = [list(zip(e, e[1:])) for e in edges]
    cells = [(a, b, c) for a in spans[0] for b in spans[1] for c in spans[2]]
    check_regions("x", shape, cells)
    gone = cells.pop(int(rng.integers(len(cells))))
    rng.shuffle(cells)
    cells = [tuple(tuple(int(n) for n in span) for span in cell) for cell in cells]
    with pytest.raises(RunError) as told:
        check_regions("x", shape, cells)
    assert f"the region {gone};" in str(told.value)
