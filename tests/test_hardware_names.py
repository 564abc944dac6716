"""Usual names of hardware: clouds' names of slices, and numbers of GPUs."""

import re

import pytest

from hjax.devices import full_hardware_name
from hjax.dryrun.topologies import list_devices, parse_topology
from hjax.errors import ConfigError
from hjax.planning.hardware import parse_cluster


@pytest.mark.parametrize(
    ("usual", "full"),
    [
        # Clouds count chips of a v5e and v6e, and cores of the others, two a chip.
        ("v5e-1", "v5e:1x1"), ("v5e-8", "v5e:2x4"), ("v5litepod-16", "v5e:4x4"),
        ("v6e-256", "v6e:16x16"), ("v5p-8", "v5p:2x2x1"), ("v5p-16", "v5p:2x2x2"),
        ("v5p-64", "v5p:2x4x4"), ("v5p-128", "v5p:4x4x4"), ("v4-512", "v4:4x8x8"),
        ("v3-32", "v3:4x4"), ("2xv5e-16", "2xv5e:4x4"),
        ("h100", "h100:1x1"), ("8xH100", "h100:1x8"), ("24xa100", "a100-80g:3x8"),
        ("4xgh200", "gh200:4x1"),
        ("v5p:4x4x4", "v5p:4x4x4"), ("16x8:a100-80g", "16x8:a100-80g"), ("h800", "h800"),
    ],
)  # fmt: skip
def test_usual_names_of_hardware(usual, full):
    assert full_hardware_name(usual) == full


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p-12", "v5p-12: there are slices of 8, 16, 32, ... cores, each a power of two"),
        ("v5e-2", "v5e-2: there are slices of 1, 4, 8, 16, ... chips, each a power of two"),
        ("12xh100", "12xh100: hosts have 8 of h100; 1 to 8, or whole hosts, such as 16xh100"),
        ("0xh100", "0xh100: hosts have 8 of h100"),
    ],
)
def test_sizes_that_are_not_sold(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        full_hardware_name(name)


def test_clusters_and_topologies_take_usual_names():
    assert parse_cluster("16xh100+v5e-8") == parse_cluster("2x8:h100+v5e:2x4")
    assert parse_topology("v5p-16") == parse_topology("v5p:2x2x2") == ("v5p", (2, 2, 2), 1)
    assert [d.coords for d in list_devices("v5e-4")] == [d.coords for d in list_devices("v5e:2x2")]
