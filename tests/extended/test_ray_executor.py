"""What a Ray cluster does beneath a run, with small workers: settings, versions, references, logs,
functions where the data is, the debugger, who may speak.
"""

import contextlib
import os
import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from helpers import TINY, tiny_config, write_config

import hjax
from hjax.controller import (
    ResourcePool,
    Timeline,
    WorkerGroup,
    join,
    ray_calls,
    ray_pool,
)
from hjax.controller.process import versions
from hjax.controller.ray_cluster import RayCluster
from hjax.errors import ConfigError, ProcessLost
from hjax.user_code import load_object
from hjax.workers import WorkerContext

ray = pytest.importorskip("ray")

WORKER = """
import logging, os, time
import jax, numpy as np
import hjax

HERE = "a file of the user's"

def doubled(batch):
    return {"x": 2 * batch["x"]}

class Small(hjax.workers.Worker):
    @hjax.protocol("ALL_TO_ALL")
    def told(self):
        return {
            "precision": jax.config.jax_default_matmul_precision,
            "flags": os.environ["XLA_FLAGS"], "file": HERE, "seed": self.context.seed,
        }

    @hjax.protocol("ALL_TO_ALL", phase="generate")
    def make(self, size):
        return {"tokens": np.arange(size, dtype=np.uint8), "few": np.arange(4)}

    @hjax.protocol("ALL_TO_ALL", phase="update", reads=("tokens",))
    def total(self, batch):
        assert list(batch) == ["tokens"]
        return {"sum": int(batch["tokens"].sum(dtype=np.int64))}

    @hjax.protocol("ALL_TO_ALL")
    def warn(self, text):
        print("printed", flush=True)
        logging.getLogger("somebody").warning(text)

    @hjax.protocol("ALL_TO_ALL")
    def fail(self):
        raise ValueError("what went wrong")
"""


class Small:
    """Two pools of two processes each, with a worker of the user's."""

    def __init__(self, folder):
        (folder / "small.py").write_text(WORKER)
        self.worker = load_object(f"{folder}/small.py:Small", "worker")
        self.doubled = load_object(f"{folder}/small.py:doubled", "function")
        self.said, self.timeline, self.logs = [], Timeline(), folder / "logs"
        self.cluster = RayCluster(
            "local", 1, 1, host_processes=2, logs=self.logs, say=self.said.append
        )
        self.one, self.other = map(self.group, ("one", "other"))

    def group(self, name):
        pool = ResourcePool(name, (), self.timeline, self.cluster.executor)
        group = WorkerGroup(pool, self.worker, WorkerContext(name, seed=7), role=name)
        group.built.result()
        return group


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with contextlib.ExitStack() as ends:
        if not ray.is_initialized():
            ray_calls.start_local_cluster(10)
            ends.callback(ray_calls.end_here)
        with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_use_onednn=false")
            made = Small(tmp_path_factory.mktemp("small"))
        ends.callback(made.cluster.close)
        yield made


def test_settings_seeds_and_files_reach_every_process(small):
    told = small.one.told().result()
    assert told["precision"] == "highest" and "--xla_cpu_use_onednn=false" in told["flags"]
    assert told["file"] == "a file of the user's" and told["seed"] == 7


def test_other_versions_are_refused_by_name(small, monkeypatch):
    ours = versions()
    monkeypatch.setattr(
        "hjax.controller.ray_cluster.versions", lambda: ours | {"jaxlib": "0.9.9"}
    )
    why = rf"process new:0 has jaxlib {re.escape(ours['jaxlib'])}, the controller 0\.9\.9; install"
    with pytest.raises(ConfigError, match=why):
        small.group("new")


