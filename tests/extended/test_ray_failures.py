"""Processes of a cluster die, hang or are lost in each phase, and the run ends as if none had.

Undisturbed and struck runs have the same metrics, bit for bit, wherever the strike came. The slow
tests are the full table; some strike Ray's own processes and the command.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

import pytest
from helpers import TINY, computed, read_rows, tiny_config, write_config
from strikes import Strike, striking
from traces import listening, segments, sockets

import hjax
from hjax.controller import ResourcePool, Timeline, WorkerGroup, ray_calls
from hjax.controller.ray_cluster import RayCluster
from hjax.controller.ray_executor import RayExecutor
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.machine import descendants, process_name, process_state
from hjax.user_code import load_object
from hjax.workers import WorkerContext

ray = pytest.importorskip("ray")

PPO = {
    "steps": 3,
    "warm_start.steps": 2,
    "algorithm.minibatch": 8,
    "checkpoint.every": 2,
    "placement": "split",
    "cluster.address": "local",
    "cluster.processes": 2,
    "cluster.devices_per_process": 1,
    "cluster.heartbeat_seconds": 4.0,
}
# The actor's pool is a world of two processes.
WORLD = PPO | {"cluster.processes": 4}
AHEAD = PPO | {
    "placement": "disaggregate",
    "cluster.processes": 3,
    "rollout.max_staleness": 1,
    "rollout.deterministic": True,
}
GRPO = PPO | {"placement": "colocate", "cluster.processes": 1, "warm_start.steps": 0}
RUNS = {"ppo": ("PPO", PPO), "world": ("PPO", WORLD), "ahead": ("PPO", AHEAD),
        "grpo": ("GRPO", GRPO)}  # fmt: skip


@pytest.fixture(scope="module")
def cluster():
    """A Ray of this module's own, which trainers find and use."""
    with contextlib.ExitStack() as ends:
        if not ray.is_initialized():
            ray_calls.start_local_cluster(8)
            ends.callback(ray_calls.end_here)
        yield


class Said:
    """A display that keeps what it is told."""

    def __init__(self):
        self.texts = []

    def message(self, text):
        self.texts.append(text)

    @contextlib.contextmanager
    def phase(self, name):
        yield

    def __getattr__(self, name):
        return lambda *arguments, **options: None


def train(kind, workdir, *strikes, **changes):
    """The rows of a run that is struck, what was said, and the trainer."""
    algorithm, keys = RUNS[kind]
    said = Said()
    with striking(*strikes) as left:
        trainer = hjax.Trainer(tiny_config(algorithm, keys | changes), workdir, said)
        try:
            trainer.run()
        finally:
            trainer.close()
        assert not left, "a strike never came"
    return [computed(row) for row in read_rows(workdir)], said.texts, trainer


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """Rows of a run that was left alone, by its kind."""
    known = {}

    def rows(kind):
        if kind not in known:
            known[kind], texts, _ = train(kind, tmp_path_factory.mktemp(kind) / "run")
            assert not [text for text in texts if "replaced" in text]
        return known[kind]

    return rows


def check(kind, tmp_path, undisturbed, *strikes):
    rows, texts, trainer = train(kind, tmp_path / "run", *strikes)
    assert rows == undisturbed(kind)
    told = [text for text in texts if "is replaced" in text]
    assert 1 <= trainer.restarts <= len(strikes) and len(told) == trainer.restarts
    pools = "|".join(re.escape(strike.pool) for strike in strikes)
    stopped = any(strike.sent == signal.SIGSTOP for strike in strikes)
    how = "has given no sign of life for" if stopped else "died"
    for text in told:
        assert re.match(rf"process ({pools})\S*:\d+ \(pid \d+ on .*\) {how}", text), text
    return texts


