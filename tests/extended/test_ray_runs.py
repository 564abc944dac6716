"""Runs on a Ray cluster of real processes: the same metrics as in one process."""

import contextlib
import json
import socket

import jax
import numpy as np
import pytest
from helpers import computed, episode_keys, tiny_config
from test_algorithms_extending import write_examples
from test_controller_pickled import RUNNABLE, SHORT, UNUSED
from test_tool_runs import tool_keys

import hjax
from hjax.controller import ResourcePool, Timeline, WorkerGroup, ray_calls
from hjax.controller.ray_cluster import RayCluster
from hjax.models.model_config import ModelConfig
from hjax.run.backends import ProcessProbe
from hjax.user_code import load_object
from hjax.workers import WorkerContext

EACH = 2  # devices of a process
# Enough for rewards that differ in the first step: of equal ones whitening makes noise.
BASE = {"warm_start.steps": 6, "rollout.prompts": 16, "rollout.max_response_length": 8}
MODEL = ModelConfig(
    vocab_size=1024, hidden_size=256, layers=2, heads=4, kv_heads=4, head_dim=64, mlp_size=1024,
    max_length=32,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray cluster for the tests of this file; every run starts its own processes on it."""
    ray_calls.start_local_cluster(processes=6)
    yield
    ray_calls.end_here()


def on_cluster(processes, each=EACH):
    return {
        "cluster.address": "local",
        "cluster.processes": processes,
        "cluster.devices_per_process": each,
    }


def in_one_process(processes, each=EACH):
    return {"cluster.devices_per_process": processes * each}


def run(config, workdir=None, steps=None):
    with contextlib.closing(hjax.Trainer(config, workdir)) as trainer:
        return [computed(row) for row in trainer.run(steps)]


def assert_close(rows, expected):
    """Equal to 1e-5. Not bit for bit: a process with fewer devices shares its cores out otherwise,
    and XLA's products on a CPU add up in an order that depends on that."""
    assert len(rows) == len(expected) and rows
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in other.items():
            told = f"{key} of step {other['step']}"
            np.testing.assert_allclose(row[key], value, atol=1e-5, rtol=1e-5, err_msg=told)


# (algorithm, placement, processes)
CASES = [("GRPO", "split", 2)]
SLOW_CASES = [
    (algorithm, placement, processes)
    for algorithm in ("PPO", "GRPO")
    for placement, processes in (
        ("colocate", 1),
        ("colocate", 2),
        ("colocate", 4),
        ("split", 2),
        ("split", 4),
        ("standalone", 4),
    )
    if (algorithm, placement, processes) not in CASES
]


@pytest.mark.parametrize(
    "algorithm, placement, processes",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_metrics_are_those_of_one_process(algorithm, placement, processes):
    # Mini-batches are rows of what each process holds of the step's batch.
    changes = BASE | {"placement": placement, "steps": 5, "eval.every": 3}
    changes |= {"algorithm.minibatch": 8, "algorithm.epochs": 2}
    expected = run(tiny_config(algorithm, changes | in_one_process(processes)))
    rows = run(tiny_config(algorithm, changes | on_cluster(processes)))
    assert_close(rows, expected)


LAYOUTS = {
    "tensor": {"layout.actor.train.tensor": 4, "layout.critic.train.tensor": 4},
    "fsdp": {"layout.actor.train.fsdp": 4, "layout.critic.train.fsdp": 4},
    "pipe": {"layout.actor.train.pipe": 2, "model.layers": 2},
    "context": {"layout.actor.train.context": 4},
}
BY_CONFIG = [("ppo", "tensor"), ("grpo", "fsdp"), ("remax", "pipe"), ("safe_rlhf", "context"),
             ("sft", "fsdp"), ("stories", "tensor")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, layout",
    [*BY_CONFIG, *(("ppo", layout) for layout in LAYOUTS if ("ppo", layout) not in BY_CONFIG)],
)
def test_two_processes_compute_what_one_does_with_as_many_devices(name, layout, request):
    assert name in RUNNABLE
    if name == "stories":
        request.getfixturevalue("test_data")
    changes = {k: v for k, v in SHORT.items() if k not in UNUSED.get(name, ())} | LAYOUTS[layout]
    if name == "safe_rlhf":
        # Its untrained critics' gradients are rounding alone in places, along which Adam takes
        # whole steps: compared before a second update.
        changes |= {"steps": 1, "eval.every": 1, "algorithm.minibatch": 0, "algorithm.epochs": 1}

    def config(cluster):
        keys = changes | {f"cluster.{k.partition('.')[2]}": v for k, v in cluster.items()}
        return hjax.get_config(f"{name}.py", [f"--config.{k}={v}" for k, v in keys.items()])

    assert_close(run(config(on_cluster(2))), run(config(in_one_process(2))))


def test_a_worker_and_a_dataflow_of_ones_own_run_unchanged(tmp_path):
    name = f"{write_examples(tmp_path)}/varied.py:Varied"
    changes = BASE | {"steps": 2}
    expected = run(tiny_config(name, changes | in_one_process(2, each=1)))
    assert_close(run(tiny_config(name, changes | on_cluster(2, each=1))), expected)


@pytest.mark.slow
def test_it_resumes_on_other_processes_and_another_placement(tmp_path):
    changes = BASE | {"steps": 4, "checkpoint.every": 1}
    expected = run(tiny_config("PPO", changes | in_one_process(2)))
    first = run(tiny_config("PPO", changes | on_cluster(2)), tmp_path, steps=2)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["hosts"] == [[socket.gethostname()] * 2]
    moved = changes | on_cluster(2, each=1) | {"placement": "split"}
    assert_close(first + run(tiny_config("PPO", moved), tmp_path), expected)


def test_generation_ahead_of_learning_is_the_same(tmp_path):
    changes = BASE | {
        "placement": "disaggregate",
        "rollout.max_staleness": 1,
        "rollout.deterministic": True,
        "steps": 4,
    }
    expected = run(tiny_config("GRPO", changes | in_one_process(2, each=1)))
    rows = run(tiny_config("GRPO", changes | on_cluster(2, each=1)), tmp_path)
    assert_close(rows, expected)
    assert max(row["rollout/staleness"] for row in rows) == 1
    assert list((tmp_path / "logs").glob("rollout-0.log"))


def test_environments_play_each_episode_once(tmp_path, monkeypatch):
    """Whatever they do beside their answers is done as often as in one process."""
    made = {}
    for name, keys in (("one", in_one_process(2, each=1)), ("two", on_cluster(2, each=1))):
        monkeypatch.setenv("HJAX_TEST_CALLS", str(tmp_path / name))
        changes = episode_keys(tmp_path, "Fresh") | {"steps": 3, "eval.every": 3}
        made[name] = run(tiny_config("GRPO", changes | keys))
    assert_close(made["two"], made["one"])
    calls = [sorted((tmp_path / name).read_text().splitlines()) for name in made]
    assert calls[0] == calls[1]
    # A reset for each of 16 episodes a step, and those of the evaluations.
    resets = [line for line in calls[0] if line.startswith("reset")]
    assert len(resets) >= 3 * 16 and len(calls[0]) > 2 * len(resets)


def test_conversations_with_tools_on_ray(tmp_path):
    """Two processes draw the turns of which one would draw all; tools are called the same times."""
    keys = tool_keys(tmp_path) | {"steps": 1, "eval.every": 0, "data.packing": 224}
    one, two = (
        run(tiny_config("GRPO", keys | where))
        for where in (in_one_process(2, each=1), on_cluster(2, each=1))
    )
    assert_close(two, one)
    assert one[0]["episode/tool_calls"] > 0.5 and one[0]["actor/grad_norm"] > 0


COUNTING = """
import hjax
from hjax.controller.ray_calls import StoredArray
from hjax.sharded_values import SummedValue
from hjax.sharding.protocols import control

fetch, fetches = StoredArray.fetch, {}

def counted(stored):
    array = fetch(stored)
    fetches[stored.reference] = array.nbytes
    return array

StoredArray.fetch = counted

class Counting(hjax.workers.Reference):
    @control
    def fetched(self):
        return SummedValue({"bytes": self.fetched_bytes})

    @hjax.protocol("3D_PROTO", reads=("x",))
    def doubled(self, batch):
        held = sum(shard.data.nbytes for shard in batch["x"].addressable_shards)
        counts = SummedValue({"held": held, "fetched": sum(fetches.values())})
        fetches.clear()
        return {"x": 2 * batch["x"], "counts": counts}
"""


@contextlib.contextmanager
def two_groups(folder, pools, train, generate):
    """A cluster's groups of equal models, in one pool or in two, each on two processes."""
    (folder / "counting.py").write_text(COUNTING)
    worker = load_object(f"{folder}/counting.py:Counting", "worker")
    made = RayCluster("local", 2 * pools, EACH, probe=ProcessProbe)
    try:
        parts = [made.devices[: 2 * EACH], made.devices[2 * EACH :]][:pools]
        rooms = [ResourcePool(f"p{i}", x, Timeline(), made.executor) for i, x in enumerate(parts)]
        one, other = (
            WorkerGroup(pool, worker, WorkerContext(role, sizes={"train": sizes}, model=MODEL))
            for role, pool, sizes in (("one", rooms[0], train), ("other", rooms[-1], generate))
        )
        one.initialize().result()
        yield made, one, other
    finally:
        made.close()


def given(group):
    """Bytes that the processes of a group's pool have written for others."""
    return sum(each["given_bytes"] for each in group.pool.executor.machine())


def test_each_process_receives_its_own_rows_and_no_others(tmp_path):
    """From the controller, and from the processes of another pool."""
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(64, 4096)).astype(np.float32), "y": np.zeros((64, 10**6))}
    with two_groups(tmp_path, 2, {"data": 4}, {"data": 2, "tensor": 2}) as (made, one, other):
        first = one.doubled(batch)
        second = other.doubled(first)
        results = first.result(), second.result()
    size = batch["x"].nbytes
    assert results[0]["counts"] == {"held": size, "fetched": size}
    # Rows over two, which the other's processes have on both of their devices each.
    assert results[1]["counts"] == {"held": 2 * size, "fetched": size}
    np.testing.assert_array_equal(results[1]["x"], 4 * batch["x"])
    assert made.sent_bytes < 100_000


