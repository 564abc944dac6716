"""The processes of a pool on Ray: rooms for them, that they start as one world and stay alive."""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hjax.controller import ray_calls
from hjax.controller.hosts import RESOURCE, ProcessPlacement, rooms
from hjax.controller.process import ProcessInfo
from hjax.controller.ray_process import RayProcess
from hjax.errors import LOG_FOLLOWS, ConfigError, ProcessLost, RunError

START_SECONDS = 180
STOP_SECONDS = 10
# For which one place is waited while there are others to try.
ROOM_SECONDS = 4
LOG_LINES = 12


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Of a device, known by its kind."""

    kind: str


@dataclasses.dataclass
class ProcessHandle:
    """The controller's end of a process.

    Attributes:
      name: pool and rank, as people are told.
      actor: Ray's handle.
      facts: what it said of itself; None until then.
      node: Ray's id of its host.
      offset: seconds to add to its clock for the controller's.
      beating: the sign of life that is waited for, and since when.
    """

    name: str
    actor: Any
    log: Path | None
    facts: ProcessInfo | None = None
    node: str = ""
    offset: float = 0.0
    beating: tuple[Any, float] | None = None


class ProcessPool:
    """A pool's processes, started together and replaced together.

    Args:
      cluster: the RayCluster that the pool is of.
      name: of the pool.
      devices: of the pool, by number.

    Attributes:
      devices: of each process.
      processes: that there are.
      planned: processes that the pool is to have.
      starts: how often its processes were started; results of those before are gone.
    """

    def __init__(self, cluster: Any, name: str, devices: int):
        self.name = name
        self._cluster = cluster
        each, count = cluster.divide(name, devices)
        self.devices, self.processes, self.planned = each, count, count
        self._lock = threading.RLock()
        self._looking = threading.Lock()
        self._handles: list[ProcessHandle] = []
        self._group: Any = None
        self._wishes: list[Any] = []  # rooms for processes that are missing
        self._granted = 0
        self._lost: ProcessLost | None = None
        self._closed = False
        self.starts = 0

    # Starting

    def _start(self, counts: Sequence[int] = ()) -> None:
        """Start the processes: so many as there is room for, of the numbers that are allowed."""
        cluster = self._cluster
        self._lost, self.starts = None, self.starts + 1
        bundle = self._bundle()
        try:
            self.processes = self._reserve(bundle, counts or (self.planned,))
            ranks = range(self.processes)
            started = f"started the processes of pool {self.name}"
            self._handles = cluster.ask(lambda: [self._make(r, bundle) for r in ranks], started)
            setups = [cluster.setup(self, rank) for rank in range(self.processes)]
            prepared = [
                handle.actor.prepare.remote(setup)
                for handle, setup in zip(self._handles, setups, strict=True)
            ]
            said = self._all(prepared, "starting")
            for handle, (facts, node) in zip(self._handles, said, strict=True):
                handle.facts, handle.node = facts, node
                cluster.compare(handle.name, facts.versions)
            address = said[0][0].address
            joining = [handle.actor.join.remote(address) for handle in self._handles]
            joined = self._all(joining, "joining", watched=True)
            if self.devices:
                cluster.memories[:] = [DeviceMemory(kind) for kind in joined[0]["memories"]]
            self._measure_clocks()
        except BaseException as error:
            self._kill()
            self._lost = self._lost or ProcessLost(f"pool {self.name} did not start: {error}")
            raise

    def _bundle(self) -> dict[str, float]:
        """What a process takes of its host."""
        kind = RESOURCE[self._cluster.platform]
        return {"CPU": 1.0} | ({kind: self.devices} if self.devices and kind != "CPU" else {})

    def _reserve(self, bundle: Mapping[str, float], counts: Sequence[int]) -> int:
        """Make room for processes; how many of them there are.

        Args:
          bundle: what each takes.
          counts: that are allowed, the best first.

        Raises:
          RunError: there is room for none of them.
        """
        cluster = self._cluster
        until = time.monotonic() + START_SECONDS
        while True:
            places = [
                (count, room)
                for count in counts
                for room in self._rooms(count, min(counts), time.monotonic() > until)
            ]
            for count, room in places:
                seconds = ROOM_SECONDS if len(places) > 1 else START_SECONDS
                ask = functools.partial(self._room, bundle, count, room, seconds)
                if cluster.ask(ask, f"made room for pool {self.name}"):
                    wanted = range(self.planned - count)
                    self._wishes = [ray_calls.ask_for([bundle], room) for _ in wanted]
                    return count
            if time.monotonic() > until:
                raise RunError(
                    f"pool {self.name}: no room for {min(counts)} processes with "
                    f"{', '.join(f'{n:g} {kind}' for kind, n in bundle.items())} each within "
                    f"{START_SECONDS} seconds; the cluster has {ray_calls.resources()}"
                )
            if not places:
                time.sleep(1)

    def _rooms(self, processes: int, least: int, last: bool) -> list[ProcessPlacement]:
        """Where so many processes may stand; nowhere, if fewer would do and these do not fit.

        Where processes are replaced a host may be missing that comes back, unless this is the last
        time that is looked.
        """
        cluster = self._cluster
        try:
            return rooms(
                ray_calls.nodes(),
                pool=self.name,
                platform=cluster.platform,
                processes=processes,
                each=self.devices,
                together=cluster.colocation_label,
                labels=cluster.places.get(self.name, {}),
            )
        except ConfigError:
            if processes == least and (self.starts == 1 or last):
                raise
            return []

    def _room(
        self, bundle: Mapping[str, float], count: int, room: ProcessPlacement, seconds: float
    ) -> bool:
        """Ask for a place and wait for it a while; whether it was given."""
        self._group = ray_calls.ask_for([bundle] * count, room)
        if self._group.wait(seconds):
            return True
        ray_calls.give_up(self._group)
        self._group = None
        return False

    def _make(self, rank: int, bundle: Mapping[str, float]) -> ProcessHandle:
        cluster = self._cluster
        environment = cluster.environment
        actor = ray_calls.start_process(RayProcess, bundle, self._group, rank, environment)
        return ProcessHandle(f"{self.name}:{rank}", actor, cluster.log_of(self.name, rank))

    def _all(self, references: Sequence[Any], doing: str, watched: bool = False) -> list[Any]:
        """Results of one call of every process; an error says who was late or gone.

        Args:
          references: of the results, in rank order.
          doing: what they do.
          watched: whether each must give a sign of life in the meantime.
        """
        until = time.monotonic() + START_SECONDS
        left = list(references)
        while left:
            done, left = ray_calls.wait(left, 0.5)
            for reference in done:
                self._one(reference, self._handles[references.index(reference)])
            if watched and left:
                for _ in self.beat(self._cluster.heartbeat_seconds):
                    pass
            if error := self._lost or self._cluster.down:
                raise again(error)
            if left and time.monotonic() > until:
                late = ", ".join(self._handles[references.index(r)].name for r in left)
                raise ProcessLost(f"{late}: not done with {doing} within {START_SECONDS} seconds")
        return [self._one(r, h) for r, h in zip(references, self._handles, strict=True)]

    def _one(self, reference: Any, handle: ProcessHandle) -> Any:
        """A result that is there."""
        try:
            return ray_calls.get(reference)
        except ray_calls.Died as error:
            raise ProcessLost(self._told(handle, "died", error)) from error
        except ray_calls.Raised as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise cause from None

    def _measure_clocks(self) -> None:
        for handle in self._handles:
            before = time.perf_counter()
            late = f"process {handle.name} has not answered within {START_SECONDS} seconds"
            [pulse] = self._get([handle.actor.pulse.remote()], START_SECONDS, late)
            handle.offset = (before + time.perf_counter()) / 2 - pulse.clock

    def _get(self, references: Sequence[Any], seconds: float, late: str) -> list[Any]:
        """Results; an error if a process is lost meanwhile, ``late`` if it takes too long."""
        until, references = time.monotonic() + seconds, list(references)
        while True:
            # In short waits: without its servers Ray would never end a long one.
            left = min(max(until - time.monotonic(), 0.0), 1.0)
            _, missing = ray_calls.wait(references, left, len(references))
            if not missing:
                return ray_calls.get(references)
            if error := self._lost or self._cluster.down:
                raise again(error)
            if time.monotonic() >= until:
                raise RunError(late)

    # Ending

    def _kill(self) -> None:
        handles, groups = self.leave()
        for handle in handles:
            if self._cluster.down is None:
                with contextlib.suppress(Exception):  # it may be gone; ``end`` sees to it
                    ray_calls.kill(handle.actor)
            self._cluster.end(handle)
        for each in groups if self._cluster.down is None else ():
            with contextlib.suppress(Exception):  # Ray gives it up with the run at the latest
                room = f"given up the room of pool {self.name}"
                self._cluster.ask(functools.partial(ray_calls.give_up, each), room)

    def leave(self) -> tuple[list[ProcessHandle], list[Any]]:
        """Let go of the processes and their rooms, which are returned."""
        handles, groups = self._handles, [g for g in (self._group, *self._wishes) if g is not None]
        self._handles, self._group, self._wishes, self._granted = [], None, [], 0
        return handles, groups

    def restart(self, counts: Sequence[int] = ()) -> None:
        """New processes in the place of the old ones; what they held is gone.

        Args:
          counts: numbers of processes that will do, the best first: the first for which there is
            room. Empty: as many as were planned, for which room is waited.
        """
        self._kill()
        self._cluster.revive()
        self._start(counts)

    # Who is there

    @property
    def room(self) -> int:
        """Processes that the pool could have now; those missing are asked for all the time."""
        return self.processes + self._granted

    def look_for_room(self) -> None:
        """See which of the missing processes there is room for by now."""
        wishes = self._wishes
        granted = sum(bool(wish.wait(0.05)) for wish in wishes)
        if wishes is self._wishes:
            self._granted = granted

    def handles(self) -> list[ProcessHandle]:
        """Of its processes, in rank order."""
        return list(self._handles)

    def pids(self) -> list[int]:
        """Of the pool's processes, in rank order."""
        return [handle.facts.pid for handle in self._handles if handle.facts is not None]

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts of the pool's processes, in rank order."""
        return [handle.facts.host for handle in self._handles if handle.facts is not None]

    @property
    def lost(self) -> ProcessLost | None:
        """Why its processes are of no use any more; None: they are."""
        return self._lost

    def lose(self, handle: ProcessHandle, how: str, error: Any = None) -> None:
        """A process is gone, and with it the pool's world; calls under way fail."""
        if handle in self._handles:
            self.fail(ProcessLost(self._told(handle, how, error)))

    def fail(self, error: ProcessLost) -> None:
        """The processes are of no use any more: end those that are left, which wait in vain."""
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = error
            self._abandon(error)
        for handle in self.handles():
            self._cluster.end(handle)
        # Who waits for a call elsewhere is told now; that it is replaced comes after that call.
        self._cluster.tell(error)

    def _abandon(self, error: ProcessLost) -> None:
        """What waits for the processes waits in vain."""

    def _told(self, handle: ProcessHandle, how: str, error: Any) -> str:
        where = f" (pid {handle.facts.pid} on {handle.facts.host})" if handle.facts else ""
        lines = last_lines(handle.log)
        if not lines and "creation task" in str(error):  # it never came so far as to have a log
            how += f" as it began: {str(error).strip().splitlines()[-1].strip()}"
        rest = f"{LOG_FOLLOWS} {handle.log}:\n{lines}" if lines else ""
        return f"process {handle.name}{where} {how}{rest}"

    def beat(self, seconds: float) -> Iterator[str]:
        """Look after every process; lines that somebody should see."""
        if not self._looking.acquire(blocking=False):
            return  # somebody else is
        try:
            yield from self._beat(seconds)
        finally:
            self._looking.release()

    def _beat(self, seconds: float) -> Iterator[str]:
        for handle in self.handles():
            if self._lost is not None or self._closed:
                return
            if handle.facts is None:
                continue
            now = time.monotonic()
            if handle.beating is None:
                handle.beating = handle.actor.pulse.remote(), now
                continue
            reference, since = handle.beating
            done, _ = ray_calls.wait([reference], 0)
            if not done:
                if now - since > seconds:
                    self.lose(handle, f"has given no sign of life for {now - since:.0f} seconds")
                continue
            handle.beating = None
            try:
                pulse = ray_calls.get(reference)
            except ray_calls.Died as error:
                self.lose(handle, "died", error)
                return
            for line in pulse.lines:
                yield f"{handle.name} {line}"


def last_lines(log: Path | None) -> str:
    """The end of a process's log."""
    try:
        lines = log.read_text(errors="replace").splitlines() if log is not None else []
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def again(error: ProcessLost) -> ProcessLost:
    """The same to be raised once more: notes gather on each by itself."""
    return ProcessLost(*error.args)