EVERYDAY = {
    "the actor, while it generates": ("grpo", Strike("actor.generate_sequences", 2, "all")),
}
TABLE = {
    # Each kind of process, in each phase.
    "actor 0, generate": ("world", Strike("actor.generate_sequences", 2, "actor", 0)),
    "actor 1, generate": ("world", Strike("actor.generate_sequences", 3, "actor", 1)),
    "actor 1, prepare": ("world", Strike("reference.compute_ref_log_prob", 2, "actor", 1)),
    "actor 0, update": ("world", Strike("actor.update_actor", 5, "actor", 0)),
    "actor 1, update, in it": ("world", Strike("actor.update_actor", 5, "actor", 1, after=0.02)),
    "actor 0, checkpoint": ("world", Strike("actor.save_state", 2, "actor", 0)),
    "actor 1, checkpoint, in it": ("world", Strike("actor.save_state", 2, "actor", 1, after=0.1)),
    "actor 0, initialise": ("world", Strike("actor.initialize", 1, "actor", 0)),
    "actor 1, warm start": ("world", Strike("actor.update_actor", 2, "actor", 1)),
    "actor 1, joining": ("world", Strike("joining", 1, "actor", 1)),
    "actor 0, joining": ("world", Strike("joining", 1, "actor", 0)),
    "critic, generate": ("ppo", Strike("actor.generate_sequences", 2, "critic")),
    "critic, prepare": ("ppo", Strike("critic.compute_values", 2, "critic")),
    "critic, update": ("ppo", Strike("critic.update_critic", 4, "critic")),
    "critic, checkpoint": ("ppo", Strike("critic.save_state", 2, "critic")),
    "critic, the last checkpoint": ("ppo", Strike("critic.save_state", 3, "critic")),
    "critic, initialise": ("ppo", Strike("actor.initialize", 1, "critic")),
    "critic, joining": ("ppo", Strike("joining", 1, "critic")),
    "reward, generate": ("ppo", Strike("actor.generate_sequences", 2, "host")),
    "reward, prepare": ("ppo", Strike("reward.compute_reward", 2, "host")),
    "reward, in its call": ("grpo", Strike("reward.compute_reward", 2, "host")),
    "reward, update": ("ppo", Strike("actor.update_actor", 5, "host")),
    "reward, checkpoint": ("ppo", Strike("critic.save_state", 2, "host")),
    "reward, initialise": ("ppo", Strike("actor.initialize", 1, "host")),
    # A process that hangs.
    "actor 0 stopped, generate": (
        "world", Strike("actor.generate_sequences", 2, "actor", 0, signal.SIGSTOP)),
    "actor 1 stopped, joining": ("world", Strike("joining", 1, "actor", 1, signal.SIGSTOP)),
    "critic stopped, update": (
        "ppo", Strike("critic.update_critic", 4, "critic", 0, signal.SIGSTOP)),
    "reward stopped": ("ppo", Strike("reward.compute_reward", 2, "host", 0, signal.SIGSTOP)),
    # Several in one run.
    "three": (
        "ppo",
        Strike("critic.update_critic", 4, "critic"),
        Strike("reward.compute_reward", 4, "host"),
        Strike("actor.save_state", 3, "actor"),
    ),
    "two at once": (
        "ppo",
        Strike("critic.update_critic", 4, "critic"),
        Strike("critic.update_critic", 4, "actor"),
    ),
    # Generation ahead of learning, of which the schedule makes the same in each run.
    "ahead: the rollout": ("ahead", Strike("rollout.generate_sequences", 2, "rollout")),
    "ahead: the rollout, taking weights": (
        "ahead", Strike("rollout.receive_weights", 2, "rollout")),
    "ahead: the actor, publishing": ("ahead", Strike("actor.publish", 2, "actor")),
    "ahead: the actor, update": ("ahead", Strike("actor.update_actor", 5, "actor")),
    "ahead: the rollout stopped": (
        "ahead", Strike("rollout.generate_sequences", 2, "rollout", 0, signal.SIGSTOP)),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYDAY)
def test_a_struck_run_ends_as_if_it_had_been_left_alone(name, tmp_path, undisturbed):
    kind, *strikes = EVERYDAY[name]
    check(kind, tmp_path, undisturbed, *strikes)


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first also makes the run that nobody strikes, and compiles
@pytest.mark.parametrize("name", TABLE)
def test_the_table(name, tmp_path, undisturbed):
    kind, *strikes = TABLE[name]
    check(kind, tmp_path, undisturbed, *strikes)


# Strikes that come within a program and not before or after it, for one process and for all of a
# pool's.
WITHIN = {
    "actor 1, generate": ("actor.generate_sequences", 2, [1]),
    "the actors' pool, generate": ("actor.generate_sequences", 2, [0, 1]),
    "actor 1, update": ("actor.update_actor", 5, [1]),
    "the actors' pool, update": ("actor.update_actor", 5, [0, 1]),
}
# Programs that take long enough to be hit.
LONG = WORLD | {"model.layers": 4, "model.hidden_size": 128, "rollout.max_response_length": 64}
RUNS["long"] = ("PPO", LONG)


