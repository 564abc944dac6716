"""Which options a compiler is given."""

from hjax.xla.options import OPTIONS, compiler_options

WINDOWS = "xla_tpu_enable_windowed_einsum_for_all_gather"


def test_a_cpu_gets_none_and_a_tpu_those_that_suit_its_layout():
    assert compiler_options("cpu", False) is compiler_options("gpu", True) is None
    assert compiler_options("tpu", False) == {WINDOWS: False}
    assert compiler_options("tpu", True) is None


def test_each_says_what_it_gained():
    for options in OPTIONS.values():
        assert all("->" in option.gain for option in options.values())
