"""Operators on flows: order, what is asked for early, what is replayed."""

import concurrent.futures
import itertools

import numpy as np
import pytest

from hjax.algorithms.flow import Replay, ahead, as_completed, concurrently, in_step, union
from hjax.controller import Future
from hjax.errors import ConfigError, RunError


def future(label, value=None):
    inner = concurrent.futures.Future()
    if value is not None:
        inner.set_result(value)
    return Future(inner, label), inner


def test_calls_are_made_before_any_is_waited_for():
    made = []
    calls = [lambda name=name: made.append(name) or future(name)[0] for name in "ab"]
    futures = concurrently(*calls)
    assert made == ["a", "b"] and not any(f.done() for f in futures)


def test_union_takes_turns_until_all_have_ended():
    assert list(union("ab", "vwxyz", "")) == ["a", "v", "b", "w", "x", "y", "z"]
    endless = union(itertools.count(), itertools.count(100))
    assert list(itertools.islice(endless, 4)) == [0, 100, 1, 101]


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


def test_a_replay_buffer_keeps_the_newest_and_draws_by_its_seed():
    def drawn(seed):
        replay = Replay(3, seed)
        assert replay.sample() == [] and len(replay) == 0
        for i in range(5):
            stored = replay.store(future("x", {"x": np.full(2, i)})[0])
            assert stored["x"][0] == i
        assert len(replay) == 3
        assert sorted(b["x"][0] for b in replay.sample(9)) == [2, 3, 4]
        return [replay.sample()[0]["x"][0] for _ in range(20)]

    assert drawn(0) == drawn(0) != drawn(1)
    assert set(drawn(0)) == {2, 3, 4}


def test_sizes_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match="ahead by -1 items: 0"):
        next(ahead([], -1))
    with pytest.raises(ConfigError, match="buffer of 0 batches: 1 or more"):
        Replay(0)