def test_weights_of_a_pool_s_own_go_by_one_program_of_its_world(tmp_path):
    """Between two groups of one pool of two processes, whatever their layouts; nothing is left for
    others, in the store or on the way to the controller."""
    with two_groups(tmp_path, 1, {"fsdp": 4}, {"data": 2, "tensor": 2}) as (made, actor, reference):
        handles = actor.pool.executor.handles()
        assert all(handle.info.address.startswith("127.0.0.") for handle in handles)
        before = given(actor)
        passed = made.sent_bytes + made.fetched_bytes
        reference.take_weights(actor.weights()).result()
        after = actor.pool.executor.machine()
        assert [each["names"] for each in after] == [["cast_copies"]] * 2
        # That there is no result.
        assert sum(each["given_bytes"] for each in after) - before < 2000
        assert made.sent_bytes + made.fetched_bytes - passed < 5000
        sent, taken = actor.weights().result(), reference.weights().result()
        size = sum(x.nbytes for x in jax.tree.leaves(sent))
        jax.tree.map(np.testing.assert_array_equal, taken, sent)
        # What the controller asks for is given: each region once.
        assert 2 * size <= given(actor) - before < 2.1 * size


def test_weights_between_pools_are_given_and_fetched_once(tmp_path):
    """Rows of the one are columns of the other, each over two processes."""
    with two_groups(tmp_path, 2, {"fsdp": 4}, {"tensor": 4}) as (made, actor, rollout):
        landing = rollout.target_regions().result()
        before, passed = given(actor), made.sent_bytes + made.fetched_bytes
        rollout.take_weights(actor.weights(landing)).result()
        fetched = rollout.fetched().result()["bytes"]
        gave, passed = given(actor) - before, made.sent_bytes + made.fetched_bytes - passed
        rollout.take_weights(actor.weights()).result()
        uncut = rollout.fetched().result()["bytes"]
        sent, taken = actor.weights().result(), rollout.weights().result()
    jax.tree.map(np.testing.assert_array_equal, taken, sent)
    size = sum(x.nbytes for x in jax.tree.leaves(sent))
    # Half of a part is small, and goes along with the message.
    assert size <= gave < 1.1 * size and 0.9 * size < fetched <= size
    assert passed < 20_000
    # Whole shards, as who knows nothing of the other's layout leaves them, go to both processes.
    assert 1.8 * size < uncut <= 2 * size
