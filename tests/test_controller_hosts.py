"""Which hosts a pool may stand on, by hand-worked clusters."""

import socket

import pytest

from hjax.controller.hosts import SLICE_LABEL, ProcessPlacement, placements, shortage
from hjax.errors import ConfigError


def host(kind, count, alive=True, **labels):
    return {"Alive": alive, "Resources": {"CPU": 8.0, kind: float(count)}, "Labels": labels}


def slices(**sizes):
    """TPU hosts of four chips each, by slice."""
    return [host("TPU", 4, **{SLICE_LABEL: name}) for name, n in sizes.items() for _ in range(n)]


@pytest.mark.parametrize(
    "processes, each, expected",
    [
        (1, 8, [ProcessPlacement("PACK")]),  # a host's GPUs are one process's
        (2, 8, [ProcessPlacement("PACK")]),
        (2, 4, [ProcessPlacement("STRICT_PACK"), ProcessPlacement("PACK")]),  # half a host each
        (4, 4, [ProcessPlacement("PACK")]),
    ],
)
def test_processes_with_gpus_share_a_host_where_one_has_enough(processes, each, expected):
    assert placements([host("GPU", 8), host("GPU", 8)], "p", "gpu", processes, each) == expected


def test_processes_on_cpus_take_a_host_each():
    two = [host("CPU", 8), host("CPU", 8)]
    assert placements(two, "p", "cpu", 2, 4) == [ProcessPlacement("SPREAD")]
    assert placements(two, "p", "cpu", 1, 4) == [ProcessPlacement("PACK")]
    assert placements(two[:1], "p", "cpu", 2, 4) == [ProcessPlacement("PACK")]
    assert placements([two[0], host("CPU", 8, alive=False)], "p", "cpu", 2, 4) == [
        ProcessPlacement("PACK")
    ]


def test_a_pool_on_tpus_stays_in_one_slice_the_smallest_first():
    found = placements(slices(a=4, b=2, c=1, d=2), "p", "tpu", 2, 4)
    assert found == [
        ProcessPlacement("PACK", ((SLICE_LABEL, "b"),)),
        ProcessPlacement("PACK", ((SLICE_LABEL, "d"),)),
    ]
    # A part of a host that is a slice: two processes of four of its eight chips.
    both = [host("TPU", 8, **{SLICE_LABEL: "a"}), *slices(b=2)]
    found = placements(both, "p", "tpu", 1, 4)
    assert found == [ProcessPlacement("PACK", ((SLICE_LABEL, "a"),))]
    # `none` is no way to stand on two slices.
    found = placements(slices(a=2, b=2), "p", "tpu", 2, 4, "none")
    assert [room.labels for room in found] == [((SLICE_LABEL, "a"),), ((SLICE_LABEL, "b"),)]
    assert placements([host("TPU", 4)] * 2, "p", "tpu", 2, 4, "none") == [
        ProcessPlacement("PACK")
    ]  # none is named


@pytest.mark.parametrize("processes", [1, 3, 6])
@pytest.mark.parametrize("together", ["auto", "none"])
def test_a_pool_that_spans_slices_or_takes_a_part_of_one_is_refused(processes, together):
    said = rf"pool p has {processes} processes; on TPUs a pool is one slice.*there are a: 4, b: 2$"
    with pytest.raises(ConfigError, match=said):
        placements(slices(a=4, b=2), "p", "tpu", processes, 4, together)


def test_functions_stand_anywhere():
    assert placements(slices(a=1, b=1), "p", "tpu", 2, 0, "rack") == [ProcessPlacement("SPREAD")]


def test_a_label_of_ones_own():
    racks = [host("GPU", 8, rack=rack) for rack in ("r1", "r1", "r2")]
    assert placements(racks, "p", "gpu", 2, 8, "rack") == [
        ProcessPlacement("PACK", (("rack", "r1"),))
    ]
    assert placements(racks, "p", "gpu", 3, 8) == [ProcessPlacement("PACK")]


def test_where_labels_do_not_fit_the_error_says_what_does():
    racks = [host("GPU", 4, rack=rack) for rack in ("a", "a", "b")]
    with pytest.raises(ConfigError, match=r"pool p has 5 processes.* largest, a, takes 2.*=none"):
        placements(racks, "p", "gpu", 5, 4, "rack")
    with pytest.raises(ConfigError, match=r"label='rack': no host has this label.*tpu-slice"):
        placements(slices(a=4), "p", "tpu", 1, 4, "rack")
    assert placements([host("TPU", 4)] * 2, "p", "tpu", 2, 4) == [
        ProcessPlacement("PACK")
    ]  # none is named


def test_what_can_never_fit_on_the_present_machines_is_counted():
    two = [host("CPU", 2), host("CPU", 2), host("CPU", 8, alive=False)]
    assert shortage(two, "cpu", 4, 2, 1) == (
        "cluster.processes=4 and cluster.reward_processes=1 need 5 CPUs; the cluster has 4 on 2 "
        "machines: lower cluster.processes, or wait for machines with `node.sh wait`"
    )
    assert shortage(two, "cpu", 3, 2, 1) == ""
    # GPUs alone are short: functions take none of them.
    gpus = [{"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}]
    said = shortage(gpus, "gpu", 3, 4, 2)
    assert said.startswith("cluster.processes=3 needs 12 GPUs; the cluster has 8 on 1 machine:")
    assert shortage(gpus, "gpu", 2, 4, 2) == ""
    # A host that lists no such resource has none of it; both are short.
    said = shortage([{"Alive": True, "Resources": {"CPU": 1.0}}], "gpu", 1, 4, 1)
    assert "need 2 CPUs, 4 GPUs; the cluster has 1, 0 on 1 machine:" in said


def test_an_address_where_nothing_answers_is_refused_before_ray_tries(monkeypatch):
    ray_calls = pytest.importorskip("hjax.controller.ray_calls", exc_type=ConfigError)
    asked = []
    monkeypatch.setattr(ray_calls.ray, "init", lambda address, **_: asked.append(address))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}", "auto"):
            assert ray_calls.connect(address, 1) is False
            assert asked.pop() == address
    said = r"cluster\.address={}: nothing answers there \(.+\); did `node\.sh head` run on that"
    for address in (f"127.0.0.1:{port}", "nohost.invalid:6379", "[::1]:1", "127.0.0.1:99999"):
        place = address.replace("[", r"\[").replace("]", r"\]")
        with pytest.raises(ConfigError, match=said.format(place)):
            ray_calls.connect(address, 1)
    assert not asked
