"""Transfer protocols: Table 3 of the HybridFlow paper as PartitionSpecs."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import hjax
from hjax.errors import ConfigError
from hjax.sharding.layout import make_layouts
from hjax.sharding.protocols import PROTOCOLS

ROWS = np.arange(16 * 3).reshape(16, 3)


@pytest.fixture(scope="module")
def layouts():
    """Data 2, FSDP 1, tensor 4 in training and 2 in generation: micro data-parallel 2."""
    return make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": 2})


SPECS = {
    "ONE_TO_ALL": P(),
    "3D_PROTO": P("data"),
    "3D_ALL_MICRO_DP": P(("data", "tensor_micro")),
    "3D_PP_ONLY": P(),
    "DP_PROTO": P("data"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_protocol_is_a_partition_spec(name, layouts):
    placed = PROTOCOLS[name].distribute({"tokens": ROWS}, layouts)["tokens"]
    assert placed.sharding.spec == SPECS[name]
    np.testing.assert_array_equal(placed, ROWS)


def test_the_names_are_table_threes():
    assert set(PROTOCOLS) == {*SPECS, "ALL_TO_ALL"}


def test_generation_gives_every_micro_group_its_share(layouts):
    placed = PROTOCOLS["3D_ALL_MICRO_DP"].distribute(ROWS, layouts)
    first_rows = {s.device.id: int(s.data[0, 0]) // 3 for s in placed.addressable_shards}
    # Devices 1-based [1,3][2,4][5,7][6,8] are the generation tensor groups: equal rows inside.
    assert first_rows == {0: 0, 2: 0, 1: 4, 3: 4, 4: 8, 6: 8, 5: 12, 7: 12}


def test_fsdp_ranks_are_data_ranks_too():
    layouts = make_layouts(jax.devices(), {"data": 2, "fsdp": 4})
    placed = PROTOCOLS["3D_PROTO"].distribute(ROWS, layouts)
    assert placed.sharding.spec == P(("data", "fsdp"))


def test_what_is_no_array_passes_through(layouts):
    batch = {
        "tokens": ROWS,
        "columns": {"answer": ["a", "b"], "ids": [[1], [2, 3]]},
        "texts": np.array(["x", "y"]),
        "objects": np.array([{"a": 1}, None], dtype=object),
        "step": 3,
        "nothing": None,
        "scale": np.float32(0.5),
        "coefficient": np.asarray(0.5, np.float32),
        "pair": (ROWS, "text"),
    }
    out = PROTOCOLS["3D_PROTO"].distribute(batch, layouts)
    assert out["columns"] == batch["columns"]
    assert out["texts"] is batch["texts"] and out["objects"] is batch["objects"]
    assert out["step"] == 3 and out["nothing"] is None and out["scale"] == 0.5
    assert out["coefficient"].sharding.is_fully_replicated
    assert out["pair"][0].sharding.spec == P("data") and out["pair"][1] == "text"


def test_all_to_all_hands_over_untouched_and_collects_every_ranks_part(layouts):
    debug = PROTOCOLS["ALL_TO_ALL"]
    batch = {"tokens": ROWS}
    assert debug.distribute(batch, layouts)["tokens"] is ROWS
    placed = PROTOCOLS["3D_PROTO"].distribute(ROWS, layouts)
    collected = debug.gather({"tokens": placed, "text": "as it is"})
    assert len(collected["tokens"]) == 8 and collected["text"] == "as it is"
    np.testing.assert_array_equal(collected["tokens"][0], ROWS[:8])
    np.testing.assert_array_equal(collected["tokens"][7], ROWS[8:])
    assert PROTOCOLS["3D_PROTO"].gather(placed) is placed  # global view: replicas once


def test_a_worker_without_devices_gets_numpy():
    layouts = make_layouts(jax.devices())
    placed = PROTOCOLS["3D_PROTO"].distribute(ROWS, layouts)
    host = PROTOCOLS["3D_PROTO"].distribute({"a": placed, "b": ["text"]}, None)
    assert isinstance(host["a"], np.ndarray) and host["b"] == ["text"]


def test_rows_that_do_not_divide_are_refused(layouts):
    line = r"15 rows does not divide over 2 .*'data': 2.*; use a multiple of 2"
    with pytest.raises(ConfigError, match=line):
        PROTOCOLS["3D_PROTO"].distribute(ROWS[:15], layouts)
    with pytest.raises(ConfigError, match="14 rows does not divide over 4"):
        PROTOCOLS["3D_ALL_MICRO_DP"].distribute(ROWS[:14], layouts)


def test_an_unknown_protocol_is_refused_with_those_that_exist():
    with pytest.raises(ConfigError, match="'3D' ?; allowed: 3D_ALL_MICRO_DP, .*ONE_TO_ALL"):
        hjax.protocol("3D")
