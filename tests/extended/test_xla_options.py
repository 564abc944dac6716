"""Which options a compiler is given."""

import pytest

from hjax.xla.compiler_flags import COMPILER_FLAGS, compiler_options

WINDOWS = "xla_tpu_enable_windowed_einsum_for_all_gather"
GATHERS = "xla_tpu_enable_sparse_core_collective_offload_all_gather"




def test_a_cpu_gets_none_and_a_tpu_those_that_suit_its_layout():
    assert compiler_options("cpu", "cpu", False) is None
    assert compiler_options("gpu", "NVIDIA H100 80GB HBM3", True) is None
    assert compiler_options("tpu", "TPU v5 lite", False) == {WINDOWS: False}
    assert compiler_options("tpu", "TPU v5 lite", True) is None


@pytest.mark.parametrize("kind", ["TPU v5", "TPU v6 lite", "TPU7x"])
def test_sparse_cores_send_and_sum_where_there_are_some(kind):
    apart, split = (compiler_options("tpu", kind, heads) for heads in (False, True))
    assert apart[GATHERS] is split[GATHERS] is True
    assert WINDOWS in apart and WINDOWS not in split
    assert GATHERS not in compiler_options("tpu", "TPU v4", False)
    assert GATHERS not in compiler_options("tpu", "TPU v9", False)


def test_each_says_what_it_gained():
    for options in COMPILER_FLAGS.values():
        assert all("->" in option.gain for option in options.values())
