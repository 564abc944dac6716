"""Operators on flows: order, what is asked for early, what is replayed, what a state keeps."""

import concurrent.futures
import itertools
import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from hjax.algorithms.flow import (
    ahead,
    as_completed,
    calls,
    concurrently,
    in_step,
    replay,
    store,
    union,
)
from hjax.controller import Future, ResourcePool, WorkerGroup
from hjax.errors import ConfigError, DataError, RunError
from hjax.workers import ReplayBuffer, WorkerContext


def future(label, value=None):
    inner = concurrent.futures.Future()
    if value is not None:
        inner.set_result(value)
    return Future(inner, label), inner


def context(capacity=6, seed=0):
    options = ConfigDict({"algorithm": {"replay_capacity": capacity}})
    return WorkerContext(role="buffer", seed=seed, options=options)


@pytest.fixture
def buffer():
    """A replay buffer's worker group, and a function that makes another."""
    pools = []

    def make(**options):
        pools.append(ResourcePool(f"host{len(pools)}"))
        return WorkerGroup(pools[-1], ReplayBuffer, context(**options), role="buffer")

    yield make
    for pool in pools:
        pool.close()


def rows(start, count=2):
    numbers = np.arange(start, start + count)
    return {"x": numbers, "texts": [f"t{n}" for n in numbers],
            "columns": {"answer": [int(n) for n in numbers]}, "scalar": np.float32(1)}  # fmt: skip


def test_a_round_is_asked_for_before_any_is_waited_for():
    made = []
    flows = [
        calls(lambda n, name=name: made.append(f"{name}{n}") or future(name)[0]) for name in "ab"
    ]
    found = next(concurrently(*flows, weights=[1, 2]))
    assert made == ["a0", "b0", "b1"] and not any(f.done() for f in found)
    assert list(concurrently("abcd", "vwx", weights=[2, 1])) == [["a", "b", "v"], ["c", "d", "w"]]


def test_union_takes_turns_until_all_have_ended():
    assert list(union("ab", "vwxyz", "")) == ["a", "v", "b", "w", "x", "y", "z"]
    assert list(union("abcd", "vw", weights=[3, 1])) == ["a", "b", "c", "v", "d", "w"]
    endless = union(itertools.count(), itertools.count(100))
    assert list(itertools.islice(endless, 4)) == [0, 100, 1, 101]


@pytest.mark.parametrize("taken", range(9))
def test_a_state_goes_on_with_the_same_items(taken):
    def build():
        inner = union(calls(lambda n: n), calls(lambda n: 100 + n), weights=[3, 2])
        return union(inner, calls(lambda n: -n), weights=[2, 1])

    flow = build()
    list(itertools.islice(flow, taken))
    state = json.loads(json.dumps(flow.state()))
    expected = list(itertools.islice(flow, 20))
    again = build()
    again.restore(state)
    assert list(itertools.islice(again, 20)) == expected


def test_flows_beside_go_on_with_the_main_one():
    seen = []
    beside = (seen.append(i) for i in range(2))
    assert list(in_step("abc", beside)) == ["a", "b", "c"]
    assert seen == [0, 1]  # it ended before the main one


@pytest.mark.parametrize("items", [0, 1, 3, 9])
def test_so_many_are_asked_for_ahead(items):
    asked = []
    flow = ahead((asked.append(i) or i for i in range(6)), items)
    for expected in range(6):
        assert next(flow) == expected
        assert len(asked) == min(expected + 1 + items, 6)
    assert list(flow) == []


def test_futures_come_as_they_are_done():
    (slow, inner), (quick, _) = future("slow"), future("quick", 1)
    flow = as_completed([slow, quick])
    assert next(flow) is quick
    inner.set_result(2)
    assert next(flow) is slow and list(flow) == []
    with pytest.raises(RunError, match="critic.update: not answered within 0.01 seconds"):
        next(as_completed([future("critic.update")[0]], timeout_seconds=0.01))


