"""Parameters to a disjoint pool: every byte crosses once, the rest is shared over there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.sharding.cross_mesh_transfer import PoolTransition
from hjax.sharding.layout import make_layouts

LEAVES = {
    "norm": (("layers", "embed"), (4, 16)),
    "q": (("layers", "embed", "heads"), (4, 16, 8)),
    "scale": ((), ()),
}
SHAPES = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (_, shape) in LEAVES.items()}
BYTES = 4 * (4 * 16 + 4 * 16 * 8)


def shardings(layout):
    return {name: layout.sharding(*axes) for name, (axes, _) in LEAVES.items()}


# Devices of both pools, the first's layout, the second's train and generate sizes.
CASES = {
    "as many devices": (4, 4, {"tensor": 4}, {"tensor": 4}, {"tensor": 2}),
    "fewer to more": (2, 4, {"fsdp": 2}, {"tensor": 2}, {"tensor": 2}),
    "more to fewer": (6, 2, {"data": 3, "tensor": 2}, {"tensor": 2}, {"tensor": 1}),
    "other dimensions": (4, 4, {"fsdp": 4}, {"pipe": 2, "tensor": 2}, {"pipe": 1, "tensor": 2}),
    "copies on both sides": (4, 4, {"data": 4}, {"data": 4}, {}),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_values_arrive_and_every_byte_crosses_once(name, dtype):
    ours, theirs, first, train, generate = CASES[name]
    here, there = jax.devices()[:ours], jax.devices()[ours : ours + theirs]
    source = shardings(make_layouts(here, first).train)
    target = shardings(make_layouts(there, {"data": -1} | train, generate).generate)
    rng = np.random.default_rng(0)
    values = {name: np.asarray(rng.normal(size=s), np.float32) for name, (_, s) in LEAVES.items()}
    params = jax.tree.map(jax.device_put, values, source)
    transition = PoolTransition(source, target, SHAPES, {n: dtype for n in LEAVES})
    after = transition(params)
    for leaf, value in values.items():
        np.testing.assert_array_equal(np.asarray(after[leaf]), value.astype(dtype))
        assert after[leaf].sharding.is_equivalent_to(target[leaf], value.ndim)
        assert after[leaf].sharding.device_set == set(there)
        assert not params[leaf].is_deleted()
    # The scalar alone, which cannot be split, goes to every device.
    share = jnp.dtype(dtype).itemsize / 4
    assert transition.plan.nbytes == (BYTES + 4 * len(there)) * share
    moves = [m.kind for route in transition.reshard.routes for m in route.to_generate.moves]
    assert set(moves) <= {"all_gather"}
