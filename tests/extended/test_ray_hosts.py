"""Pools on a Ray cluster of several hosts: each where its plan says; a host that is lost.

Hosts are Ray nodes of this machine, with labels and a number of CPUs of their own.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types

import pytest
from helpers import TINY, computed, read_rows, tiny_config, write_config

import hjax
from hjax.controller.hosts import SLICE_LABEL
from hjax.devices import Device
from hjax.errors import ConfigError, RunError
from hjax.machine import descendants
from hjax.planning.constants import Constants
from hjax.planning.profile import Profile

ray = pytest.importorskip("ray")

RACKS = ("a", "b")  # a host each


@pytest.fixture(scope="module")
def racks():
    """Address of a cluster of two hosts, each of which has a rack and a slice."""
    from ray.cluster_utils import Cluster

    def host(rack):
        labels = {"rack": rack, SLICE_LABEL: f"slice-{rack}"}
        return {"num_cpus": 2, "labels": labels, "node_ip_address": "127.0.0.10"}

    first, *others = map(host, RACKS)
    cluster = Cluster(initialize_head=True, head_node_args=first | {"include_dashboard": False})
    try:
        for other in others:
            cluster.add_node(**other)
        ray.init(cluster.address, logging_level="error", log_to_driver=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()


def keys(address, **changes):
    return {
        "cluster.address": address,
        "cluster.processes": 2,
        "cluster.devices_per_process": 2,
        "cluster.colocation_label": "rack",
        "steps": 1,
        "algorithm.kl_coef": 0.0,
    } | changes


def racks_of(trainer):
    """By set the racks of its processes, as Ray says where they run."""
    labels = {node["NodeID"]: node["Labels"]["rack"] for node in ray.nodes()}
    found = {}
    for roles in trainer.roles.plan.placement:
        handles = trainer.roles.pools[roles[0]].executor.handles()
        found[roles] = [labels[handle.node] for handle in handles]
    return found


def test_auto_plans_for_the_racks_that_there_are_and_its_sets_stand_there(racks, monkeypatch):
    # Devices with cores of their own, on which sets that work at the same time pay off.
    device = Device("cpu", 2.0**40, {"float32": 1e10}, 1e10, 1e10, 1e10, 1, 0, "test")
    values = {"decode_row": 0.0, "decode_step": 0.0, "link_latency": 0.0, "network_latency": 0.0}
    known = Profile(device, Constants().with_values(values), {})
    monkeypatch.setattr("hjax.planning.auto.find_profile", lambda *_: known)
    config = tiny_config("PPO", keys(racks, placement="auto"))
    plan = hjax.plan(config)
    assert plan.allocation == (2, 2)
    assert sorted(labels["rack"] for labels in plan.where) == ["a", "b"]
    with contextlib.closing(hjax.Trainer(config, plan=plan)) as trainer:
        assert len(trainer.run()) == 1
        assert list(racks_of(trainer).values()) == [[labels["rack"]] for labels in plan.where]
        assert trainer.plan_record()["where"] == list(plan.where)


def test_processes_that_can_never_fit_are_said_at_once_and_at_the_end(racks, monkeypatch):
    monkeypatch.setattr("hjax.controller.ray_pool.START_SECONDS", 2)
    lines = []
    display = types.SimpleNamespace(message=lines.append)
    changes = {"cluster.processes": 8, "cluster.colocation_label": "none"}
    config = tiny_config("GRPO", keys(racks, **changes, **{"cluster.devices_per_process": 1}))
    said = (
        "cluster.processes=8 and cluster.reward_processes=1 need 9 CPUs; the cluster has 4 on 2 "
        "machines: lower cluster.processes, or wait for machines with `node.sh wait`"
    )
    with pytest.raises(RunError, match=f"no room for 8 processes .*; {re.escape(said)}$"):
        hjax.Trainer(config, display=display)
    assert lines[0] == f"warning (cluster too small): {said}"


@pytest.mark.slow
@pytest.mark.parametrize("critic, actor", [("a", "b"), ("b", "a")])
def test_a_plan_of_ones_own_says_where_its_sets_stand(critic, actor, racks, tmp_path):
    file = tmp_path / "plan.json"
    plan = {
        "placement": [["critic"], ["actor", "reference"]], "allocation": [1, 1],
        "where": [{"rack": critic}, {"rack": actor, SLICE_LABEL: f"slice-{actor}"}],
    }  # fmt: skip
    file.write_text(json.dumps(plan))
    changes = {
        "placement": str(file), "cluster.colocation_label": "none",
        "cluster.devices_per_process": 1,
    }  # fmt: skip
    config = tiny_config("PPO", keys(racks, **changes))
    with contextlib.closing(hjax.Trainer(config)) as trainer:
        assert list(racks_of(trainer).values()) == [[critic], [actor]]
    file.write_text(json.dumps(plan | {"where": [{"rack": "z"}, {}]}))
    with pytest.raises(ConfigError, match=r"hosts with rack=z, which none has;.* rack=a, rack=b"):
        hjax.Trainer(config)


@pytest.mark.slow
def test_gpus_that_jax_does_not_find_are_named(racks, monkeypatch):
    """Ray is told of a GPU that is not there: the plan asks JAX on that host."""
    from hjax.controller import ray_hosts

    monkeypatch.setattr("hjax.controller.ray_calls.platform", lambda: "gpu")
    nodes = ray.nodes()
    for node in nodes:
        node["Resources"]["GPU"] = 1.0
    monkeypatch.setattr("hjax.controller.ray_calls.nodes", lambda: nodes)
    ask = ray_hosts.ray_calls.run_on_host
    monkeypatch.setattr(
        "hjax.controller.ray_calls.run_on_host",
        lambda address, function, takes: ask(address, function, {}),
    )
    with pytest.raises(ConfigError, match=r"host 127.0.0.10 has GPUs, but JAX there finds 'cpu'"):
        ray_hosts.discover_hosts(racks, 3, 0, "none")


# Hosts as docs/cluster.md starts them, one of which is lost with all that runs on it.

linux = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.3 is an address on Linux only")
NODE = pathlib.Path(hjax.__file__).parent / "launch" / "cluster" / "node.sh"
FIRST = 7379  # ports; other tests start hosts at 6379


class Cluster:
    """Hosts at 127.0.0.11 and on, each by node.sh; a run of the command on them."""

    def __init__(self, folder):
        self.folder = folder
        self.short = pathlib.Path(tempfile.mkdtemp(prefix="hjax-", dir="/tmp"))  # for sockets
        bins = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": bins, "RAY_AUTH_TOKEN_PATH": str(self.short / "token"),
               "RAY_AUTH_MODE": "token"}  # fmt: skip
        self.environment = {k: v for k, v in os.environ.items() if k != "RAY_AUTH_TOKEN"} | own
        self.hosts = {}
        self.command = None
        subprocess.run(["bash", NODE, "token"], env=self.environment, check=True, timeout=60,
                       stdout=subprocess.DEVNULL)  # fmt: skip

    @property
    def address(self):
        return f"127.0.0.11:{FIRST}"

    def start(self, number, cpus, **labels):
        """A host; number 0 is the head."""
        ports = {"HJAX_FIRST_PORT": f"{FIRST + 100 * number}",
                 "HJAX_FIRST_WORKER_PORT": f"{12002 + 1000 * number}"}  # fmt: skip
        role = ["worker", f"127.0.0.{11 + number}", self.address] if number else [
            "head", "127.0.0.11"]  # fmt: skip
        told = ",".join(f"{key}={value}" for key, value in labels.items())
        with open(self.short / f"{number}.log", "w") as log:
            self.hosts[number] = subprocess.Popen(
                ["bash", NODE, *role, "--block", f"--num-cpus={cpus}",
                 f"--temp-dir={self.short}/{number}", *([f"--labels={told}"] if told else [])],
                env=self.environment | ports, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait(self, hosts):
        """Until so many have joined."""
        subprocess.run(["bash", NODE, "wait", self.address, str(hosts)], check=True,
                       env=self.environment, stdout=subprocess.DEVNULL, timeout=120)  # fmt: skip

    def lose(self, number):
        """A host with all its processes, at once."""
        host = self.hosts.pop(number)
        pids = [*descendants(host.pid), host.pid]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        host.wait(30)

    def run(self, name, **changes):
        """Start the command; its workdir."""
        workdir = self.folder / name
        own = TINY | {"display.enabled": True, "cluster.address": self.address} | changes
        config = write_config(self.folder / f"{name}.py", own)
        self.printed = self.folder / f"{name}.txt"
        with open(self.printed, "w") as printed:
            self.command = subprocess.Popen(
                [sys.executable, "-m", "hjax.launch", f"--config={config}", f"--workdir={workdir}"],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=printed,
                stderr=subprocess.STDOUT, text=True, start_new_session=True,
            )  # fmt: skip
        return workdir

    def said(self):
        return self.printed.read_text()

    def until(self, there, seconds=150):
        """Wait for something of the command's."""
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end and self.command.poll() is None, self.said()
            time.sleep(0.1)

    def close(self):
        if self.command is not None and self.command.poll() is None:
            for pid in (*descendants(self.command.pid), self.command.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for number in list(self.hosts):
            self.lose(number)
        shutil.rmtree(self.short, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path):
    with contextlib.closing(Cluster(tmp_path)) as made:
        yield made


def rows_of(workdir):
    there = (workdir / "metrics.jsonl").exists()
    return [computed(row) for row in read_rows(workdir)] if there else []


@linux
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_host_is_waited_for_and_the_run_ends_as_if_it_had_stayed(cluster):
    # One process of the pool on each host; without the second there is no room for both.
    cluster.start(0, cpus=2)
    cluster.wait(1)
    cluster.start(1, cpus=1)
    cluster.wait(2)
    changes = {
        "steps": 20, "warm_start.steps": 1, "checkpoint.every": 5, "cluster.processes": 2,
        "cluster.devices_per_process": 1, "cluster.heartbeat_seconds": 6.0,
    }  # fmt: skip
    undisturbed = cluster.run("undisturbed", **changes)
    assert cluster.command.wait(240) == 0, cluster.said()
    workdir = cluster.run("lost", **changes)
    cluster.until(lambda: len(rows_of(workdir)) >= 7)
    cluster.lose(1)
    begun = time.monotonic()
    cluster.until(lambda: "is replaced (1 of" in cluster.said(), 60)
    assert time.monotonic() - begun < 45
    taken = len(rows_of(workdir))
    time.sleep(3)
    assert cluster.command.poll() is None and len(rows_of(workdir)) <= taken  # it waits
    cluster.start(2, cpus=1)
    assert cluster.command.wait(240) == 0, cluster.said()
    assert "Traceback" not in cluster.said()
    assert rows_of(workdir) == rows_of(undisturbed)
    addresses = {log.read_text().rpartition("127.0.0.")[2].split()[0]
                 for log in (workdir / "logs").glob("all-*.log")}  # fmt: skip
    assert addresses == {"11", "13"}  # the last that each rank said is where it ended


@linux
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rollout_that_lost_a_host_goes_on_with_the_other_and_takes_a_new_one(cluster):
    cluster.start(0, cpus=3, rack="a")
    cluster.wait(1)
    cluster.start(1, cpus=1, rack="b")
    cluster.wait(2)
    plan = {"placement": [["actor", "critic", "reference"], ["rollout"]], "allocation": [1, 2],
            "where": [{"rack": "a"}, {}]}  # fmt: skip
    file = cluster.folder / "plan.json"
    file.write_text(json.dumps(plan))
    workdir = cluster.run(
        "ahead", placement=str(file), **{
            "steps": 100000, "warm_start.steps": 0, "rollout.max_staleness": 1,
            "cluster.processes": 3, "cluster.devices_per_process": 1,
            "cluster.heartbeat_seconds": 6.0,
        },
    )  # fmt: skip
    cluster.until(lambda: len(rows_of(workdir)) >= 3)
    cluster.lose(1)
    cluster.until(lambda: "rollout goes on with 1 of 2 processes until" in cluster.said(), 90)
    steps = len(rows_of(workdir))
    cluster.until(lambda: len(rows_of(workdir)) >= steps + 5)
    cluster.start(2, cpus=1, rack="b")
    cluster.until(lambda: "rollout goes on with 2 of 2 processes" in cluster.said(), 120)
    steps = len(rows_of(workdir))
    cluster.until(lambda: len(rows_of(workdir)) >= steps + 5)
    cluster.command.send_signal(signal.SIGTERM)
    assert cluster.command.wait(120) == 143, cluster.said()
    rows = rows_of(workdir)
    # Nothing was taken again: learning went on from its weights.
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert "initialise" not in cluster.said().partition("is replaced")[2]