def test_a_buffer_keeps_the_newest_rows_with_their_texts(buffer):
    group = buffer(capacity=5)
    assert list(store([rows(0), rows(2), rows(4)], group))[1]["x"][0] == 2
    found = group.sample(200, 0).result()
    assert set(found["x"]) == {1, 2, 3, 4, 5} and "scalar" not in found
    assert found["texts"] == [f"t{n}" for n in found["x"]]
    assert found["columns"]["answer"] == list(found["x"])
    group.store(rows(10, 9)).result()  # more rows than places
    assert set(group.sample(99, 1).result()["x"]) == {14, 15, 16, 17, 18}


def test_draws_follow_from_number_and_seeds(buffer):
    groups = [buffer(capacity=50), buffer(capacity=50), buffer(capacity=50, seed=1)]
    for group in groups:
        group.store(rows(0, 50))
    drawn = [[tuple(f.result()["x"]) for f in itertools.islice(replay(g, 8), 5)] for g in groups]
    assert drawn[0] == drawn[1] and len({*drawn[0], *drawn[2]}) == 10
    other = [tuple(f.result()["x"]) for f in itertools.islice(replay(groups[0], 8, seed=3), 5)]
    assert not {*other} & {*drawn[0]}
    # Independent truth: numpy's generator of the three numbers, on the places in their order.
    expected = np.random.default_rng([0, 0, 2]).integers(50, size=8)
    assert drawn[0][2] == tuple(expected)


def test_sequences_of_other_lengths_are_padded(buffer):
    group = buffer(capacity=3)
    for width in (2, 4, 3):
        group.store({"tokens": np.full((1, width), width)})
    found = {tuple(row) for row in group.sample(60, 0).result()["tokens"].tolist()}
    assert found == {(2, 2, 0, 0), (4, 4, 4, 4), (3, 3, 3, 0)}
    group.store({"tokens": np.full((1, 2), 9)}).result()
    found = {tuple(row) for row in group.sample(60, 0).result()["tokens"].tolist()}
    assert (9, 9, 0, 0) in found and (2, 2, 0, 0) not in found


def test_a_checkpoint_has_the_buffer(tmp_path, buffer):
    first, again = buffer(), buffer()
    first.store(rows(0, 4), kind="grid of 10").result()
    first.save_state(str(tmp_path)).result()
    expected = first.sample(7, 3).result()
    again.load_state(str(tmp_path)).result()
    found = again.sample(7, 3).result()
    assert list(found["x"]) == list(expected["x"]) and found["columns"] == expected["columns"]
    assert found["texts"] == expected["texts"] and found["x"].dtype == expected["x"].dtype
    with pytest.raises(RunError, match="of grid of 10, and these are of grid of 20"):
        again.store(rows(0), kind="grid of 20").result()
    with pytest.raises(DataError, match="buffer has 6 places, and algorithm.replay_capacity=7"):
        buffer(capacity=7).load_state(str(tmp_path)).result()


def test_an_empty_buffer_is_saved_too(tmp_path, buffer):
    buffer().save_state(str(tmp_path)).result()
    group = buffer()
    group.load_state(str(tmp_path)).result()
    with pytest.raises(RunError, match="nothing to replay yet"):
        group.sample(1, 0).result()


@pytest.mark.parametrize(
    "batch, message",
    [
        ({"x": np.zeros(2), "y": np.zeros(3)}, "different numbers of rows: {'x': 2, 'y': 3}"),
        ({"y": np.zeros(2)}, "a batch with y for rows with x"),
        ({"x": np.zeros((2, 3))}, r"x is float64\[3\] a row, and its rows are float64\[\]"),
        ({"scalar": 1.0}, "a batch without rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(buffer, batch, message):
    group = buffer()
    group.store({"x": np.zeros(2)})
    with pytest.raises(RunError, match=message):
        group.store(batch).result()


def test_sizes_that_mean_nothing_are_refused(buffer):
    with pytest.raises(ConfigError, match="ahead by -1 items: 0"):
        next(ahead([], -1))
    with pytest.raises(ConfigError, match="a replay buffer of 0 rows: 1 or more"):
        buffer(capacity=0).built.result()
    with pytest.raises(ConfigError, match=r"weights=\[1, 0\] of 2 flows: a number each, 1 or more"):
        union("ab", "cd", weights=[1, 0])
    with pytest.raises(ConfigError, match="no flows"):
        concurrently()
    with pytest.raises(ConfigError, match="a flow of 1 flows is restored from one of 2"):
        union("a").restore(union("a", "b").state())