def test_a_batch_goes_from_pool_to_pool_and_not_through_the_controller(small):
    size, cluster = 100_000_000, small.cluster
    before = cluster.sent_bytes + cluster.fetched_bytes
    batch = small.one.make(size)
    total = small.other.total(batch)
    expected = int(np.arange(256).sum()) * (size // 256) + int(np.arange(size % 256).sum())
    assert total.result() == {"sum": expected}
    assert cluster.sent_bytes + cluster.fetched_bytes - before < 20_000
    # Only what is asked for is given, and of what every process has only the first's.
    given = [each["given_bytes"] for each in small.one.pool.executor.machine()]
    assert size <= given[0] < 1.001 * size and given[1] < 10_000
    assert join(small.one.make(5))["tokens"].tolist() == [0, 1, 2, 3, 4]


def test_calls_stand_on_one_timeline_by_the_controller_s_clock(small):
    begun = time.perf_counter()
    small.other.total(small.one.make(8)).result()
    ended = time.perf_counter()
    spans = small.timeline.spans()[-2:]
    assert [(span.pool, span.method) for span in spans] == [("one", "make"), ("other", "total")]
    for span in spans:
        # A clock is set by one question and its answer, whose time apart is what it may be wrong.
        assert begun - 1 < span.start <= span.end < ended + 1


def test_prints_go_to_a_log_and_warnings_to_whoever_watches(small):
    small.one.warn("mind this").result()
    until = time.monotonic() + 20
    while not [line for line in small.said if line == "one:1 warning: mind this"]:
        assert time.monotonic() < until, small.said
        time.sleep(0.1)
    for rank in (0, 1):
        log = (small.logs / f"one-{rank}.log").read_text()
        assert f"process {rank} of 2 of pool one" in log and "printed" in log


def test_an_error_is_the_call_s_own(small):
    with pytest.raises(ValueError, match="what went wrong") as raised:
        small.one.fail().result()
    assert raised.value.__notes__ == ["in the call one.fail"]
    assert small.one.told().result()["seed"] == 7


def test_a_pure_function_runs_where_the_data_is(small):
    cluster = small.cluster
    batch = {"x": np.arange(1_000_000)}
    twice = small.one.apply(small.doubled, batch)
    before = cluster.fetched_bytes
    again = small.one.apply(small.doubled, twice)
    again._inner.result(60)
    assert cluster.fetched_bytes == before
    np.testing.assert_array_equal(again.result()["x"], 4 * batch["x"])


@pytest.mark.slow
def test_who_is_late_at_the_start_is_said(small, monkeypatch):
    wait = ray_pool.ProcessPool._wait_all

    def impatient(pool, references, doing, **options):
        monkeypatch.setattr(ray_pool, "START_SECONDS", 0)
        return wait(pool, references, doing, **options)

    monkeypatch.setattr(ray_pool.ProcessPool, "_wait_all", impatient)
    with pytest.raises(ProcessLost, match=r"late:0, late:1: not done with starting within 0 s"):
        small.group("late")


@pytest.mark.slow
def test_nobody_joins_without_the_token(tmp_path):
    """A cluster that hjax starts has a token of its own, which is written nowhere."""
    program = (
        "import os, ray\n"
        "from hjax.controller import ray_calls\n"
        "ray_calls.start_local_cluster(2)\n"
        "print(ray_calls.whereabouts()[1], os.environ['RAY_AUTH_TOKEN'], flush=True)\n"
        "input()\n"
        "ray_calls.end_here()\n"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    own = plain | {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    head = subprocess.Popen([sys.executable, "-c", program], env=own, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    try:
        address, token = head.stdout.readline().split()
        assert address.startswith("127.0.0.") and len(token) == 64
        assert not list(tmp_path.rglob("*token*"))
        join = f"import ray; ray.init('{address}', logging_level='error'); print(ray.nodes())"
        asked = [sys.executable, "-c", join]
        wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
        for stranger in ({"RAY_AUTH_MODE": "disabled"}, wrong):
            done = subprocess.run(asked, env=own | stranger, capture_output=True, text=True,
                                  timeout=120)  # fmt: skip
            assert done.returncode != 0 and "NodeID" not in done.stdout
        right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        done = subprocess.run(asked, env=own | right, capture_output=True, text=True, timeout=120)
        assert "NodeID" in done.stdout, done.stderr
    finally:
        head.communicate("\n", timeout=60)


@pytest.mark.slow
def test_a_role_is_debugged_in_the_controller_s_process(tmp_path):
    """The debugger stops at each of the role's calls, here and not in a process of Ray's."""
    keys = TINY | {
        "algorithm.name": "PPO", "placement": "split", "steps": 1, "warm_start.steps": 0,
        "cluster.processes": 2, "cluster.devices_per_process": 1,
    }  # fmt: skip
    config = write_config(tmp_path / "config.py", keys)
    stops = 2  # values, and the update
    asked = "p 'here', __import__('os').getpid(), self.role\nc\n" * stops
    command = [sys.executable, "-m", "hjax.launch", f"--config={config}", "--debug=critic",
               f"--workdir={tmp_path}/run", "--config.algorithm.minibatch=0"]  # fmt: skip
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)  # fmt: skip
    printed, _ = run.communicate(asked, timeout=240)
    assert run.returncode == 0, printed
    assert re.findall(r"\('here', (\d+), '(\w+)'\)", printed) == [(str(run.pid), "critic")] * stops


@pytest.mark.slow
def test_reward_functions_share_their_prompts_over_processes(small, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import os, pathlib\n"
        "def reward(prompts, responses, **columns):\n"
        f"    (pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}-{{len(prompts)}}').touch()\n"
        "    return [float(len(r)) for r in columns['response_tokens']]\n"
    )
    keys = {
        "cluster.address": "local", "cluster.processes": 1, "cluster.devices_per_process": 1,
        "cluster.reward_processes": 3, "steps": 1, "warm_start.steps": 0,
        "reward.function": f"{tmp_path}/judge.py:reward",
    }  # fmt: skip
    with contextlib.closing(hjax.Trainer(tiny_config("GRPO", keys))) as trainer:
        pids = trainer.roles.pools["host"].executor.pids()
        trainer.run()
    judged = [file.name.split("-") for file in tmp_path.glob("*-*")]
    # 8 prompts of 2 samples; those of a prompt stay together.
    assert sorted(int(pid) for pid, _ in judged) == sorted(pids)
    assert sorted(int(rows) for _, rows in judged) == [4, 6, 6]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_object_store_that_runs_full_goes_on_disk(tmp_path):
    """More than twice what the store holds is on its way between two pools."""
    program = (
        "import sys; sys.path[:0] = ['tests', 'tests/extended']\n"
        "import pathlib\n"
        "from test_ray_executor import Small\n"
        "from hjax.controller import ray_calls\n"
        "ray_calls.start_local_cluster(6)\n"
        f"small = Small(pathlib.Path({str(tmp_path)!r}))\n"
        "made = [small.one.make(40_000_000) for _ in range(5)]\n"
        "print([small.other.total(batch).result()['sum'] for batch in made])\n"
        "print([small.other.total(batch).result()['sum'] for batch in made])\n"
        "small.cluster.close(); ray_calls.end_here()\n"
    )
    own = {"RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES": str(80 << 20)}
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | own, text=True,
                          capture_output=True, timeout=240)  # fmt: skip
    assert done.returncode == 0, done.stderr
    each = int(np.arange(256).sum()) * (40_000_000 // 256)
    assert done.stdout.splitlines()[-2:] == [str([each] * 5)] * 2
