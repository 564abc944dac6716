"""`placement=auto` on a cluster: which pools its hosts make, and that sets stand where it says.

Clusters are lists of nodes as Ray tells them, worked out by hand; no Ray is started.
"""

import dataclasses
import json

import pytest
from helpers import tiny_config

import hjax
from hjax.controller.hosts import (
    KIND_LABEL,
    SLICE_LABEL,
    TOPOLOGY_LABEL,
    FoundDevice,
    HostGroup,
    Hosts,
    host_groups,
    placements,
)
from hjax.devices import DEVICES, Device, device_of_kind
from hjax.errors import ConfigError
from hjax.planning.auto import known_devices
from hjax.planning.host_pools import cluster_from_hosts
from hjax.planning.profile import MeasuredOn, Profile, profile_path, write_profile
from hjax.run.placement import make_plan


def host(kind, count, alive=True, **labels):
    resource = "TPU" if kind.startswith("TPU") else "GPU"
    more = {"rack": labels.pop("rack")} if "rack" in labels else {}
    more |= (
        {SLICE_LABEL: labels["slice"], TOPOLOGY_LABEL: labels["sides"]} if "slice" in labels else {}
    )
    return {
        "Alive": alive,
        "Resources": {"CPU": 64.0, resource: float(count)},
        "Labels": {KIND_LABEL: kind} | more,
        "NodeManagerAddress": "10.0.0.1",
    }


def pools_of(nodes, platform, processes, each, together="auto"):
    """(hosts, devices per host, device, labels) of each pool."""
    groups = host_groups(nodes, platform, processes, each, together)
    devices = [device_of_kind(group.kind) for group in groups]
    pools = cluster_from_hosts(groups, devices, processes, each).pools
    return [(p.hosts, p.per_host, p.device.name, dict(p.where)) for p in pools]


H100, A100 = [host("H100", 8)] * 2, [host("A100", 8)] * 4


@pytest.mark.parametrize(
    "nodes, processes, each, expected",
    [
        # All are alike: any host will do.
        (A100, 4, 8, [(4, 8, "a100-80g", {})]),
        (A100, 3, 8, [(3, 8, "a100-80g", {})]),
        # Two processes on a host, or fewer than a host's.
        (A100, 4, 4, [(2, 8, "a100-80g", {})]),
        (A100, 1, 4, [(1, 4, "a100-80g", {})]),
        # Half of a host is left over: every process as if alone on one.
        (A100, 3, 4, [(3, 4, "a100-80g", {})]),
        ([*A100[:1], host("A100", 4)], 3, 4, [(3, 4, "a100-80g", {})]),
        # A dead host, and one without GPUs.
        ([*A100, host("A100", 8, alive=False), host("A100", 0)], 4, 8,
         [(4, 8, "a100-80g", {})]),
        # Of two kinds the faster one is filled first.
        ([*A100, *H100], 6, 8,
         [(2, 8, "h100", {KIND_LABEL: "H100"}), (4, 8, "a100-80g", {KIND_LABEL: "A100"})]),
        ([*A100, *H100], 3, 8,
         [(2, 8, "h100", {KIND_LABEL: "H100"}), (1, 8, "a100-80g", {KIND_LABEL: "A100"})]),
        ([*A100, *H100], 2, 8, [(2, 8, "h100", {KIND_LABEL: "H100"})]),
    ],
)  # fmt: skip
def test_hosts_with_gpus_become_pools(nodes, processes, each, expected):
    assert pools_of(nodes, "gpu", processes, each) == expected


def test_a_label_of_ones_own_keeps_pools_apart():
    racks = [host("H100", 8, rack=rack) for rack in ("r1", "r2", "r1")]
    found = pools_of(racks, "gpu", 3, 8, together="rack")
    assert found == [(2, 8, "h100", {"rack": "r1"}), (1, 8, "h100", {"rack": "r2"})]
    both = [*racks, host("A100", 8, rack="r1")]
    found = pools_of(both, "gpu", 4, 8, together="rack")
    assert found[-1] == (1, 8, "a100-80g", {KIND_LABEL: "A100", "rack": "r1"})


def slices(**hosts):
    """v5p slices of four chips a host, by name."""
    sides = {1: "2x2x1", 2: "2x2x2", 4: "2x2x4"}
    return [
        host("TPU-V5P", 4, slice=name, sides=sides[n]) for name, n in hosts.items()
        for _ in range(n)
    ]  # fmt: skip


def test_a_slice_is_taken_whole():
    nodes = slices(a=2, b=4)
    groups = host_groups(nodes, "tpu", 6, 4)
    known = [DEVICES["v5p"]] * 2
    large, small = cluster_from_hosts(groups, known, 6, 4).pools
    assert (large.shape, large.counts, large.where) == ((2, 2, 4), (16,), ((SLICE_LABEL, "b"),))
    assert (small.shape, small.counts, small.where) == ((2, 2, 2), (8,), ((SLICE_LABEL, "a"),))
    assert pools_of(nodes, "tpu", 2, 4) == [(2, 4, "v5p", {SLICE_LABEL: "a"})]
    with pytest.raises(ConfigError, match=r"processes=3, of 4 devices each: .*hosts take 2, 4, 6$"):
        cluster_from_hosts(groups, known, 3, 4)
    with pytest.raises(ConfigError, match=r"2 TPU hosts are 2x2x2, which processes of 2 chips"):
        pools_of(slices(a=2), "tpu", 4, 2)


