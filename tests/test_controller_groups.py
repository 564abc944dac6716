"""Worker groups, futures, protocols and the timeline, with workers that only wait and count."""

import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hjax
from hjax.controller import Future, ResourcePool, Timeline, WorkerGroup, check_disjoint, join
from hjax.controller.timeline import union_seconds
from hjax.errors import ConfigError, RunError
from hjax.sharding.layout import make_layouts


class Clerk:
    """A worker on no device."""

    def __init__(self):
        self.log = []

    @hjax.protocol("ONE_TO_ALL")
    def write(self, text):
        self.log.append(text)
        return {"text": text}

    @hjax.protocol("ONE_TO_ALL")
    def wait_for(self, event, value=None):
        assert event.wait(30)
        return {"value": value}

    @hjax.protocol("ONE_TO_ALL", phase="generate")
    def meet(self, barrier):
        barrier.wait(30)
        time.sleep(0.02)
        return {}

    @hjax.protocol("ONE_TO_ALL")
    def fail(self, error):
        raise error

    @hjax.protocol("ONE_TO_ALL")
    def use(self, batch):
        return batch

    def unbound(self):
        return None


@pytest.fixture
def make_group():
    pools = []

    def make(name="desk", timeline=None, **kwargs):
        pools.append(ResourcePool(name, (), timeline))
        return WorkerGroup(pools[-1], Clerk, role=kwargs.pop("role", "clerk"), **kwargs)

    yield make
    for pool in pools:
        pool.close()


def test_a_call_returns_a_future_at_once(make_group):
    group, gate = make_group(), threading.Event()
    future = group.wait_for(gate, value=3)
    assert isinstance(future, Future)
    assert not future.done()
    gate.set()
    assert future.result(30) == {"value": 3}
    assert future.done()


def test_one_pool_keeps_call_order_over_its_groups():
    log = []

    class Shared(Clerk):
        def __init__(self):
            self.log = log

    pool = ResourcePool("desk")
    first, second = (WorkerGroup(pool, Shared, role=role) for role in ("a", "b"))
    calls = [group.write(f"{i}{group.role}") for i in range(5) for group in (first, second)]
    join(*calls)
    assert log == ["0a", "0b", "1a", "1b", "2a", "2b", "3a", "3b", "4a", "4b"]
    pool.close()


def test_disjoint_pools_overlap_in_time(make_group):
    timeline, barrier = Timeline(), threading.Barrier(2)
    calls = [make_group(name, timeline).meet(barrier) for name in ("left", "right")]
    join(*calls)  # each waits inside its call until the other is there too
    left, right = timeline.spans()
    assert {left.pool, right.pool} == {"left", "right"}
    assert max(left.start, right.start) < min(left.end, right.end)
    # Counted once where both ran, so phases never add up to more than the clock.
    together = max(left.end, right.end) - min(left.start, right.start)
    assert timeline.phase_seconds(0)["generate"] == pytest.approx(together, rel=1e-6)


def test_a_call_starts_when_its_inputs_exist(make_group):
    gate = threading.Event()
    early, late = make_group("early"), make_group("late")
    value = early.wait_for(gate, value=[1, 2])
    used = late.use({"deep": [value]})
    time.sleep(0.05)
    assert not used.done()
    gate.set()
    assert used.result(30) == {"deep": [{"value": [1, 2]}]}


class Pair(NamedTuple):
    left: object
    right: object


def test_futures_in_named_tuples_are_waited_for(make_group):
    group = make_group()
    assert join(pair=Pair(group.write("x"), 2)) == {"pair": Pair({"text": "x"}, 2)}


def test_an_error_surfaces_at_result_with_the_calls_name(make_group):
    first, second = make_group("one", role="reward"), make_group("two", role="critic")
    failed = first.fail(ValueError("no such answer"))
    with pytest.raises(ValueError, match="no such answer") as caught:
        failed.result(30)
    assert caught.value.__notes__ == ["in the call reward.fail"]
    # Whoever passes it on is not to blame, and the pool goes on working.
    with pytest.raises(ValueError) as caught:
        second.use(failed).result(30)
    assert caught.value.__notes__ == ["in the call reward.fail"]
    assert first.write("next").result(30) == {"text": "next"}


def test_an_error_while_building_the_worker_names_it(make_group):
    group = make_group(role="actor", wrong_argument=1)
    with pytest.raises(TypeError, match="wrong_argument") as caught:
        group.write("x").result(30)
    assert caught.value.__notes__ == ["in the call actor (construction)"]


def test_a_missed_deadline_names_who_is_late(make_group):
    gate = threading.Event()
    future = make_group(role="reward").wait_for(gate)
    with pytest.raises(RunError, match=r"reward\.wait_for has not answered within 0\.05 seconds"):
        future.result(timeout_seconds=0.05)
    gate.set()


def test_a_timeout_inside_the_call_is_its_own_error(make_group):
    future = make_group().fail(TimeoutError("the grader's"))
    with pytest.raises(TimeoutError, match="the grader's"):
        future.result(30)


def test_an_unknown_method_says_which_there_are(make_group):
    with pytest.raises(AttributeError, match="scribe has no method 'unbound' bound to a protocol"):
        make_group(role="scribe").unbound()
    with pytest.raises(AttributeError, match="it has fail, meet, use, wait_for, write"):
        make_group().wrte("x")


