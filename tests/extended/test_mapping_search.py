"""The search is exact: it finds what trying every placement, allocation and layout finds."""

import dataclasses

import numpy as np
import pytest
from mapping_cases import brute_force, groupings, packs, random_problem

from hjax.devices import Device
from hjax.planning import cost, hardware
from hjax.planning.constants import Constants
from hjax.planning.cost import DeviceSet
from hjax.planning.hardware import parse_cluster
from hjax.planning.plan_types import Cluster, DevicePool
from hjax.planning.role_options import pareto_front
from hjax.planning.search import BoundedSearch, RoleFronts, partitions, search


def best(case):
    result = search(case, count=1)
    return result.fastest.total if result.candidates else np.inf


def some(first, others):
    """Where cases begin; all but the first ones are slow."""
    return [first, *(pytest.param(n, marks=pytest.mark.slow) for n in others)]


@pytest.mark.parametrize("start", some(0, range(50, 400, 50)))
def test_equals_brute_force_up_to_8_devices_and_3_models(start):
    for seed in range(start, start + 50):
        case = random_problem(seed, devices=8, models=3, wide=True)
        assert best(case) == pytest.approx(brute_force(case), rel=1e-9), f"seed {seed}"


@pytest.mark.parametrize("start", some(50, (0, 25, 75)))
def test_equals_brute_force_up_to_16_devices_and_5_models(start):
    for seed in range(10_000 + start, 10_000 + start + 25):
        case = random_problem(seed, devices=16, models=5, wide=False)
        assert best(case) == pytest.approx(brute_force(case), rel=1e-9), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_equals_brute_force_in_thousands_of_cases():
    for seed in range(100_000, 104_000):
        case = random_problem(seed, devices=8, models=3, wide=True)
        assert best(case) == pytest.approx(brute_force(case), rel=1e-9), f"seed {seed}"
    for seed in range(200_000, 200_400):
        case = random_problem(seed, devices=16, models=5, wide=False)
        assert best(case) == pytest.approx(brute_force(case), rel=1e-9), f"seed {seed}"


def test_the_random_cases_are_not_all_alike():
    plans = [search(random_problem(s, 8, 3, True), count=1).candidates for s in range(100)]
    sets = [len(p[0].sets) for p in plans if p]
    assert 0 < sets.count(1) < len(sets) and sum(not p for p in plans) > 2
    used = [
        p[0].devices < random_problem(s, 8, 3, True).cluster.size for s, p in enumerate(plans) if p
    ]
    assert any(used) and not all(used)


def test_candidates_are_the_best_of_their_placements():
    case = random_problem(7, devices=8, models=3, wide=True)
    few, all_of_them = search(case, count=2), search(case, count=99)
    totals = [p.total for p in all_of_them.candidates]
    assert totals == sorted(totals)
    assert [p.total for p in few.candidates] == pytest.approx(totals[:2])
    for plan in all_of_them.candidates:
        placement = tuple(s.roles for s in plan.sets)
        assert BoundedSearch(RoleFronts(case)).best(placement).total == pytest.approx(plan.total)