@pytest.fixture(scope="module")
def long_run(cluster, tmp_path_factory):
    """Rows and timeline of a run that was left alone."""
    rows, _, trainer = train("long", tmp_path_factory.mktemp("long") / "run")
    return rows, trainer.timeline


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WITHIN)
def test_a_kill_within_a_program_changes_no_number(name, tmp_path, long_run):
    call, nth, ranks = WITHIN[name]
    rows, timeline = long_run
    for attempt in range(4):
        # The call's shortest time: what is struck in its middle would have gone on.
        spans = [s.end - s.start for s in timeline.spans() if s.method == call.split(".")[1]]
        middle = min(spans) / 2
        strikes = [Strike(call, nth, "actor", rank, after=middle) for rank in ranks]
        found, _, trainer = train("long", tmp_path / f"run{attempt}", *strikes)
        assert found == rows
        timeline = trainer.timeline
        if all(s.pending and middle / 2 < s.waited < 2 * middle for s in strikes):
            assert trainer.restarts == 1
            return
    pytest.fail(f"no strike hit: {strikes}, the shortest took {2 * middle}")


# Nothing decides beforehand which weights generate what, so a rollout can go on with fewer.
ELASTIC = AHEAD | {
    "cluster.processes": 4,  # two of them generate
    "rollout.deterministic": False,
    "checkpoint.every": 0,
    "eval.every": 3,
}


class Watched(Said):
    """Keeps the names of the phases too."""

    def __init__(self):
        super().__init__()
        self.phases = []

    @contextlib.contextmanager
    def phase(self, name):
        self.phases.append(name)
        yield


@contextlib.contextmanager
def elastic(**changes):
    """A trainer that collects ahead, and what it says."""
    said = Watched()
    trainer = hjax.Trainer(tiny_config("PPO", ELASTIC | changes), None, said)
    try:
        yield trainer, said
    finally:
        trainer.close()