def test_a_host_of_its_own_may_be_shared_by_sets():
    groups = host_groups([host("TPU-V5LITEPOD", 8)], "tpu", 1, 8)
    (pool,) = cluster_from_hosts(groups, [device_of_kind("TPU-V5LITEPOD")], 1, 8).pools
    assert (pool.device.name, pool.shape, pool.counts) == ("v5e", (2, 4), (1, 2, 4, 8))


def test_sets_take_whole_processes_or_part_of_one():
    # 12 GPUs a host in processes of 4: 6 would be one and a half.
    groups = host_groups([host("A100", 12)] * 2, "gpu", 6, 4)
    (pool,) = cluster_from_hosts(groups, [DEVICES["a100-80g"]], 6, 4).pools
    assert pool.counts == (1, 2, 3, 4, 8, 12, 24)


def test_cpus_are_shared_out_over_the_hosts():
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0}, "Labels": {"rack": rack}}
        for rack in ("a", "a", "b")
    ]
    groups = host_groups(nodes, "cpu", 3, 2, "rack")
    assert [(g.processes, g.labels) for g in groups] == [
        ((1, 1), (("rack", "a"),)), ((1,), (("rack", "b"),)),
    ]  # fmt: skip
    assert host_groups(nodes[:1], "cpu", 3, 2)[0].processes == (3,)


def test_what_is_wrong_with_hosts_is_said():
    with pytest.raises(ConfigError, match=r"takes a process with 16 GPUs.*its 2 hosts have 8, 8"):
        host_groups(H100, "gpu", 1, 16)
    lacking = [host("H100", 8, rack="r1"), host("H100", 8)]
    with pytest.raises(ConfigError, match=r"host 10.0.0.1 has no label rack, which others have"):
        host_groups(lacking, "gpu", 2, 8, "rack")
    with pytest.raises(ConfigError, match=r"processes=9.*the cluster's hosts take 1, 2, 3, 4$"):
        pools_of(A100, "gpu", 9, 8)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA H100 80GB HBM3", "h100"), ("H200", "h200"),
        ("NVIDIA L40S", "l40s"), ("NVIDIA B200", "b200"), ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"), ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"), ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H200", "h200"), ("A100-80G", "a100-80g"), ("Tesla A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("TPU7x", "tpu7x"),
        ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA GB200", "gb200"), ("TPU-V7X", "tpu7x"),
        ("TPU-V4", "v4"), ("TPU-V5P", "v5p"), ("TPU-V5LITEPOD", "v5e"), ("TPU-V6E", "v6e"),
    ],
)  # fmt: skip
def test_devices_by_the_names_that_jax_and_ray_have_for_them(kind, name):
    assert device_of_kind(kind).name == name
    assert device_of_kind(kind, 2.0**30).memory == 2.0**30


def test_a_device_that_nobody_knows_is_none():
    for kind in ("GeForce-RTX-5090", "NVIDIA A10", "NVIDIA L40", "TPU v3", "TPU v4 lite", "cpu",
                 "NVIDIA RTX A1000", "NVIDIA A100X", "NVIDIA A100-SXM-64GB",
                 "NVIDIA H100 96GB HBM3", "NVIDIA GH200 144G HBM3e", "NVIDIA H20",
                 "NVIDIA GB200 NVL4"):  # fmt: skip
        assert device_of_kind(kind) is None, kind


def test_a_part_of_a_gpu_is_not_the_whole_one():
    for kind in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                 "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", "NVIDIA L40S-48Q",
                 "GRID A100-10C"):  # fmt: skip
        assert device_of_kind(kind, 9.5 * 2.0**30) is None, kind


def test_an_a100_s_memory_tells_its_size():
    assert device_of_kind("A100", 39 * 2.0**30).name == "a100-40g"
    assert device_of_kind("A100", 79 * 2.0**30).name == "a100-80g"
    assert device_of_kind("NVIDIA A100 PCIe", 39 * 2.0**30).name == "a100-40g-pcie"


def hosts_of(nodes, platform, processes, each, together="auto"):
    groups = host_groups(nodes, platform, processes, each, together)
    found = tuple(FoundDevice(platform, group.kind) for group in groups)
    return Hosts(platform, each, tuple(groups), found)


def one_host(kind):
    return Hosts("gpu", 8, (HostGroup((), kind, (8,)),), (FoundDevice("gpu", kind, 7),))