@pytest.mark.parametrize("count, bell", [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_placements_are_all_set_partitions(count, bell):
    items = tuple("abcdef"[:count])
    found = {frozenset(map(frozenset, p)) for p in partitions(items)}
    assert len(list(partitions(items))) == len(found) == bell
    if count < 6:
        assert found == groupings(items)


def test_front_keeps_what_nothing_dominates():
    rng = np.random.default_rng(0)
    for _ in range(50):
        points = rng.integers(0, 4, (60, 4)).astype(float)
        kept = points[pareto_front(points)]
        for point in points:
            assert (kept <= point).all(axis=1).any()
        for i, point in enumerate(kept):
            others = np.delete(kept, i, axis=0)
            assert not (others <= point).all(axis=1).any()


def test_legal_allocations():
    assert hardware.legal_counts(parse_cluster("2x8:a100").pools[0]) == (1, 2, 4, 8, 16)
    assert hardware.legal_counts(parse_cluster("3x6:h100").pools[0]) == (1, 2, 3, 4, 6, 12, 18)
    (rack,) = parse_cluster("2x72:gb200").pools
    assert hardware.legal_counts(rack) == (
        1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 36, 40, 48, 56, 64, 72, 144
    )  # fmt: skip
    assert hardware.legal_counts(parse_cluster("v5p:2x4x4").pools[0]) == (1, 2, 4, 8, 16, 32)
    assert hardware.sub_slice(parse_cluster("v5p:2x4x4").pools[0], 8) == (2, 2, 2)
    (pool,) = parse_cluster("3xv5p:2x2x2").pools
    assert hardware.legal_counts(pool) == (1, 2, 4, 8, 16, 24)
    assert (pool.size, pool.hosts, pool.domain, pool.name) == (24, 6, 8, "3xv5p:2x2x2")
    assert hardware.sub_slice(pool, 16) == (2, 2, 2)


def test_rings_between_slices_share_the_network_of_a_slice_s_hosts():
    """By hand: two slices v5e:4x4 of four hosts, 25 GB/s each. A ring of all 32 devices has 16 in
    each slice, whose 4 hosts' network is its own: 100 GB/s, of which the link's 90 is less. Two
    devices, one in each slice, beside 15 more such rings: 1/16 of it."""
    (pool,) = parse_cluster("2xv5e:4x4").pools
    plain = Constants(network=1.0, link=1.0)
    place = DeviceSet(pool, 32, plain)
    assert cost.ring_bandwidth(place, 32, 1) == 90e9
    assert cost.ring_bandwidth(place, 2, 16) == 100e9 / 16
    assert cost.latency(place, 2, 16) == plain.network_latency


def test_sets_below_a_host_share_hosts_as_they_really_fit():
    device = hardware.device("h100")
    rng = np.random.default_rng(1)
    for _ in range(300):
        pool = DevicePool(device, int(rng.integers(1, 4)), int(rng.choice([4, 6, 8, 12, 72])))
        counts = tuple(sorted(int(n) for n in rng.choice(hardware.legal_counts(pool), 4)))
        hosts = pool.hosts - sum(n // pool.per_host for n in counts if n >= pool.per_host)
        parts = sorted((n for n in counts if n < pool.per_host), reverse=True)
        wanted = hosts >= 0 and packs(parts, [pool.per_host] * hosts)
        assert hardware.fit_together(pool, counts) == wanted


@pytest.mark.parametrize("hosts, per_host", [(1, 12), (2, 12), (1, 24), (3, 6)])
def test_sets_of_sizes_that_do_not_divide_one_another_equal_brute_force(hosts, per_host):
    for seed in range(300_000, 300_020):
        case = random_problem(seed, devices=8, models=3, wide=False)
        device = dataclasses.replace(case.cluster.pools[0].device, alone=(), torus=0)
        case = dataclasses.replace(case, cluster=Cluster((DevicePool(device, hosts, per_host),)))
        assert best(case) == pytest.approx(brute_force(case), rel=1e-9), f"seed {seed}"


def test_hosts_of_fewer_devices_have_the_network_of_these():
    """A card of 50 GB/s for each H100 and in a rack each GB200, one of 25 for a host of A100s."""
    plain = Constants(network=1.0)
    for name, wanted in (
        ("2x8:h100", 400), ("2x4:h100", 200), ("18x4:gb200", 200), ("2x72:gb200", 3600),
        ("2x8:a100", 25), ("2x4:a100", 25), ("4x1:gh200", 50),
    ):  # fmt: skip
        (pool,) = parse_cluster(name).pools
        place = DeviceSet(pool, pool.size, plain)
        # A ring over all hosts, and as many rings side by side as a host has devices.
        assert pool.device.network_of(pool.per_host) == wanted * 1e9
        across = cost.ring_bandwidth(place, pool.hosts, pool.per_host)
        assert across == pytest.approx(wanted * 1e9 / pool.per_host)


def test_a_set_lies_within_one_pool():
    case = random_problem(3, devices=8, models=3, wide=True)
    device = case.cluster.pools[0].device
    two = Cluster((DevicePool(device, 1, 2), DevicePool(device, 1, 2)))
    assert {n for p in two.pools for n in hardware.legal_counts(p)} == {1, 2}
    result = search(dataclasses.replace(case, cluster=two), count=99)
    for plan in result.candidates:
        assert all(s.devices <= 2 for s in plan.sets) and plan.devices <= 4


def test_simulated_devices_between_those_measured_do_together_what_lies_between():
    alone = ((1, 4.0, 0.5), (2, 3.5, 0.81), (8, 1.0, 1.0))
    device = Device("cpu", 1.0, {"float32": 1.0}, 1.0, 1.0, 1.0, 8, 0, "", alone=alone)
    pool = DevicePool(device, 1, 8)
    assert [pool.speedup(n) for n in (1, 2, 8)] == pytest.approx([4.0, 3.5, 1.0])
    # 2 do 7 together, 8 do 8, so 4 do the root of 56.
    assert pool.speedup(4) == pytest.approx(56**0.5 / 4)
    assert [pool.core_share(n) for n in (1, 2, 4, 8)] == pytest.approx([0.5, 0.81, 0.9, 1.0])
    plain = DevicePool(dataclasses.replace(device, alone=()), 1, 8)
    assert (plain.speedup(4), plain.core_share(4)) == (1.0, 0.0)
