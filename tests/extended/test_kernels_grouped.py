"""Grouped products: by blocks, and a TPU's kernels interpreted, beside products of each group."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hjax.kernels import grouped_blocks, grouped_tpu, reference
from hjax.kernels.reference import GroupFill

SIZES = {
    "some of a tile": ((3, 70, 55), 128),
    "rows after the groups": ((200, 0, 1, 100), 512),
    "no group has any": ((0, 0), 130),
    "one has all": ((0, 640, 0), 640),
}


PRODUCTS = {
    "plain": reference.grouped_product,
    "blocks": grouped_blocks.product,
    "tpu": functools.partial(grouped_tpu.product, interpret=True),
}
# Interpreted, a kernel takes long.
CASES = [
    pytest.param(name, case, marks=[pytest.mark.slow] if name == "tpu" and i else [])
    for name in PRODUCTS
    for i, case in enumerate(SIZES)
]


@pytest.mark.parametrize(("name", "case"), CASES)
@pytest.mark.parametrize(
    "width",
    [
        (64, 136),
        *(
            pytest.param(width, marks=pytest.mark.slow)
            for width in ((256, 128), (136, 4), (4, 136))  # an adapter's are thin
        ),
    ],
)
def test_values_and_gradients_are_those_of_each_group(name, case, width):
    sizes, count = SIZES[case]
    inner, outer = width
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (count, inner))
    weights = jax.random.normal(keys[1], (len(sizes), inner, outer))
    given = jax.random.normal(keys[2], (count, outer))
    used, groups = sum(sizes), jnp.array(sizes, jnp.int32)

    def by(product):
        def run(rows, weights):
            # What stands after the groups may be anything.
            return product(rows, weights, groups, GroupFill(0.5))[:used]

        out, backwards = jax.vjp(run, rows, weights)
        of_rows, of_weights = backwards(given[:used])
        return np.asarray(out), np.asarray(of_rows)[:used], np.asarray(of_weights)

    found = by(PRODUCTS[name])
    wide = [np.asarray(x, np.float64) for x in (rows, weights, given)]
    starts = np.cumsum([0, *sizes])
    parts = [slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]
    expected = (
        np.concatenate([wide[0][p] @ w for p, w in zip(parts, wide[1], strict=True)]),
        np.concatenate([wide[2][p] @ w.T for p, w in zip(parts, wide[1], strict=True)]),
        np.stack([wide[0][p].T @ wide[2][p] for p in parts]),
    )
    for ours, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n == "tpu" else []) for n in PRODUCTS]
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_of_weights_of_one_byte(name, dtype):
    """As of the same numbers in the rows' dtype; there are gradients of the rows alone."""
    groups = jnp.array([3, 0, 70, 55], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (128, 64))
    small = (30 * jax.random.normal(keys[1], (4, 64, 136))).astype(dtype)
    given = jax.random.normal(keys[2], (128, 136))

    def by(product, weights):
        def value(rows):
            out = product(rows, weights, groups)
            return jnp.sum(out * given), out

        return jax.grad(value, has_aux=True)(rows)

    found, expected = (
        by(f, w)
        for f, w in ((PRODUCTS[name], small), (PRODUCTS["plain"], small.astype(jnp.float32)))
    )
    for ours, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, true, rtol=1e-5, atol=1e-3)


def test_tiles_waste_little():
    assert grouped_tpu._tile_size(1536, 1024) == 768
    assert grouped_tpu._tile_size(100, 1024) == 128
    assert grouped_tpu._tile_size(4096, 1024) == 1024
    assert grouped_tpu._tile_size(2880, 2880) == 2944  # all of it


@pytest.mark.parametrize(
    ("given", "tiling"),
    [
        # Four tiles of a group, and one in which two meet.
        ((16384, (32, 2048, 1536), 1.0), (128, 2048, 768)),
        ((16384, (2, 2048, 1536), 1.0), (512, 2048, 512)),  # 33 instead of 32
        ((2048, (1, 4096, 28672), 0.5), (512, 2048, 512)),  # of one group nothing is computed twice
        ((16384, (4, 2880, 5760), 1.0), (512, 2944, 384)),
    ],
)
def test_tilings_have_room_and_take_about_the_least(given, tiling):
    rows, shape, share = given
    given = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, shape[1]), shape)]
    tile = grouped_tpu._tile_rows(*given, GroupFill(share))
    assert grouped_tpu._product_tiling(*given, GroupFill(share), tile) == tiling


def walked(steps):
    """Blocks that are fetched: those that do not stand where the one before stood."""
    return sum(i == 0 or steps[i - 1] != at for i, at in enumerate(steps))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tiling", [(128, 256, 128), (128, 128, 128), (128, 256, 384)])
def test_bytes_are_those_of_a_walk_over_the_kernels_grid(tiling, transposed):
    tile, inner_tile, outer_tile = tiling
    groups, each, inner, outer = 3, 200, 256, 384  # no group ends where a tile does
    visits = [
        (group, at)
        for group in range(groups)
        for at in range(group * each // tile, -(-(group + 1) * each // tile))
    ]
    columns, summed = range(outer // outer_tile), range(inner // inner_tile)
    rows = jax.ShapeDtypeStruct((groups * each, inner), jnp.bfloat16)
    shape = (groups, outer, inner) if transposed else (groups, inner, outer)
    weights = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    grid = [(n, group, m, k) for n in columns for group, m in visits for k in summed]
    of_rows = walked([(m, k) for _, _, m, k in grid]) * tile * inner_tile
    if len(summed) == 1:  # the last tile is not full
        of_rows = len(columns) * groups * each * inner
    of_weights = walked([(group, k, n) for n, group, _, k in grid]) * inner_tile * outer_tile
    expected = 2 * (of_rows + of_weights + groups * each * outer)
    assert grouped_tpu.product_bytes(rows, weights, tiling, GroupFill(), transposed) == expected

    if not transposed:
        grid = [(n, k, group, m) for n in columns for k in summed for group, m in visits]
        assert walked([(group, k, n) for n, k, group, _ in grid]) == groups * len(columns) * len(
            summed
        )
        passes = len(columns) * inner + len(summed) * outer
        expected = 2 * groups * (each * passes + inner * outer)
        assert grouped_tpu.gradient_bytes(rows, weights, tiling) == expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_are_added_to_what_earlier_passes_summed(name):
    groups = jnp.array([40, 0, 88], jnp.int32)  # also of a group that has no rows now
    keys = jax.random.split(jax.random.key(0), 4)
    rows, given = jax.random.normal(keys[0], (128, 64)), jax.random.normal(keys[1], (128, 136))
    weights, before = (jax.random.normal(k, (3, 64, 136)) for k in keys[2:])

    def gradients(before):
        _, back = jax.vjp(
            lambda r, w: PRODUCTS[name](r, w, groups, GroupFill(), before), rows, weights
        )
        return back(given)

    (of_rows, alone), (same, summed) = gradients(None), gradients(before)
    np.testing.assert_array_equal(same, of_rows)
    np.testing.assert_allclose(summed, before + alone, atol=1e-5)