def test_a_host_s_profile_is_taken_but_for_the_network(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    hosts = hosts_of(H100, "gpu", 2, 8)
    assert known_devices(hosts)[0] == [DEVICES["h100"]]
    measured = Device("h100", 1.0, {"bfloat16": 2.0}, 3.0, 4.0, 4.0, 8, 0, "measured")
    path = profile_path([hosts.devices[0]] * 8)
    constants = known_devices(hosts)[1].with_values({"matmul": 1.0}, measured=True)
    made_on = MeasuredOn.here([hosts.devices[0]] * 8)
    write_profile(Profile(measured, constants, {}, made_on), path)
    [device], constants = known_devices(hosts)
    assert (device.link, device.network) == (4.0, DEVICES["h100"].network)
    assert constants.matmul == 1.0
    # One of other versions is refused, and says of which; so is one of an older calibration.
    before = tuple((n, "0.1" if n == "jax" else v) for n, v in made_on.versions)
    unnamed = tuple((n, v) for n, v in made_on.versions if n != "calibration")
    for versions, said in ((before, "jax 0.1"), (unnamed, "calibration none")):
        old = dataclasses.replace(made_on, versions=versions)
        write_profile(Profile(measured, constants, {}, old), path)
        with pytest.raises(ConfigError, match=rf"measured elsewhere: {said}, not .*--calibrate$"):
            known_devices(hosts)
    write_profile(Profile(measured, constants, {}, made_on), path)
    # Beside others what one host measured says nothing of them.
    both, constants = known_devices(hosts_of([*H100, *A100], "gpu", 6, 8))
    assert [d.name for d in both] == ["h100", "a100-80g"] and not constants.measured


def test_a_kind_that_is_not_in_the_catalogue_is_refused():
    with pytest.raises(ConfigError, match=r"knows no 'RTX-9', and no network.*devices.py"):
        known_devices(one_host("RTX-9"))


CLUSTERS = {
    "two kinds": ([*A100[:1], *H100[:1]], "gpu", 2, 8, "auto"),
    "racks": ([host("H100", 2, rack=r) for r in ("r1", "r2")], "gpu", 2, 2, "rack"),
    "slices": (slices(a=1, b=2), "tpu", 3, 4, "auto"),
}


def plan_on(name, monkeypatch, **changes):
    nodes, platform, processes, each, together = CLUSTERS[name]
    hosts = hosts_of(nodes, platform, processes, each, together)
    monkeypatch.setattr("hjax.planning.auto.discover_hosts", lambda config: hosts)
    keys = {"placement": "auto", "cluster.address": "10.0.0.1:6379", "rollout.prompts": 32,
            "cluster.processes": processes,
            "cluster.colocation_label": together} | changes  # fmt: skip
    config = tiny_config("PPO", keys)
    return hjax.plan(config), nodes, config


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_plan_s_sets_stand_on_the_hosts_it_was_made_for(name, monkeypatch):
    plan, nodes, config = plan_on(name, monkeypatch)
    _, platform, _, each, together = CLUSTERS[name]
    taken = {}
    for labels, count in zip(plan.where, plan.allocation, strict=True):
        assert count <= each or count % each == 0
        place = placements(nodes, "p", platform, max(count // each, 1), min(count, each), together,
                      labels)  # fmt: skip
        assert labels and set(labels.items()) <= set(place[0].labels)
        key = tuple(sorted(labels.items()))
        taken[key] = taken.get(key, 0) + count
    for labels, count in taken.items():
        there = [n for n in nodes if dict(labels).items() <= n["Labels"].items()]
        assert count <= sum(n["Resources"].get(platform.upper(), 0) for n in there)


def test_the_search_weighs_kinds_against_each_other(monkeypatch):
    # Either host would do; the step is shorter on the faster one than on the other.
    plan, *_ = plan_on("two kinds", monkeypatch, **{"algorithm.kl_coef": 0.0})
    actor = next(i for i, roles in enumerate(plan.placement) if "actor" in roles)
    assert plan.where[actor] == {KIND_LABEL: "H100"}


def test_a_plan_is_read_back_with_its_hosts(tmp_path):
    file = tmp_path / "plan.json"
    content = {
        "placement": [["actor", "reference"], ["critic"]], "allocation": [8, 8],
        "where": [{KIND_LABEL: "H100"}, {}],
    }  # fmt: skip
    file.write_text(json.dumps(content))
    roles = ("actor", "critic", "reference")
    plan = make_plan(str(file), roles, 16)
    assert plan.where == ({KIND_LABEL: "H100"}, {})
    config = tiny_config("PPO", {"placement": str(file), "cluster.devices_per_process": 2})
    for wrong, said in (
        ([{"rack": 1}, {}], "no labels, name and value both strings"),
        (["rack", {}], "where"),
        ([{}], "one entry of where. per set"),
    ):
        file.write_text(json.dumps(content | {"where": wrong}))
        with pytest.raises(ConfigError, match=said):
            make_plan(str(file), roles, 16)
    file.write_text(json.dumps(content | {"allocation": [1, 1]}))
    with pytest.raises(ConfigError, match=r"wants hosts with .*H100.*set cluster.address"):
        hjax.Trainer(config)


def test_hosts_that_a_plan_wants_and_nobody_has_are_named():
    said = r"the labels rack=r9, but none has them;.* rack=r1"
    with pytest.raises(ConfigError, match=said):
        placements([host("H100", 8, rack="r1")], "p", "gpu", 1, 8, labels={"rack": "r9"})
