"""A Ray cluster as hjax uses it: devices, what its processes are told, who watches over them.

A pool's process is an actor (``ray_process``), its pool an executor (``ray_executor``); Ray itself
is called in ``ray_calls`` alone.
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
from hjax.controller.hosts import devices_of_a_host
from hjax.controller.process import ProcessSetup, SerializedValue, versions, write
from hjax.controller.ray_calls import Servers
from hjax.controller.ray_executor import RayExecutor
from hjax.controller.ray_pool import (
    START_SECONDS,
    STOP_SECONDS,
    ProcessHandle,
    ProcessPool,
    again,
)
from hjax.controller.timeline import Timeline
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.machine import available_cores
from hjax.user_code import imported


@dataclasses.dataclass(frozen=True)
class RemoteDevice:
    """A device of a process that does not stand yet.

    Attributes:
      id: its number in the cluster.
      platform: of its process.
      memories: that it reaches; all devices share the list, which fills as processes start.
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
    """A Ray cluster as hjax uses it: processes by pool, watched over.

    Args:
      address: of a running one (``auto``, ``HOST:PORT``), or ``local`` or empty to start one on
        this machine, within its loopback.
      processes: host processes with devices, in all pools together.
      devices_per_process: 0: all that a host has.
      host_processes: processes of a pool without devices, for functions.
      logs: folder for what the processes print; None: Ray's own.
      heartbeat_seconds: without a sign of life after which a process counts as lost.
      call_seconds: that a call may take; then its pool counts as lost.
      together: label that the hosts of a pool agree in, see ``hjax.controller.hosts``.
      probe: read in every process, see ``ProcessSetup``.
      say: told what a person should see.

    Attributes:
      places: labels that the hosts of a pool have, by the pool's name; of others any hosts do.
      down: why Ray itself is of no use any more; None: it is.
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
        together: str = "auto",
        probe: Callable[[], Any] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.together, self.call_seconds = together, call_seconds
        self.logs = None if logs is None else Path(logs).absolute()
        self._host_processes, self._probe = host_processes, probe
        self.heartbeat_seconds = heartbeat_seconds
        self.say = say
        # What has passed through the controller: messages, and results that it asked for.
        self.sent_bytes = self.fetched_bytes = 0
        self.memories: list[Any] = []
        # Results are waited for in threads beside an actor's loop, which Ray takes for its own.
        self.environment: Mapping[str, str] = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        self._executors: list[RayExecutor] = []
        self.down: ProcessLost | None = None
        self._address, self._cores = address, processes + host_processes
        self._told: set[str] = set()
        self.places: dict[str, Mapping[str, str]] = {}
        self._started = ray_calls.connect(address, self._cores)
        try:
            self._servers = Servers()
            self.platform = ray_calls.platform()
            self.each = devices_per_process or self._devices_of_a_host(processes)
            self.devices = [
                RemoteDevice(number, self.platform, self.memories)
                for number in range(processes * self.each)
            ]
        except BaseException:
            self._disconnect()
            raise
        self._answers: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.later: Callable[[Callable[[], None]], None] = self._answers.put
        self._answering = threading.Thread(target=self._answer, name="answers", daemon=True)
        self._answering.start()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name="heartbeat", daemon=True)
        self._watch.start()

    def _devices_of_a_host(self, processes: int) -> int:
        if self.platform == "cpu":
            return max(available_cores() // processes, 1)
        return devices_of_a_host(ray_calls.nodes(), self.platform)

    def executor(self, name: str, devices: Sequence[Any], timeline: Timeline) -> RayExecutor:
        """Starts a pool's processes; what a Trainer takes as its executor."""
        self.revive()
        made = RayExecutor(self, name, devices, timeline)
        self._executors.append(made)
        return made

    def divide(self, name: str, devices: int) -> tuple[int, int]:
        """Devices of each process of a pool, and how many processes that makes.

        Raises:
          ConfigError: devices that whole processes do not give.
        """
        if not devices:
            return 0, self._host_processes
        if devices <= self.each:
            return devices, 1
        if devices % self.each:
            raise ConfigError(
                f"pool {name} gets {devices} devices, which processes of {self.each} do not give; "
                f"use a multiple of {self.each} (cluster.devices_per_process), or at most that"
            )
        return self.each, devices // self.each

    def setup(self, executor: ProcessPool, rank: int) -> SerializedValue:
        """What a process is told before it starts, written down."""
        log = self.log_of(executor.name, rank)
        platform = self.platform if executor.devices else "cpu"
        setup = ProcessSetup(
            pool=executor.name,
            rank=rank,
            processes=executor.processes,
            devices=executor.devices,
            platform="cuda" if platform == "gpu" else platform,
            options=_options(),
            environment={"XLA_FLAGS": _flags()},
            log=str(log or ""),
            files=imported(),
            probe=self._probe,
            seconds=START_SECONDS,
        )
        return write(setup, ray_calls.RayStore())

    def log_of(self, pool: str, rank: int) -> Path | None:
        """Where a process's output goes."""
        return None if self.logs is None else self.logs / f"{pool.replace('+', '-')}-{rank}.log"

    def compare(self, name: str, theirs: Mapping[str, str]) -> None:
        """Raise ConfigError where a process has other versions than the controller."""
        for what, ours in versions().items():
            if theirs.get(what) != ours:
                raise ConfigError(
                    f"process {name} has {what} {theirs.get(what)}, the controller {ours}; install "
                    "the same on every host"
                )

    # Who is there

    def ask(self, function: Callable[[], Any], done: str) -> Any:
        """Call a function of Ray's that waits for its servers.

        Raises:
          ProcessLost: they are gone.
          RunError: they have not ``done`` it in time.
        """
        answer: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        # A thread of its own, which is left behind if no answer ever comes.
        threading.Thread(target=run, name="ask Ray", daemon=True).start()
        until = time.monotonic() + START_SECONDS + STOP_SECONDS
        while not concurrent.futures.wait([answer], timeout=0.5).done:
            if self.down is not None:
                raise again(self.down)
            if time.monotonic() > until:
                raise RunError(f"Ray has not {done} within {START_SECONDS} seconds")
        return answer.result()

    def lost(self) -> list[RayExecutor]:
        """Pools whose processes are of no use any more.

        Raises:
          RunError: those of Ray itself are, and others started them.
        """
        self.check()
        if self.down is not None and not self._started:
            raise RunError(
                f"{self.down}; start the cluster again, then the same command with the same "
                "--workdir goes on from the last checkpoint"
            )
        # What others have under way that takes nothing lost is not waited for, however long it is.
        while any(e.waits_in_vain(self.heartbeat_seconds) for e in list(self._executors)):
            time.sleep(0.02)
        return [executor for executor in self._executors if executor.lost is not None]

    def check(self) -> None:
        """Look after every process now; waits until each has answered or is known to be gone."""
        self._look_at_servers()
        asked = [
            (executor, handle, handle.actor.pulse.remote())
            for executor in list(self._executors)
            if executor.lost is None
            for handle in executor.handles()
        ]
        left = [reference for _, _, reference in asked]
        until = time.monotonic() + self.heartbeat_seconds + 1
        while left and self.down is None and time.monotonic() < until:
            # In short waits: without its servers Ray would never end a long one.
            _, left = ray_calls.wait(left, min(1.0, self.heartbeat_seconds), len(left))
            self._look_at_servers()
            left = [r for e, _, r in asked if r in left and e.lost is None]
        for executor, handle, reference in asked if self.down is None else []:
            if executor.lost is not None:
                continue
            if reference in left:
                executor.lose(handle, "does not answer")
                continue
            try:
                ray_calls.get(reference)
            except ray_calls.Died as error:
                executor.lose(handle, "died", error)

    def _look_at_servers(self) -> None:
        """Without its servers Ray answers nobody, and ends this process after a minute."""
        if self.down is not None:
            return
        why = self._servers.failure(self.heartbeat_seconds)
        if not why:
            return
        self.down = ProcessLost(why)
        for executor in list(self._executors):
            executor.fail(self.down)
        self._servers.end()

    def revive(self) -> None:
        """Start Ray again if it is gone, and was started here."""
        if self.down is None or not self._started:
            return
        for executor in self._executors:
            executor.fail(self.down)
            for handle in executor.leave()[0]:
                self.end(handle)
        self._disconnect()
        ray_calls.connect(self._address, self._cores)
        self._servers.meet()
        self.down = None

    def _answer(self) -> None:
        while (answered := self._answers.get()) is not None:
            answered()

    def _look_after(self) -> None:
        while not self._ended.wait(0.5):
            self._look_at_servers()
            for executor in list(self._executors) if self.down is None else []:
                try:
                    for line in executor.beat(self.heartbeat_seconds):
                        self.say(line)
                    executor.look_for_room()
                except Exception as error:
                    if not self._ended.is_set() and self.down is None:
                        self.say(f"the cluster does not answer: {error}")

    def end(self, handle: ProcessHandle) -> None:
        """End a process that may not hear any more; not waited for where it is another host's."""
        if handle.facts is None:
            return
        if handle.node == self._servers.node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.facts.pid, signal.SIGKILL)
        elif self.down is None:
            threading.Thread(target=_end_there, args=(handle,), daemon=True).start()

    def tell(self, error: ProcessLost) -> None:
        """Say what was lost, once."""
        text = str(error)
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def machine(self) -> list[list[dict[str, Any]]]:
        """What every process's probe reads, by pool; a pool that is lost says nothing."""
        said = []
        for executor in list(self._executors):
            if executor.devices and executor.lost is None:
                # It may be lost while it is asked, and not be known to be.
                with contextlib.suppress(ProcessLost, ray_calls.Died):
                    said.append(executor.machine())
        return said

    def closed(self, executor: Any) -> None:
        """A pool is no longer of this cluster."""
        if executor in self._executors:
            self._executors.remove(executor)

    def close(self) -> None:
        """End every process, and the cluster if it was started here."""
        self._ended.set()
        for executor in list(self._executors):
            executor.close()
        if self._watch is not threading.current_thread():
            self._watch.join(STOP_SECONDS)
        self._answers.put(None)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._started and ray_calls.connected():
            ray_calls.end_here()


# What decides how programs are compiled and numbers drawn; the same in every process.
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


def _end_there(handle: ProcessHandle) -> None:
    """Have a process of another host ended."""
    assert handle.facts is not None
    with contextlib.suppress(Exception):  # its host may be gone
        ray_calls.wait([ray_calls.kill_at(handle.node, handle.facts.pid)], STOP_SECONDS)


def _options() -> dict[str, Any]:
    options: Any = jax.config
    return {name: options.values[name] for name in _OPTIONS if name in options.values}


def _flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)
