"""A pool's processes on Ray: placement, start as one world, heartbeats, replacement."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.controller import ray_calls
from hjax.controller.hosts import RAY_RESOURCE, ProcessPlacement, placements
from hjax.controller.process import ProcessInfo
from hjax.controller.ray_process import RayProcess
from hjax.errors import LOG_FOLLOWS, ConfigError, ProcessLost, RunError

START_SECONDS = 180
STOP_SECONDS = 10
# Wait for one placement while there are others to try.
PLACEMENT_SECONDS = 4
LOG_LINES = 12


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """A device's memory, known by its kind."""

    kind: str


@dataclasses.dataclass
class ProcessHandle:
    """The controller's handle on a process.

    Attributes:
      name: pool and rank, for messages.
      actor: Ray's handle.
      info: what it reported at its start; None until then.
      node: Ray's id of its host.
      offset: seconds to add to its clock for the controller's.
      pending_heartbeat: the heartbeat that is waited for, and since when.
    """

    name: str
    actor: Any
    log: Path | None
    info: ProcessInfo | None = None
    node: str = ""
    offset: float = 0.0
    pending_heartbeat: tuple[Any, float] | None = None


class ProcessPool:
    """A pool's processes, started together and replaced together.

    Args:
      cluster: the pool's RayCluster.
      name: of the pool.
      devices: of the pool, by number.

    Attributes:
      devices: of each process.
      processes: their number.
      planned: number of processes that the pool should have.
      starts: how often its processes were started; earlier starts' results are gone.
    """

    def __init__(self, cluster: Any, name: str, devices: int):
        self.name = name
        self._cluster = cluster
        each, count = cluster.split_devices(name, devices)
        self.devices, self.processes, self.planned = each, count, count
        self._lock = threading.RLock()
        self._heartbeat_lock = threading.Lock()
        self._handles: list[ProcessHandle] = []
        self._group: Any = None
        self._missing: list[Any] = []  # requested, for processes that are missing
        self._granted = 0
        self._lost: ProcessLost | None = None
        self._closed = False
        self.starts = 0

    def _start(self, counts: Sequence[int] = ()) -> None:
        """Start as many processes as can be placed, of the allowed numbers."""
        cluster = self._cluster
        self._lost, self.starts = None, self.starts + 1
        bundle = self._bundle()
        try:
            self.processes = self._reserve(bundle, counts or (self.planned,))
            ranks = range(self.processes)
            start = f"started the processes of pool {self.name}"
            self._handles = cluster.call_ray(lambda: [self._make(r, bundle) for r in ranks], start)
            setups = [cluster.setup(self, rank) for rank in range(self.processes)]
            prepared = [
                handle.actor.prepare.remote(setup)
                for handle, setup in zip(self._handles, setups, strict=True)
            ]
            said = self._wait_all(prepared, "starting")
            for handle, (info, node) in zip(self._handles, said, strict=True):
                handle.info, handle.node = info, node
                cluster.compare(handle.name, info.versions)
            address = said[0][0].address
            joining = [handle.actor.join.remote(address) for handle in self._handles]
            joined = self._wait_all(joining, "joining", watched=True)
            if self.devices:
                cluster.memories[:] = [DeviceMemory(kind) for kind in joined[0]["memories"]]
            self._measure_clocks()
        except BaseException as error:
            self._kill()
            self._lost = self._lost or ProcessLost(f"pool {self.name} did not start: {error}")
            raise

    def _bundle(self) -> dict[str, float]:
        """Resources that a process takes of its host."""
        kind = RAY_RESOURCE[self._cluster.platform]
        return {"CPU": 1.0} | ({kind: self.devices} if self.devices and kind != "CPU" else {})

    def _reserve(self, bundle: Mapping[str, float], counts: Sequence[int]) -> int:
        """Reserve a placement; returns the number of processes.

        Args:
          bundle: resources of each.
          counts: allowed numbers of processes, best first.

        Raises:
          RunError: none of them can be placed.
        """
        cluster = self._cluster
        until = time.monotonic() + START_SECONDS
        while True:
            places = [
                (count, room)
                for count in counts
                for room in self._placements(count, min(counts), time.monotonic() > until)
            ]
            for count, room in places:
                seconds = PLACEMENT_SECONDS if len(places) > 1 else START_SECONDS
                ask = functools.partial(self._try_placement, bundle, count, room, seconds)
                if cluster.call_ray(ask, f"placed pool {self.name}"):
                    wanted = range(self.planned - count)
                    self._missing = [ray_calls.request_placement([bundle], room) for _ in wanted]
                    return count
            if time.monotonic() > until:
                has = cluster.shortage() or f"the cluster has {ray_calls.resources()}"
                raise RunError(
                    f"pool {self.name}: no room for {min(counts)} processes with "
                    f"{', '.join(f'{n:g} {kind}' for kind, n in bundle.items())} each within "
                    f"{START_SECONDS} seconds; {has}"
                )
            if not places:
                time.sleep(1)

    def _placements(self, processes: int, least: int, last: bool) -> list[ProcessPlacement]:
        """Possible placements of so many processes; none if fewer are allowed and these do not fit.

        If processes are replaced, a missing host may come back, so an error is raised only at the
        ``last`` attempt.
        """
        cluster = self._cluster
        try:
            return placements(
                ray_calls.nodes(),
                pool=self.name,
                platform=cluster.platform,
                processes=processes,
                devices_per_process=self.devices,
                colocation_label=cluster.colocation_label,
                labels=cluster.pool_labels.get(self.name, {}),
            )
        except ConfigError:
            if processes == least and (self.starts == 1 or last):
                raise
            return []

    def _try_placement(
        self, bundle: Mapping[str, float], count: int, room: ProcessPlacement, seconds: float
    ) -> bool:
        """Request a placement and wait a while; returns whether it was granted."""
        self._group = ray_calls.request_placement([bundle] * count, room)
        if self._group.wait(seconds):
            return True
        ray_calls.release_placement(self._group)
        self._group = None
        return False

    def _make(self, rank: int, bundle: Mapping[str, float]) -> ProcessHandle:
        cluster = self._cluster
        actor = ray_calls.start_process(RayProcess, bundle, self._group, rank, cluster.environment)
        return ProcessHandle(f"{self.name}:{rank}", actor, cluster.log_of(self.name, rank))

    def _wait_all(self, references: Sequence[Any], doing: str, watched: bool = False) -> list[Any]:
        """Results of one call on every process; an error names who was late or lost.

        Args:
          references: of the results, in rank order.
          doing: what the processes do, for messages.
          watched: whether each must send heartbeats in the meantime.
        """
        until = time.monotonic() + START_SECONDS
        left = list(references)
        while left:
            done, left = ray_calls.wait(left, 0.5)
            for reference in done:
                self._wait_one(reference, self._handles[references.index(reference)])
            if watched and left:
                for _ in self.check_heartbeats(self._cluster.heartbeat_seconds):
                    pass
            if error := self._lost or self._cluster.ray_failure:
                raise copy_error(error)
            if left and time.monotonic() > until:
                late = ", ".join(self._handles[references.index(r)].name for r in left)
                raise ProcessLost(f"{late}: not done with {doing} within {START_SECONDS} seconds")
        return [self._wait_one(r, h) for r, h in zip(references, self._handles, strict=True)]

    def _wait_one(self, reference: Any, handle: ProcessHandle) -> Any:
        """A result that is ready."""
        try:
            return ray_calls.get(reference)
        except ray_calls.ActorDied as error:
            raise ProcessLost(self._loss_message(handle, "died", error)) from error
        except ray_calls.TaskRaised as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None

    def _measure_clocks(self) -> None:
        for handle in self._handles:
            before = time.perf_counter()
            late = f"process {handle.name} has not answered within {START_SECONDS} seconds"
            [pulse] = self._get([handle.actor.heartbeat.remote()], START_SECONDS, late)
            handle.offset = (before + time.perf_counter()) / 2 - pulse.clock

    def _get(self, references: Sequence[Any], seconds: float, late: str) -> list[Any]:
        """Results; raises if a process is lost, or after ``seconds`` with the text ``late``."""
        until, references = time.monotonic() + seconds, list(references)
        while True:
            # Short waits: without its servers Ray would never return from a long one.
            left = min(max(until - time.monotonic(), 0.0), 1.0)
            _, missing = ray_calls.wait(references, left, len(references))
            if not missing:
                return ray_calls.get(references)
            if error := self._lost or self._cluster.ray_failure:
                raise copy_error(error)
            if time.monotonic() >= until:
                raise RunError(late)

    def _kill(self) -> None:
        handles, groups = self.release_processes()
        for handle in handles:
            if self._cluster.ray_failure is None:
                with contextlib.suppress(Exception):  # it may be dead; ``kill_process`` makes sure
                    ray_calls.kill(handle.actor)
            self._cluster.kill_process(handle)
        for each in groups if self._cluster.ray_failure is None else ():
            with contextlib.suppress(Exception):  # Ray releases it with the run at the latest
                room = f"released the placement of pool {self.name}"
                self._cluster.call_ray(functools.partial(ray_calls.release_placement, each), room)

    def release_processes(self) -> tuple[list[ProcessHandle], list[Any]]:
        """Forget the processes and their placement groups, which are returned."""
        handles, groups = self._handles, [g for g in (self._group, *self._missing) if g is not None]
        self._handles, self._group, self._missing, self._granted = [], None, [], 0
        return handles, groups

    def restart(self, counts: Sequence[int] = ()) -> None:
        """Replace the processes; what they held is gone.

        Args:
          counts: allowed numbers of processes, best first; the first that can be placed is used.
            Empty: as many as were planned, however long that takes.
        """
        self._kill()
        self._cluster.restart_ray()
        self._start(counts)

    @property
    def room(self) -> int:
        """Processes that the pool could have now, missing ones with a placement included."""
        return self.processes + self._granted

    def check_capacity(self) -> None:
        """Check which of the missing processes have been granted a placement."""
        wishes = self._missing
        granted = sum(bool(wish.wait(0.05)) for wish in wishes)
        if wishes is self._missing:
            self._granted = granted

    def handles(self) -> list[ProcessHandle]:
        """Its processes, in rank order."""
        return list(self._handles)

    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [handle.info.pid for handle in self._handles if handle.info is not None]

    @property
    def hosts(self) -> list[str]:
        """Host names of the pool's processes, in rank order."""
        return [handle.info.host for handle in self._handles if handle.info is not None]

    @property
    def lost(self) -> ProcessLost | None:
        """Why the pool was lost; None: it works."""
        return self._lost

    def mark_lost(self, handle: ProcessHandle, how: str, error: Any = None) -> None:
        """Mark a process, and with it the pool's world, as lost; pending calls fail."""
        if handle in self._handles:
            self.fail(ProcessLost(self._loss_message(handle, how, error)))

    def fail(self, error: ProcessLost) -> None:
        """Mark the pool as lost and kill its remaining processes, which would wait forever."""
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = error
            self._fail_pending(error)
        for handle in self.handles():
            self._cluster.kill_process(handle)
        # Reported now; the pool is replaced once calls of other pools have finished.
        self._cluster.report_loss(error)

    def _fail_pending(self, error: ProcessLost) -> None:
        """Fail everything that waits for the processes."""

    def _loss_message(self, handle: ProcessHandle, how: str, error: Any) -> str:
        where = f" (pid {handle.info.pid} on {handle.info.host})" if handle.info else ""
        lines = log_tail(handle.log)
        if not lines and "creation task" in str(error):  # it died before it had a log
            how += f" as it began: {str(error).strip().splitlines()[-1].strip()}"
        rest = f"{LOG_FOLLOWS} {handle.log}:\n{lines}" if lines else ""
        return f"process {handle.name}{where} {how}{rest}"

    def check_heartbeats(self, seconds: float) -> Iterator[str]:
        """Check every process; yields log lines to show."""
        if not self._heartbeat_lock.acquire(blocking=False):
            return  # another thread does
        try:
            yield from self._check_heartbeats(seconds)
        finally:
            self._heartbeat_lock.release()

    def _check_heartbeats(self, seconds: float) -> Iterator[str]:
        for handle in self.handles():
            if self._lost is not None or self._closed:
                return
            if handle.info is None:
                continue
            now = time.monotonic()
            if handle.pending_heartbeat is None:
                handle.pending_heartbeat = handle.actor.heartbeat.remote(), now
                continue
            reference, since = handle.pending_heartbeat
            done, _ = ray_calls.wait([reference], 0)
            if not done:
                if now - since > seconds:
                    how = f"has given no sign of life for {now - since:.0f} seconds"
                    self.mark_lost(handle, how)
                continue
            handle.pending_heartbeat = None
            try:
                pulse = ray_calls.get(reference)
            except ray_calls.ActorDied as error:
                self.mark_lost(handle, "died", error)
                return
            for line in pulse.lines:
                yield f"{handle.name} {line}"


def log_tail(log: Path | None) -> str:
    """The last lines of a process's log."""
    try:
        lines = log.read_text(errors="replace").splitlines() if log is not None else []
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def copy_error(error: ProcessLost) -> ProcessLost:
    """A copy of an error to raise again, so that notes do not accumulate."""
    return ProcessLost(*error.args)
