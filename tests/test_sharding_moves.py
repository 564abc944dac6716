"""The planner of moves, against brute force and against what no plan can beat."""

import itertools
import math

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hjax.sharding.reshard_plan import plan_moves, received_elements, spec_of, split_of

SIZES = {"a": 2, "b": 2, "c": 4}


def blocks(shape, split, sizes):
    """bool [devices, *shape]: which elements each device holds. Devices count over all axes."""
    names = list(sizes)
    held = []
    for coordinates in itertools.product(*(range(sizes[n]) for n in names)):
        at = dict(zip(names, coordinates, strict=True))
        mask = np.ones(shape, bool)
        for dimension, axes in enumerate(split):
            index = count = 0
            for axis in axes:
                index, count = index * sizes[axis] + at[axis], max(count, 1) * sizes[axis]
            part = np.zeros(shape[dimension], bool)
            size = shape[dimension] // max(count, 1)
            part[index * size : (index + 1) * size] = True
            mask &= part.reshape([-1 if i == dimension else 1 for i in range(len(shape))])
        held.append(mask)
    return np.array(held)


def least(shape, source, target, sizes):
    """What some device must receive at least: elements it needs and does not hold."""
    before, after = (blocks(shape, split, sizes) for split in (source, target))
    return int((after & ~before).reshape(len(after), -1).sum(1).max())


def all_splits(rank, names):
    """Every way to put some of these axes, in any order, on the dimensions."""
    for count in range(len(names) + 1):
        for chosen in itertools.permutations(names, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                edges = [0, *cuts, count]
                yield tuple(chosen[i:j] for i, j in itertools.pairwise(edges))


def brute_force(shape, source, target, sizes, depth):
    """Fewest elements received in at most ``depth`` moves, whatever axes they use."""

    def size(split):
        return math.prod(shape) // math.prod(sizes[a] for axes in split for a in axes)

    def fits(split):
        return all(n % math.prod(sizes[a] for a in s) == 0 for n, s in zip(shape, split))

    def steps(split):
        used = {a for axes in split for a in axes}
        for i, axes in enumerate(split):

            def put(new, j=None, other=None, i=i):
                return tuple(new if k == i else other if k == j else s for k, s in enumerate(split))

            for axis in set(sizes) - used:
                yield 0, put((*axes, axis))
            for keep in range(len(axes)):
                n = math.prod(sizes[a] for a in axes[keep:])
                yield size(split) * (n - 1), put(axes[:keep])
                for j in range(len(split)):
                    if j != i:
                        handed = put(axes[:keep], j, (*split[j], *axes[keep:]))
                        yield size(split) * (n - 1) // n, handed
            for new in itertools.permutations(axes):
                yield size(split), put(new)

    best, states = math.inf, {source: 0}
    for _ in range(depth + 1):
        best = min(best, states.get(target, math.inf))
        following = {}
        for split, cost in states.items():
            for more, after in steps(split):
                if fits(after) and cost + more < following.get(after, best):
                    following[after] = cost + more
        states = following
    return best  # fmt: skip


def test_every_plan_of_two_dimensions_is_as_good_as_brute_force():
    splits = [s for s in all_splits(2, ("a", "b", "c")) if sum(map(len, s)) <= 3]
    rng = np.random.default_rng(0)
    for _ in range(60):
        source, target = (splits[i] for i in rng.integers(len(splits), size=2))
        found = received_elements(plan_moves((16, 16), source, target, SIZES))
        assert found <= brute_force((16, 16), source, target, SIZES, depth=3), (source, target)
        assert found >= least((16, 16), source, target, SIZES)


# name: source, target, the moves by hand, over d = 2, t = 4, u = 2; M = 64 x 64 elements.
CASES = {
    "tensor 8 to 4": (P(None, ("t", "u")), P(None, "t"), ["all_gather u"]),
    "tensor 8 to 1": (P(None, ("t", "u")), P(), ["all_gather t, u"]),
    "fsdp and tensor": (P("d", ("t", "u")), P(None, "t"), ["all_gather d", "all_gather u"]),
    "rows to columns": (P(("d", "t")), P(None, "t"), ["all_to_all t", "all_gather d"]),
    "all rows to all columns": (P(("d", "t")), P(None, ("d", "t")), ["all_to_all d, t"]),
    "a cut is free": (P(), P("d", "t"), ["slice t", "slice d"]),
    "cut before gathering": (P("d"), P(None, "t"), ["slice t", "all_gather d"]),
    "way back": (P(None, "t"), P("d", ("t", "u")), ["slice u", "slice d"]),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_by_hand_receive_the_least(name):
    sizes = {"d": 2, "t": 4, "u": 2}
    source, target, expected = CASES[name]
    splits = [split_of(spec, 2, sizes) for spec in (source, target)]
    moves = plan_moves((64, 64), *splits, sizes)
    shown = [f"{m.kind} {', '.join(m.axes)}" for m in moves]
    assert sorted(shown) == sorted(expected)
    assert received_elements(moves) == least((64, 64), *splits, sizes)


def test_axes_in_the_wrong_order_are_turned_before_gathering():
    """The generation axis minor: XLA's permute and all-gather, more than the major one's M/8."""
    sizes = {"t": 4, "u": 2}
    splits = [split_of(spec, 2, sizes) for spec in (P(("u", "t")), P("t"))]
    moves = plan_moves((64, 64), *splits, sizes)
    assert [m.kind for m in moves] == ["permute", "all_gather"]
    assert received_elements(moves) == 64 * 64 // 4


def test_rows_to_columns_never_take_a_full_replica():
    sizes = {"d": 2, "t": 4}
    moves = plan_moves((64, 64), (("d", "t"), ()), ((), ("t",)), sizes)
    assert max(move.size for move in moves) == 64 * 64 // 4
    # M/t less the part of it that was there: 1 - 1/(d t) of it.
    assert received_elements(moves) == 64 * 64 // 4 * 7 // 8


def test_moves_need_sizes_that_divide():
    """A dimension of 2 cannot be cut by the axes that come and those that leave at once."""
    moves = plan_moves((2, 64), (("a",), ()), (("b",), ()), {"a": 2, "b": 2})
    assert [m.kind for m in moves] == ["all_gather", "slice"]


def test_splits_and_specs():
    sizes = {"d": 2, "t": 4, "one": 1}
    split = split_of(P("one", ("d", "one", "t")), 3, sizes)
    assert split == ((), ("d", "t"), ())
    assert spec_of(split) == P(None, ("d", "t"))
