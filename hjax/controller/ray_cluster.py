"""A Ray cluster: its devices, the settings of its processes, and fault detection (heartbeats).

A process of a pool is an actor (``ray_process``), its pool an executor (``ray_executor``); only
``ray_calls`` calls Ray itself.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from hjax.controller import ray_calls
from hjax.controller.futures import DEADLINE_SECONDS
from hjax.controller.hosts import KIND_LABEL, devices_per_host, shortage
from hjax.controller.process import ProcessSetup, SerializedValue, serialize_value, versions
from hjax.controller.ray_calls import RayServers
from hjax.controller.ray_executor import RayExecutor
from hjax.controller.ray_pool import (
    START_SECONDS,
    STOP_SECONDS,
    ProcessHandle,
    ProcessPool,
    copy_error,
)
from hjax.controller.timeline import Timeline
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.machine import available_cores
from hjax.user_code import imported


@dataclasses.dataclass(frozen=True)
class RemoteDevice:
    """A device of a process that may not have started yet.

    Attributes:
      id: its number in the cluster.
      platform: of its process.
      memories: that it can address; a list shared by all devices, filled when processes start.
    """

    id: int
    platform: str
    memories: list[Any] = dataclasses.field(compare=False)

    def addressable_memories(self) -> list[Any]:
        """As of a jax.Device: objects with a ``kind``."""
        return self.memories

    def __str__(self) -> str:
        return f"device {self.id} of the cluster"


class RayCluster:
    """A Ray cluster with the processes of all pools, which it monitors.

    Args:
      address: of a running one (``auto``, ``HOST:PORT``), or ``local`` or empty to start one on
        this machine, on its loopback address.
      processes: number of processes with devices, over all pools.
      devices_per_process: 0: all of a host.
      host_processes: processes of a pool without devices, for functions.
      logs: folder for the processes' output; None: Ray's own.
      heartbeat_seconds: without a heartbeat after which a process counts as lost.
      call_seconds: timeout of a call; after it the pool counts as lost.
      colocation_label: label that has one value on all hosts of a pool, see
        ``hjax.controller.hosts``.
      probe: read in every process, see ``ProcessSetup``.
      say: shows a line to the user.

    Attributes:
      pool_labels: labels that a pool's hosts must have, by the pool's name; other pools take any
        hosts.
      ray_failure: why Ray itself has failed; None: it works.
    """

    def __init__(
        self,
        address: str,
        processes: int,
        devices_per_process: int = 0,
        host_processes: int = 1,
        logs: Path | None = None,
        heartbeat_seconds: float = 30.0,
        call_seconds: float = DEADLINE_SECONDS,
        colocation_label: str = "auto",
        probe: Callable[[], Any] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.colocation_label, self.call_seconds = colocation_label, call_seconds
        self.logs = None if logs is None else Path(logs).absolute()
        self._host_processes, self._probe = host_processes, probe
        self.heartbeat_seconds = heartbeat_seconds
        self.say = say
        # Traffic of the controller: messages sent, and results fetched.
        self.sent_bytes = self.fetched_bytes = 0
        self.memories: list[Any] = []
        # Threads beside an actor's event loop wait for results; Ray would warn of that.
        self.environment: Mapping[str, str] = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        self._executors: list[RayExecutor] = []
        self.ray_failure: ProcessLost | None = None
        self._address, self._cores = address, processes + host_processes
        self._reported: set[str] = set()
        self.pool_labels: dict[str, Mapping[str, str]] = {}
        self._processes = processes
        self._started = ray_calls.connect(address, self._cores)
        try:
            self._servers = RayServers()
            self.platform = ray_calls.platform()
            self.devices_per_process = devices_per_process or self._devices_of_a_host(processes)
            self.devices = [
                RemoteDevice(number, self.platform, self.memories)
                for number in range(processes * self.devices_per_process)
            ]
        except BaseException:
            self._disconnect()
            raise
        self._callbacks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.run_later: Callable[[Callable[[], None]], None] = self._callbacks.put
        threading.Thread(target=self._run_callbacks, name="answers", daemon=True).start()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watch_processes, name="heartbeat", daemon=True)
        self._watch.start()

    def device_kind(self) -> str:
        """The hosts' kind of accelerator as Ray labels it; the platform where it does not."""
        labels = (node.get("Labels") or {} for node in ray_calls.nodes() if node.get("Alive"))
        return next((x[KIND_LABEL] for x in labels if x.get(KIND_LABEL)), self.platform)

    def _devices_of_a_host(self, processes: int) -> int:
        if self.platform == "cpu":
            return max(available_cores() // processes, 1)
        return devices_per_host(ray_calls.nodes(), self.platform)

    def executor(self, name: str, devices: Sequence[Any], timeline: Timeline) -> RayExecutor:
        """Start a pool's processes; an executor factory for the Trainer."""
        self.restart_ray()
        made = RayExecutor(self, name, devices, timeline)
        self._executors.append(made)
        return made

    def split_devices(self, name: str, devices: int) -> tuple[int, int]:
        """(devices of each process of a pool, number of processes).

        Raises:
          ConfigError: devices that whole processes do not give.
        """
        if not devices:
            return 0, self._host_processes
        each = self.devices_per_process
        if devices <= each:
            return devices, 1
        if devices % each:
            raise ConfigError(
                f"pool {name} has {devices} devices, but a process has {each} "
                f"(cluster.devices_per_process); use a multiple of {each}, or at most {each}"
            )
        return each, devices // each

    def shortage(self) -> str:
        """What the run's pools need and the present hosts do not have, in a line; or empty."""
        if self._started:  # its CPUs were counted for this run
            return ""
        each, functions = self.devices_per_process, self._host_processes
        return shortage(ray_calls.nodes(), self.platform, self._processes, each, functions)

    def expect(self, pools: Mapping[str, int]) -> None:
        """Learn how many devices each pool of the run will have, by name; says at once if the
        present hosts cannot have room for all, since others may still join."""
        self._processes = sum(self.split_devices(name, n)[1] for name, n in pools.items())
        if short := self.shortage():
            self.say(f"warning (cluster too small): {short}")

    def setup(self, executor: ProcessPool, rank: int) -> SerializedValue:
        """A process's settings, serialized."""
        log = self.log_of(executor.name, rank)
        platform = self.platform if executor.devices else "cpu"
        setup = ProcessSetup(
            pool=executor.name,
            rank=rank,
            processes=executor.processes,
            devices=executor.devices,
            platform="cuda" if platform == "gpu" else platform,
            options=_jax_options(),
            environment={"XLA_FLAGS": _xla_flags()},
            log=str(log or ""),
            files=imported(),
            probe=self._probe,
            seconds=START_SECONDS,
        )
        return serialize_value(setup, ray_calls.RayStore())

    def log_of(self, pool: str, rank: int) -> Path | None:
        """The log file of a process."""
        return None if self.logs is None else self.logs / f"{pool.replace('+', '-')}-{rank}.log"

    def compare(self, name: str, theirs: Mapping[str, str]) -> None:
        """Raise ConfigError if a process has other versions than the controller."""
        for what, ours in versions().items():
            if theirs.get(what) != ours:
                raise ConfigError(
                    f"process {name} has {what} {theirs.get(what)}, the controller {ours}; install "
                    "the same on every host"
                )

    def call_ray(self, function: Callable[[], Any], done: str) -> Any:
        """Call a function that waits for Ray's servers.

        Raises:
          ProcessLost: the servers have failed.
          RunError: it was not ``done`` in time.
        """
        answer: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        # In a thread of its own, which is abandoned if it never returns.
        threading.Thread(target=run, name="ask Ray", daemon=True).start()
        until = time.monotonic() + START_SECONDS + STOP_SECONDS
        while not concurrent.futures.wait([answer], timeout=0.5).done:
            if self.ray_failure is not None:
                raise copy_error(self.ray_failure)
            if time.monotonic() > until:
                raise RunError(f"Ray has not {done} within {START_SECONDS} seconds")
        return answer.result()

    def lost(self) -> list[RayExecutor]:
        """Pools whose processes were lost.

        Raises:
          RunError: Ray itself has failed, and others started it.
        """
        self.check()
        if self.ray_failure is not None and not self._started:
            raise RunError(
                f"{self.ray_failure}; start the cluster again, then the same command with the same "
                "--workdir goes on from the last checkpoint"
            )
        # Only for calls that need lost results; other running calls are not waited for.
        while any(e.waits_for_lost_results(self.heartbeat_seconds) for e in list(self._executors)):
            time.sleep(0.02)
        return [executor for executor in self._executors if executor.lost is not None]

    def check(self) -> None:
        """Check every process now; waits until each has answered or is known to be lost."""
        self._check_servers()
        asked = [
            (executor, handle, handle.actor.heartbeat.remote())
            for executor in list(self._executors)
            if executor.lost is None
            for handle in executor.handles()
        ]
        left = [reference for _, _, reference in asked]
        until = time.monotonic() + self.heartbeat_seconds + 1
        while left and self.ray_failure is None and time.monotonic() < until:
            # Short waits: without its servers Ray would never return from a long one.
            _, left = ray_calls.wait(left, min(1.0, self.heartbeat_seconds), len(left))
            self._check_servers()
            left = [r for e, _, r in asked if r in left and e.lost is None]
        for executor, handle, reference in asked if self.ray_failure is None else []:
            if executor.lost is not None:
                continue
            if reference in left:
                executor.mark_lost(handle, "does not answer")
                continue
            try:
                ray_calls.get(reference)
            except ray_calls.ActorDied as error:
                executor.mark_lost(handle, "died", error)

    def _check_servers(self) -> None:
        """Notice failed servers, without which Ray ends this process after a minute."""
        if self.ray_failure is not None:
            return
        why = self._servers.failure(self.heartbeat_seconds)
        if not why and any(executor.lost is not None for executor in list(self._executors)):
            removed = ray_calls.sockets_removed()
            why = removed and f"Ray's folder {removed} was removed, so no process can be replaced"
        if not why:
            return
        self.ray_failure = ProcessLost(why)
        for executor in list(self._executors):
            executor.fail(self.ray_failure)
        self._servers.end()

    def restart_ray(self) -> None:
        """Start Ray again if it has failed and was started here."""
        if self.ray_failure is None or not self._started:
            return
        # Workers end with their raylet and may have been seen dead before it.
        self.report_loss(self.ray_failure)
        for executor in self._executors:
            executor.fail(self.ray_failure)
            for handle in executor.release_processes()[0]:
                self.kill_process(handle)
        self._disconnect()
        ray_calls.connect(self._address, self._cores)
        self._servers.find_processes()
        self.ray_failure = None

    def _run_callbacks(self) -> None:
        while (answered := self._callbacks.get()) is not None:
            answered()

    def _watch_processes(self) -> None:
        while not self._ended.wait(0.5):
            self._check_servers()
            for executor in list(self._executors) if self.ray_failure is None else []:
                try:
                    for line in executor.check_heartbeats(self.heartbeat_seconds):
                        self.say(line)
                    executor.check_capacity()
                except Exception as error:
                    if not self._ended.is_set() and self.ray_failure is None:
                        self.say(f"the cluster does not answer: {error}")

    def kill_process(self, handle: ProcessHandle) -> None:
        """Kill a process that may not respond; on another host without waiting."""
        if handle.info is None:
            return
        if handle.node == self._servers.node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.info.pid, signal.SIGKILL)
        elif self.ray_failure is None:
            threading.Thread(target=_kill_remote, args=(handle,), daemon=True).start()

    def report_loss(self, error: ProcessLost) -> None:
        """Show what was lost, once."""
        text = str(error)
        if text not in self._reported:
            self._reported.add(text)
            self.say(text)

    def machine(self) -> list[list[dict[str, Any]]]:
        """The probe's figures of every process, by pool; lost pools have none."""
        said = []
        for executor in list(self._executors):
            if executor.devices and executor.lost is None:
                # It may be lost in the meantime.
                with contextlib.suppress(ProcessLost, ray_calls.ActorDied):
                    said.append(executor.machine())
        return said

    def remove_pool(self, executor: Any) -> None:
        """Forget a closed pool."""
        if executor in self._executors:
            self._executors.remove(executor)

    def close(self) -> None:
        """End every process, and the cluster if it was started here."""
        self._ended.set()
        for executor in list(self._executors):
            executor.close()
        if self._watch is not threading.current_thread():
            self._watch.join(STOP_SECONDS)
        self._callbacks.put(None)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._started:
            ray_calls.end_here()


# Options of compilation and random numbers; the same in every process.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


def _kill_remote(handle: ProcessHandle) -> None:
    """Kill a process on another host."""
    assert handle.info is not None
    with contextlib.suppress(Exception):  # its host may be gone
        ray_calls.wait([ray_calls.kill_on_node(handle.node, handle.info.pid)], STOP_SECONDS)


def _jax_options() -> dict[str, Any]:
    options: Any = jax.config
    return {name: options.values[name] for name in _OPTIONS if name in options.values}


def _xla_flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)