@pytest.mark.parametrize("call, nth", [
    ("rollout.generate_sequences", 3),
    pytest.param("actor.update_actor", 5, marks=pytest.mark.slow),
    pytest.param("rollout.receive_weights", 2, marks=pytest.mark.slow),
    pytest.param("evaluated", 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_learning_goes_on_while_a_rollout_is_replaced(call, nth, cluster):
    changes = {"steps": 6}
    if call == "evaluated":  # nothing else generates so often
        call, nth, changes = "rollout.generate_sequences", 4, {"steps": 6, "eval.every": 1}
    with striking(Strike(call, nth, "rollout", 1)) as left, elastic(**changes) as (trainer, said):
        rows = trainer.run()
        assert not left
        check_nothing_was_redone(trainer, said, rows)


def check_nothing_was_redone(trainer, said, rows):
    """Six steps, each once, by the weights that were there."""
    assert trainer.restarts == 1
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in trainer.history] == [1, 2, 3, 4, 5, 6]
    assert said.phases.count("initialise") == 1 and "restore" not in said.phases
    assert trainer.roles.pools["actor"].executor.starts == 1
    assert trainer.roles.pools["rollout"].executor.starts == 2
    assert "rollout goes on with 2 of 2 processes" in said.texts
    # Every prompt's turn came once: what was lost on its way was drawn again.
    assert trainer.prompts.position >= 6 * 8
    assert max(row["rollout/staleness"] for row in rows) <= 1


@pytest.mark.slow
def test_a_rollout_that_is_lost_while_its_machine_is_asked(cluster, monkeypatch):
    # After the updates, before the step's row: nothing of the step may be lost with it.
    asked, ask = [], RayExecutor.machine

    def struck(executor):
        if executor.name == "rollout":
            asked.append(executor)
            if len(asked) == 3:
                os.kill(executor.pids()[1], signal.SIGKILL)
        return ask(executor)

    monkeypatch.setattr(RayExecutor, "machine", struck)
    with elastic(steps=6) as (trainer, said):
        check_nothing_was_redone(trainer, said, trainer.run())
        assert len(asked) > 3


@pytest.mark.slow
def test_a_rollout_goes_on_with_fewer_processes_and_takes_new_ones_in(cluster):
    @ray.remote(num_cpus=1)
    class Guest:
        def here(self):
            return True

    with elastic(steps=400, **{"eval.every": 0}) as (trainer, said):
        executor = trainer.roles.pools["rollout"].executor
        trainer.run(3)
        # Guests take all the room there is, and the next one what becomes free.
        free = int(ray.available_resources().get("CPU", 0))
        guests = [Guest.remote() for _ in range(free + 1)]
        ray.get([guest.here.remote() for guest in guests[:free]])
        os.kill(executor.pids()[1], signal.SIGKILL)
        rows = trainer.run(4)
        assert [row["step"] for row in rows] == [4, 5, 6, 7]
        assert executor.processes == 1
        fewer = "rollout goes on with 1 of 2 processes until there is room for more"
        assert fewer in said.texts
        mask = trainer.batch["response_mask"]
        assert trainer.batch["versions"][mask].min() >= 5
        for guest in guests:
            ray.kill(guest)
        until = time.monotonic() + 60
        while executor.processes == 1:
            assert time.monotonic() < until
            trainer.step()
        trainer.run(2)
        assert "rollout goes on with 2 of 2 processes" in said.texts
        assert trainer.restarts == 1 and trainer.roles.pools["actor"].executor.starts == 1
        assert [row["step"] for row in trainer.history] == [*range(1, trainer.step_number + 1)]


@pytest.mark.slow
def test_a_call_that_never_ends_is_noticed_though_its_process_answers(tmp_path, cluster):
    (tmp_path / "stuck.py").write_text(
        "import hjax, time\n"
        "class Stuck(hjax.workers.Reference):\n"
        "    @hjax.protocol('3D_PROTO')\n"
        "    def compute_ref_log_prob(self, batch):\n"
        "        time.sleep(1000)\n"
        "class Hangs(hjax.algorithms.GRPO):\n"
        "    workers = {'reference': Stuck}\n"
    )
    keys = GRPO | {"cluster.call_seconds": 15.0, "cluster.max_restarts": 0}
    config = tiny_config(f"{tmp_path}/stuck.py:Hangs", keys)
    trainer = hjax.Trainer(config, tmp_path / "run", Said())
    try:
        with pytest.raises(RunError, match=r"all:0 .* has run reference.* for 15 seconds"):
            trainer.run()
    finally:
        trainer.close()


def test_after_so_many_restarts_it_stops_with_the_cause(tmp_path, cluster):
    strike = Strike("reward.compute_reward", 1, "host")
    with pytest.raises(RunError, match=r"replaced 0 times .*max_restarts.* process host:0 .* died"):
        train("grpo", tmp_path / "run", strike, **{"cluster.max_restarts": 0})


SLEEPER = """
import os, time
import hjax

class Sleeper(hjax.workers.Worker):
    @hjax.protocol("ALL_TO_ALL")
    def until(self, path, before=None):
        open(f"{path}-begun-{os.getpid()}", "w").close()
        while not os.path.exists(path):
            time.sleep(0.1)
        return {"there": path}
"""


@contextlib.contextmanager
def two_pools(folder, heartbeat_seconds):
    """A cluster of pools ``long`` and ``short`` of two processes each; what it says."""
    (folder / "sleeper.py").write_text(SLEEPER)
    worker = load_object(f"{folder}/sleeper.py:Sleeper", "worker")
    said = []
    cluster = RayCluster(
        "local", 1, 1, host_processes=2, heartbeat_seconds=heartbeat_seconds, say=said.append
    )
    try:
        pools = [ResourcePool(name, (), Timeline(), cluster.executor) for name in ("long", "short")]
        groups = [WorkerGroup(pool, worker, WorkerContext(pool.name)) for pool in pools]
        for group in groups:
            group.built.result()
        yield cluster, *groups, said
    finally:
        cluster.close()


def test_a_loss_is_told_at_once_while_a_long_call_goes_on_elsewhere(tmp_path, cluster):
    now, later, never = str(tmp_path), f"{tmp_path}/later", f"{tmp_path}/never"
    with two_pools(tmp_path, heartbeat_seconds=60.0) as (cluster, long, short, said):
        under_way = long.until(later)
        behind = long.until(now, before=short.until(never))  # it takes what will not come
        executor = short.pool.executor
        os.kill(executor.pids()[1], signal.SIGKILL)
        begun = time.monotonic()
        while not said:
            assert time.monotonic() - begun < 10
            time.sleep(0.05)
        assert re.match(r"process short:1 \(pid \d+ on .*\) died", said[0])
        assert cluster.lost() == [executor]
        executor.restart()
        short.rebuild()
        assert short.until(now).result() == {"there": now}
        # The long call still goes on, and ends well; what was behind it fails alone.
        assert not under_way.done()
        pathlib.Path(later).touch()
        assert under_way.result() == {"there": later}
        with pytest.raises(ProcessLost, match="what another process made was lost with it"):
            behind.result()
        assert long.until(now).result() == {"there": now}
        assert cluster.lost() == [] and len(said) == 1


@pytest.mark.slow
def test_who_may_wait_in_vain_for_what_was_lost_counts_as_lost_too(tmp_path, cluster):
    with two_pools(tmp_path, heartbeat_seconds=3.0) as (cluster, long, short, said):
        made = short.until(str(tmp_path))
        made.result()
        stuck = long.until(f"{tmp_path}/never", before=made)
        until = time.monotonic() + 30
        while len(list(tmp_path.glob("never-begun-*"))) < 2:  # both have what was made
            assert time.monotonic() < until
            time.sleep(0.1)
        os.kill(short.pool.executor.pids()[0], signal.SIGKILL)
        with pytest.raises(ProcessLost, match="pool long waits for results lost with pool short"):
            stuck.result(60)
        assert set(cluster.lost()) == {long.pool.executor, short.pool.executor}


# The command, with a Ray of its own. So many steps that they take longer than a heartbeat.
LONGER = {"steps": 60, "checkpoint.every": 20}


class Command:
    """A run of the command that is struck from outside."""

    def __init__(self, folder, **changes):
        self.workdir = folder / "run"
        keys = TINY | PPO | {"algorithm.name": "PPO", "display.enabled": True} | changes
        config = write_config(folder / "config.py", keys)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hjax.launch", f"--config={config}",
             f"--workdir={self.workdir}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.others, self.ports, self.memory = set(), set(), set()

    def wait_for(self, there):
        """Until something is there; notes on the way which processes are this run's."""
        until = time.monotonic() + 180
        while not there(self):
            assert time.monotonic() < until and self.process.poll() is None, self.end()
            self.others |= set(descendants(self.process.pid))
            time.sleep(0.02)
        self.others |= set(descendants(self.process.pid))
        self.ports |= set(sockets(self.others))
        self.memory |= segments(self.others)

    def rows(self):
        """Of metrics.jsonl."""
        there = (self.workdir / "metrics.jsonl").exists()
        return [computed(row) for row in read_rows(self.workdir)] if there else []

    def end(self):
        """Its status and what it printed; none of its processes may outlast it by much, and nothing
        that they held."""
        try:
            printed, _ = self.process.communicate(timeout=180)
        finally:
            for pid in [self.process.pid] if self.process.poll() is None else []:
                for each in (*descendants(pid), pid):
                    os.kill(each, signal.SIGKILL)
        until = time.monotonic() + 15
        while left := [
            process_name(pid) for pid in self.others if process_state(pid) not in ("", "Z")
        ]:
            assert time.monotonic() < until, left
            time.sleep(0.1)
        # A process counts as gone while threads of it may still be closing what they had.
        while self.ports & set(listening()):
            assert time.monotonic() < until, self.ports & set(listening())
            time.sleep(0.1)
        assert not [path for path in self.memory if os.path.exists(path)]
        if self.process.returncode != -signal.SIGKILL:
            assert not [path for path in folders() if f"-{self.process.pid}-" in path.name]
        return self.process.returncode, printed


def ray_starts(command):
    """Its first server is there, and no process of the run's."""
    return any(process_name(pid) == "gcs_server" for pid in descendants(command.process.pid))


def workers_start(command):
    """Ray runs, and starts the first of the run's processes."""
    return any("RayProcess" in process_name(pid) for pid in descendants(command.process.pid))


def steps_are_taken(command):
    """So many that some are behind the last checkpoint."""
    return len(command.rows()) >= 3


def a_checkpoint_is_written(command):
    """One after the first step, not there yet."""
    return any(command.workdir.glob("checkpoints/.[2-9].saving"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Rows of a command that nobody struck."""
    command = Command(tmp_path_factory.mktemp("alone"), **LONGER)
    assert command.end()[0] == 0
    return command.rows()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("server", ["gcs_server", "raylet"])
def test_ray_itself_is_started_again(server, sent, tmp_path, alone):
    command = Command(tmp_path, **LONGER)
    command.wait_for(lambda command: command.rows())
    [pid] = [p for p in descendants(command.process.pid) if process_name(p) == server]
    os.kill(pid, sent)
    status, printed = command.end()
    assert status == 0, printed
    assert f"Ray's {server} (pid {pid} on this machine)" in printed
    assert command.rows() == alone
    assert "Traceback" not in printed and "(raylet)" not in printed


@pytest.mark.timeout(400)  # of a machine that does other things too
@pytest.mark.parametrize("agent", ["ray::DashboardA", "ray::RuntimeEnv"])
def test_a_killed_agent_of_ray_s_is_one_restart_and_leaves_no_folder(agent, tmp_path):
    command = Command(tmp_path, **LONGER)  # it is not over before the agent is found
    command.wait_for(lambda command: command.rows())
    [pid] = [p for p in descendants(command.process.pid) if process_name(p) == agent]
    # Its folder, and that nobody else reaches what listens there.
    kept = [path for path in folders() if f"-{command.process.pid}-" in path.name]
    assert len(kept) == 1
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")
    processes = [command.process.pid, *descendants(command.process.pid)]
    held = sockets(processes)
    assert len(held) > 4 and set(held.values()) <= set(loopback)
    os.kill(pid, signal.SIGKILL)
    status, printed = command.end()
    assert status == 0, printed
    assert [row["step"] for row in command.rows()] == list(range(1, LONGER["steps"] + 1))
    assert printed.count("it is replaced (") == 1 and "(1 of at most" in printed, printed
    # The agent or its node's raylet, which ends with it: whichever is seen first.
    assert "agent (pid" in printed or "raylet (pid" in printed, printed
    assert "Traceback" not in printed
    assert not kept[0].exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_removed_folder_of_ray_s_is_noticed_when_a_process_is_to_be_replaced(tmp_path):
    command = Command(tmp_path, steps=8, **{"checkpoint.every": 0})
    command.wait_for(lambda command: command.rows())
    [folder] = [path for path in folders() if f"-{command.process.pid}-" in path.name]
    shutil.rmtree(folder)
    [pid, *_] = [p for p in descendants(command.process.pid) if "RayProcess" in process_name(p)]
    os.kill(pid, signal.SIGKILL)
    status, printed = command.end()
    assert status == 0, printed
    assert f"Ray's folder {folder} was removed, so no process can be replaced" in printed
    assert [row["step"] for row in command.rows()] == list(range(1, 9))
    assert printed.count("it is replaced (") <= 2 and "Traceback" not in printed, printed


def folders():
    """Of local clusters of Ray."""
    return list(ray_calls._folder_of_clusters().glob("hjax-ray-*"))


@pytest.fixture
def no_ray(monkeypatch):
    """A short temporary directory for the folders of clusters, in which no Ray starts."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setenv("RAY_TMPDIR", parent)
        monkeypatch.setattr(ray_calls.ray, "init", lambda *arguments, **options: None)
        monkeypatch.setattr(ray_calls.ray, "shutdown", lambda: None)
        # Not those of the module's cluster.
        monkeypatch.setattr(ray_calls, "TEMPORARY_FOLDERS", {})
        monkeypatch.setattr(ray_calls, "SERVER_NAMES", ())
        yield pathlib.Path(parent)
        ray_calls.end_here()


def test_a_killed_process_s_folder_goes_when_the_next_cluster_starts(no_ray, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left, first, other = (no_ray / f"hjax-ray-{pid}-test" for pid in (gone.pid, 1, "x"))
    for folder in (left, first, other):
        folder.mkdir()
    ray_calls.start_local_cluster(1)
    # The first process of all is always there.
    assert not left.exists() and first.exists() and other.exists()
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    with pytest.raises(RunError, match=r"folder cannot be made in /nowhere \(No such file"):
        ray_calls.start_local_cluster(1)


def test_folders_of_another_container_or_user_stay(no_ray):
    # Containers that share a directory count processes anew: a number that nobody has here may be
    # a running process's there, and this process's number another's.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    there, same = (no_ray / f"hjax-ray-{pid}-test" for pid in (gone.pid, os.getpid()))
    for folder in (there, same):
        folder.mkdir()
    holds = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'w')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\n"
        "input()\n"
    )
    command = [sys.executable, "-c", holds, there / "lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"\n"
        begun = time.monotonic()
        ray_calls.start_local_cluster(1)
        assert len(list(no_ray.iterdir())) == 3
        ray_calls.end_here()
        assert time.monotonic() - begun < 4 and {*no_ray.iterdir()} == {there, same}
        holder.communicate(b"\n")
    ray_calls.start_local_cluster(1)
    assert not there.exists() and same.exists()


def test_a_cluster_s_folder_is_closed_to_other_users(no_ray, monkeypatch):
    opened = []

    def init(address, _temp_dir, **options):
        os.chmod(_temp_dir, 0o777)  # as Ray does, for others to use the cluster
        opened.append(pathlib.Path(_temp_dir))

    monkeypatch.setattr(ray_calls.ray, "init", init)
    ray_calls.start_local_cluster(1)
    [folder] = no_ray.iterdir()
    assert folder in opened[0].parents and stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_start_of_ray_that_fails_leaves_no_folder_and_says_what_room_there_was(
    no_ray, monkeypatch
):
    def init(*arguments, _temp_dir, **options):
        raise RuntimeError("no room\nand more")

    monkeypatch.setattr(ray_calls.ray, "init", init)
    with pytest.raises(RunError, match=rf"no room; .* in {no_ray}, where \d+ MiB are free"):
        ray_calls.start_local_cluster(1)
    assert not list(no_ray.iterdir())


def test_paths_that_ray_s_sockets_cannot_have(no_ray, monkeypatch):
    # Of the 107 bytes of a socket's path Ray takes 40 besides two numbers of the process.
    long = no_ray / ("x" * 12)
    (no_ray / "é").mkdir()
    long.mkdir()
    for path in (str(long), f"{no_ray}/é", os.path.relpath(long)):
        monkeypatch.setenv("RAY_TMPDIR", path)
        with pytest.raises(ConfigError, match=f"RAY_TMPDIR={path}: .* ASCII .* at most"):
            ray_calls.start_local_cluster(1)
    # Not asked for by that name: /tmp takes its place.
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert ray_calls._folder_of_clusters() == pathlib.Path("/tmp")


@pytest.mark.slow
def test_a_killed_controller_leaves_nothing_and_resumes(tmp_path, alone):
    command = Command(tmp_path, **LONGER)
    command.wait_for(steps_are_taken)
    command.process.kill()
    assert command.end()[0] == -signal.SIGKILL
    command = Command(tmp_path, **LONGER)
    status, printed = command.end()
    assert status == 0, printed
    assert command.rows() == alone


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "when", [ray_starts, workers_start, steps_are_taken, a_checkpoint_is_written]
)
def test_a_signal_saves_and_ends_all(when, sent, tmp_path):
    command = Command(tmp_path, **{"steps": 500, "checkpoint.every": 1})
    command.wait_for(when)
    # As a terminal sends it: to all of the session.
    send = os.killpg if sent == signal.SIGINT else os.kill
    send(command.process.pid, sent)
    status, printed = command.end()
    assert status == 128 + sent, printed
    assert "Traceback" not in printed and "***" not in printed
    last = printed.strip().splitlines()[-1]
    assert f"stopped by {signal.Signals(sent).name}" in last
    if when not in (ray_starts, workers_start):
        assert f"after step {len(command.rows())} of 500, saved" in last


@pytest.mark.slow
@pytest.mark.parametrize("when", [workers_start, steps_are_taken])
def test_a_second_signal_ends_all_at_once(when, tmp_path):
    command = Command(tmp_path, **{"steps": 500, "checkpoint.every": 0})
    command.wait_for(when)
    command.process.send_signal(signal.SIGINT)
    time.sleep(1.2)  # sooner it would be the same request
    with contextlib.suppress(ProcessLookupError):  # while it starts the first one ends it
        command.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    status, printed = command.end()
    assert status == 130, printed
    assert time.monotonic() - begun < 20
    assert "Traceback" not in printed


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_written_is_one_line(tmp_path):
    command = Command(tmp_path, **{"steps": 500, "checkpoint.every": 0})
    command.wait_for(steps_are_taken)
    checkpoints = command.workdir / "checkpoints"
    checkpoints.rename(tmp_path / "away")
    checkpoints.write_text("a file, which root cannot write into either")
    command.process.send_signal(signal.SIGTERM)
    status, printed = command.end()
    assert status == 1, printed
    assert " could not be written: " in printed.splitlines()[-1]
    assert "Traceback" not in printed