def test_join_merges_dicts_and_futures(make_group):
    group = make_group()
    merged = join({"a": 1, "b": jnp.arange(3)}, group.write("x"), {"a": 2}, greedy=group.write("y"))
    assert merged["a"] == 2  # later parts win
    assert merged["text"] == "x" and merged["greedy"] == {"text": "y"}
    assert isinstance(merged["b"], np.ndarray)


def test_pools_that_share_a_device_are_refused():
    devices = jax.devices()
    pools = [ResourcePool("actor", devices[:3]), ResourcePool("critic", devices[2:])]
    with pytest.raises(ConfigError, match="pools 'actor' and 'critic' share .*different devices"):
        check_disjoint(pools)
    check_disjoint([ResourcePool("host"), ResourcePool("a", devices[:4]), *pools[1:0]])


class Holder(hjax.workers.Worker):
    """Keeps what each protocol handed it."""

    def keep(self, batch):
        self.batch = batch
        return batch

    split = hjax.protocol("3D_PROTO")(lambda self, batch: self.keep(batch))
    generate = hjax.protocol("3D_ALL_MICRO_DP")(lambda self, batch: self.keep(batch))
    whole = hjax.protocol("ONE_TO_ALL")(lambda self, batch: self.keep(batch))
    pipe = hjax.protocol("3D_PP_ONLY")(lambda self, batch: self.keep(batch))
    plain = hjax.protocol("DP_PROTO")(lambda self, batch: self.keep(batch))
    shards = hjax.protocol("ALL_TO_ALL")(
        lambda self, batch: self.keep({"x": self.layouts.train.constrain(batch["x"], "batch")})
    )


@pytest.fixture
def holder():
    # data 2 x tensor 4 in training; 2 of the 4 stay tensor in generation, the rest is batch.
    layouts = make_layouts(jax.devices(), {"data": 2, "tensor": 4}, {"tensor": 2})
    pool = ResourcePool("all", jax.devices())
    yield WorkerGroup(pool, Holder, hjax.workers.WorkerContext("holder", layouts=layouts))
    pool.close()


def rows_by_device(x):
    return {s.device.id: np.asarray(s.data)[:, 0].tolist() for s in x.addressable_shards}


X = np.arange(8, dtype=np.float32)[:, None]
EVEN, ODD = [0, 1, 2, 3], [4, 5, 6, 7]


@pytest.mark.parametrize("method", ["split", "plain"])
def test_a_training_edge_splits_over_data(holder, method):
    join(getattr(holder, method)({"x": X}))
    expected = {d: EVEN if d < 4 else ODD for d in range(8)}
    assert rows_by_device(holder.worker.batch["x"]) == expected


def test_a_generation_edge_splits_over_the_micro_axis_too(holder):
    join(holder.generate({"x": X}))
    # Devices 0 and 1 are micro data ranks of tensor rank 0, 2 and 3 of tensor rank 1.
    pairs = [[0, 1], [2, 3], [0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]
    assert rows_by_device(holder.worker.batch["x"]) == dict(enumerate(pairs))


@pytest.mark.parametrize("method", ["whole", "pipe"])
def test_other_edges_replicate(holder, method):
    join(getattr(holder, method)({"x": X}))
    assert rows_by_device(holder.worker.batch["x"]) == {d: [*range(8)] for d in range(8)}


def test_all_to_all_hands_over_and_gives_back_every_devices_part(holder):
    parts = holder.shards({"x": jnp.asarray(X)}).result(60)["x"]
    assert [np.asarray(part)[:, 0].tolist() for part in parts] == [EVEN] * 4 + [ODD] * 4


def test_strings_pass_and_scalars_are_replicated(holder):
    texts = ["a", "b"]
    join(holder.split({"x": X, "text": texts, "deep": {"n": np.asarray(2.0)}}))
    batch = holder.worker.batch
    assert batch["text"] == texts
    assert batch["deep"]["n"].sharding.is_fully_replicated


def test_a_batch_that_does_not_divide_is_refused(holder):
    with pytest.raises(ConfigError, match="a batch of 7 rows .* over 2 .*use a multiple of 2"):
        join(holder.split({"x": X[:7]}))


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ConfigError, match="unknown transfer protocol '4D'; allowed: 3D_ALL_MICRO"):
        hjax.protocol("4D")


def test_the_chrome_trace_shows_pools_as_processes_and_roles_as_threads(make_group):
    timeline = Timeline()
    pool = ResourcePool("desk", (), timeline)
    groups = [WorkerGroup(pool, Clerk, role=role) for role in ("actor", "critic")]
    timeline.step = 4
    join(groups[0].write("x"), groups[1].write("y"))
    trace = timeline.chrome_trace()
    events = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "M"}
    assert events["process_name"]["args"] == {"name": "pool desk"}
    threads = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert {t["args"]["name"]: t["tid"] for t in threads} == {"actor": 0, "critic": 1}
    calls = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(c["name"], c["tid"], c["cat"]) for c in calls] == [
        ("write", 0, "prepare"),
        ("write", 1, "prepare"),
    ]
    for call, span in zip(calls, timeline.spans(4), strict=True):
        assert call["args"]["step"] == 4
        assert call["dur"] == pytest.approx((span.end - span.start) * 1e6, abs=0.1)
    pool.close()


def test_union_of_intervals():
    assert union_seconds([(0, 2), (1, 3), (5, 6)]) == 4
    assert union_seconds([(0, 10), (2, 3)]) == 10
    assert union_seconds([]) == 0
