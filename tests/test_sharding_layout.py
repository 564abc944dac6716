"""Layouts: which device holds what, against the closed form in the HybridFlow paper (section 5).

Rank r = (delta * p + P) * t + T. With r_t = t / t_g: generation tensor rank u = T // r_t and
micro data-parallel rank m = T mod r_t (p = p_g = 1 here).
"""

import jax
import numpy as np
import pytest

from hjax.errors import ConfigError
from hjax.sharding.interconnect import wraparound
from hjax.sharding.layout import check_shapes, make_layouts, replicate_axes

DEVICES = 8
CASES = [(t, t_g) for t in (1, 2, 4, 8) for t_g in (1, 2, 4, 8) if t_g <= t]
MATRIX = ("embed", "mlp")  # [48, 16] below


def parts(layout, shape, *axes):
    """Per rank, the index ranges of its shard: [(start, stop), ...] of every dimension."""
    placed = layout.sharding(*axes).devices_indices_map(shape)
    return [
        tuple(s.indices(n)[:2] for s, n in zip(placed[device], shape, strict=True))
        for device in jax.devices()
    ]


@pytest.mark.parametrize("t, t_g", CASES)
def test_shards_follow_the_papers_ranks(t, t_g):
    layouts = make_layouts(jax.devices(), {"data": -1, "tensor": t}, {"tensor": t_g})
    size, r_t = 16, t // t_g
    train = parts(layouts.train, (48, size), *MATRIX)
    generate = parts(layouts.generate, (48, size), *MATRIX)
    rows = 32  # of a batch
    train_rows = parts(layouts.train, (rows, 5), "batch", "length")
    generate_rows = parts(layouts.generate, (rows, 5), "batch", "length")
    for rank in range(DEVICES):
        delta, T = divmod(rank, t)
        u, m = T // r_t, T % r_t
        assert train[rank][1] == (T * size // t, (T + 1) * size // t)
        assert generate[rank][1] == (u * size // t_g, (u + 1) * size // t_g)
        d, d_g = DEVICES // t, r_t
        assert train_rows[rank][0] == (delta * rows // d, (delta + 1) * rows // d)
        part, ways = delta * d_g + m, d * d_g
        assert generate_rows[rank][0] == (part * rows // ways, (part + 1) * rows // ways)


@pytest.mark.parametrize(
    "fsdp, t, t_g", [(f, t, t_g) for f in (1, 2) for t, t_g in CASES if f * t <= DEVICES]
)
def test_the_generation_shard_contains_the_training_shard(fsdp, t, t_g):
    """Zero redundancy: no device needs a second buffer for its training shard."""
    sizes = {"data": -1, "fsdp": fsdp, "tensor": t}
    layouts = make_layouts(jax.devices(), sizes, {"tensor": t_g})
    train = parts(layouts.train, (48, 16), *MATRIX)
    generate = parts(layouts.generate, (48, 16), *MATRIX)
    for before, after in zip(train, generate, strict=True):
        for (start, stop), (from_, to) in zip(before, after, strict=True):
            assert from_ <= start and stop <= to


def test_the_papers_worked_example():
    """8 devices, 1-4-2 -> 1-2-2-2: generation TP [1,3][2,4][5,7][6,8], micro-DP [1,2][3,4]..."""
    layouts = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": 2})
    mesh = layouts.generate.mesh
    grid = np.vectorize(lambda device: device.id + 1)(mesh.devices)
    by_axes = grid.reshape(2, 2, 2)  # data, tensor, tensor_micro
    assert [mesh.shape[a] for a in ("data", "tensor", "tensor_micro")] == [2, 2, 2]
    tensor_groups = sorted(by_axes.swapaxes(1, 2).reshape(-1, 2).tolist())
    assert tensor_groups == [[1, 3], [2, 4], [5, 7], [6, 8]]
    assert by_axes.reshape(-1, 2).tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_fsdp_splits_parameters_and_batch_in_training_only():
    layouts = make_layouts(jax.devices(), {"fsdp": 4, "tensor": 2}, {"tensor": 2})
    assert layouts.train.shard_count("embed") == layouts.train.shard_count("batch") == 4
    assert layouts.generate.shard_count("embed") == 1 and layouts.generate.shard_count("batch") == 4


def test_by_default_all_devices_are_data_parallel():
    layouts = make_layouts(jax.devices())
    assert layouts.train.describe() == {"data": 8}
    assert layouts.train.shard_count("batch") == layouts.generate.shard_count("batch") == 8
    assert layouts.train.sharding("embed", "mlp").is_fully_replicated


REFUSALS = [
    ({"pipe": 3, "data": -1}, {}, "pipe=3 does not divide 8 devices; .*1, 2, 4, 8"),
    ({"pipe": 4, "data": 2}, {"pipe": 8}, "generate.pipe=8 .* size 4; it may be 1, 2, 4"),
    ({"tensor_micro": 2}, {}, "unknown mesh axis 'tensor_micro'; allowed: data, fsdp"),
    ({"model": 2}, {}, "unknown mesh axis 'model'; allowed: data, fsdp"),
    ({"data": -1, "fsdp": -1}, {}, "only one axis may be -1, not data and fsdp"),
    ({"data": 0}, {}, "layout.train.data=0: a size of 1 or more, or -1"),
    ({"data": -2}, {}, "layout.train.data=-2"),
    ({"data": -1, "tensor": 3}, {}, "tensor=3 does not divide 8 devices; .*1, 2, 4, 8"),
    ({"data": 2, "tensor": 2}, {}, "data=2 x tensor=2 = 4, but there are 8 devices; .*-1"),
    ({"data": -1, "tensor": 16}, {}, "tensor=16 does not divide 8"),
    ({"tensor": 4, "data": 2}, {"tensor": 3}, "generate.tensor=3 .* size 4; it may be 1, 2, 4"),
    ({"tensor": 4, "data": 2}, {"tensor": 8}, "generate.tensor=8 .* size 4; it may be 1, 2, 4"),
    ({"tensor": 4, "data": 2}, {"tensor": 0}, "generate.tensor=0"),
    ({"tensor": 4, "data": 2}, {"data": 4}, "generate.data=4: generation takes only tensor"),
    ({"tensor": 4, "data": 2}, {"context": 2}, "generate.context=2: generation takes only tensor"),
    ({"tensor": 4, "data": 2}, {"rows": 2}, "unknown mesh axis 'rows'"),
]


@pytest.mark.parametrize("train, generate, line", REFUSALS, ids=[r[2][:30] for r in REFUSALS])
def test_sizes_that_do_not_fit_get_one_line(train, generate, line):
    with pytest.raises(ConfigError, match=line) as caught:
        make_layouts(jax.devices(), train, generate)
    assert "\n" not in str(caught.value)


def test_generation_takes_minus_one_for_the_training_size():
    layouts = make_layouts(jax.devices(), {"data": -1, "tensor": 4}, {"data": -1, "tensor": -1})
    assert layouts.generate.shard_count("heads") == 4


def test_an_unknown_logical_axis_is_named():
    layout = make_layouts(jax.devices()).train
    with pytest.raises(ConfigError, match="unknown logical axis 'head'; the layout knows batch"):
        layout.sharding("head")


def test_a_dimension_that_does_not_divide_is_refused_with_divisors():
    layout = make_layouts(jax.devices(), {"data": 1, "tensor": 8}, {"tensor": 2}).train
    line = r"actor: mlp of size 172 .* over tensor = 8; .* 1, 2, 4, 43, 86, 172"
    with pytest.raises(ConfigError, match=line):
        check_shapes(layout, {"heads": 8, "mlp": 172}, "actor")
    with pytest.raises(ConfigError, match="kv_heads of size 3"):
        check_shapes(layout, {"kv_heads": 3}, "actor")


def test_kv_heads_fewer_than_the_tensor_axis_are_kept_whole_and_reported():
    layouts = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": 2})
    shapes = {"heads": 8, "kv_heads": 2, "mlp": 16}
    assert check_shapes(layouts.train, shapes, "actor") == ["kv_heads"]
    assert check_shapes(layouts.generate, shapes, "actor") == []
    whole = replicate_axes(layouts.train, ["kv_heads"])
    assert whole.sharding("kv_heads").is_fully_replicated
    assert whole.shard_count("heads") == 4


@pytest.mark.parametrize(
    ("kind", "sides", "closed"),
    [
        ("v5e", (8, 16), (False, True)),
        ("v5p", (4, 4, 8), (True, True, True)),
        ("v5p", (2, 4, 4), (False, False, False)),
        ("v5p", (1, 4, 4), (False, False, False)),
        ("tpu7x", (4, 4, 4, 2), (True, True, True, False)),  # two devices a chip make no ring
    ],
)
def test_sides_of_a_torus_that_close(kind, sides, closed):
    assert wraparound(kind, sides) == closed
