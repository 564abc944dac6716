"""Ray: host processes as actors, their pools as executors, the object store between them.

The only file that knows Ray. A pool's process is an actor (``hjax.controller.process`` is what it
runs); a message goes to every process of its pool, results go from process to process as objects
of Ray's store, and the controller holds references to them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import queue
import secrets
import signal
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from hjax import pieces
from hjax.controller.futures import DEADLINE_SECONDS, Future
from hjax.controller.hosts import RESOURCE, Room, rooms
from hjax.controller.messages import Build, Call, Message, ResultOf, from_bytes
from hjax.controller.process import (
    LARGE,
    Elsewhere,
    Facts,
    HostProcess,
    Outcome,
    Posted,
    Pulse,
    Setup,
    Written,
    read_all,
    versions,
    write,
)
from hjax.controller.timeline import Timeline
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.machine import available_cores, children, descendants, end_all, name_of, state
from hjax.pieces import Pieces
from hjax.user_files import imported

LOOPBACK = "127.0.0.1"
START_SECONDS = 180
STOP_SECONDS = 10
# For which one place is waited while there are others to try.
ROOM_SECONDS = 4
LOG_LINES = 12
# Parcels of messages to a pool that have not been answered; later messages wait and go together.
UNDER_WAY = 8
# Without these of its processes no part of Ray works.
SERVERS = ("gcs_server", "raylet")


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in Ray's object store."""

    reference: Any

    def fetch(self) -> np.ndarray:
        """The array, read-only; of this host's store without a copy."""
        return _arrived(self.reference)


class RayStore:
    """Ray's object store, as a process sees it."""

    def put(self, value: np.ndarray) -> StoredArray:
        """Leave an array."""
        return StoredArray(ray.put(value))

    def get(self, references: Sequence[Any]) -> list[Any]:
        """What stands behind references; waits for it."""
        return _arrived(list(references))

    def is_reference(self, value: Any) -> bool:
        """Whether a value is a reference into the store."""
        return isinstance(value, ray.ObjectRef)


def _arrived(references: Any) -> Any:
    try:
        return ray.get(references, timeout=DEADLINE_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise RunError(
            f"what another process made has not arrived within {DEADLINE_SECONDS:g} seconds"
        ) from None


class _Process:
    """A host process as an actor; its own thread runs the messages."""

    def __init__(self) -> None:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
        self._process = HostProcess(RayStore(), ray.util.get_node_ip_address())
        self._threads = concurrent.futures.ThreadPoolExecutor(4)

    async def prepare(self, setup: Written) -> tuple[Facts, str]:
        facts = await self._beside(lambda: self._process.prepare(from_bytes(setup.data)))
        return facts, ray.get_runtime_context().get_node_id()

    async def join(self, coordinator: str) -> dict[str, Any]:
        return await self._beside(lambda: self._process.join(coordinator))

    async def run(self, sequence: int, parcel: Sequence[Posted]) -> list[Outcome]:
        outcomes = self._process.submit(sequence, parcel)
        return [await asyncio.wrap_future(outcome) for outcome in outcomes]

    async def export(self, number: int, reads: frozenset[str] | None) -> dict[Any, Written]:
        # An error is written down like any result.
        with contextlib.suppress(BaseException):
            await asyncio.shield(asyncio.wrap_future(self._process.result(number)))
        return await self._beside(lambda: self._process.export(number, reads))

    async def pulse(self) -> Pulse:
        return self._process.pulse()

    async def machine(self) -> dict[str, Any]:
        return await self._beside(self._process.machine)

    async def stop(self) -> None:
        await self._beside(self._process.stop)

    async def _beside(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)


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


@dataclasses.dataclass(frozen=True)
class _Memory:
    kind: str


@dataclasses.dataclass
class _Handle:
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
    facts: Facts | None = None
    node: str = ""
    offset: float = 0.0
    beating: tuple[Any, float] | None = None


class RayFuture(Future):
    """A result that stays where it was made until somebody asks for it."""

    def __init__(self, executor: RayExecutor, number: int, inner: Any, label: str):
        super().__init__(inner, label)
        self.executor, self.number = executor, number
        self.start = executor.starts
        weakref.finalize(self, executor.forget, number)

    def result(self, timeout_seconds: float = DEADLINE_SECONDS) -> Any:
        """Wait for the value and bring it here; see ``Future``."""
        until = time.monotonic() + timeout_seconds
        super().result(timeout_seconds)
        left = max(until - time.monotonic(), 1.0)
        return self.executor.fetch(self, left)


class RayExecutor:
    """Carries out a pool's messages in its processes.

    Args:
      cluster: that the pool is of.
      name, devices, timeline: as of ``ThreadExecutor``.

    Attributes:
      devices: of each process.
      processes: that there are.
      planned: processes that the pool is to have.
      starts: how often its processes were started; results of those before are gone.
    """

    def __init__(
        self, cluster: RayCluster, name: str, devices: Sequence[Any], timeline: Timeline
    ):
        self.name = name
        self._cluster, self._timeline = cluster, timeline
        self.later = cluster.later
        each, count = cluster.divide(name, len(devices))
        self.devices, self.processes, self.planned = each, count, count
        self._lock = threading.RLock()
        self._looking = threading.Lock()
        self._handles: list[_Handle] = []
        self._group: Any = None
        self._wishes: list[Any] = []  # rooms for processes that are missing
        self._granted = 0
        self._numbers = itertools.count()
        self._sequence = itertools.count()
        # Calls that were not answered, and the pools whose results they take.
        self._waiting: dict[int, tuple[concurrent.futures.Future, str, set[RayExecutor]]] = {}
        self._oldest = (-1, 0.0)  # call that was not answered, and since when it is the oldest
        self._dropped: list[int] = []
        self._outbox: list[tuple[Posted, Message, list[Any]]] = []
        self._under_way = 0
        self._lost: ProcessLost | None = None
        self._closed = False
        self.starts = 0
        self._start()

    # Processes

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
                cluster.memories[:] = [_Memory(kind) for kind in joined[0]["memories"]]
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
                (count, room) for count in counts for room in self._rooms(count, min(counts))
            ]
            for count, room in places:
                seconds = ROOM_SECONDS if len(places) > 1 else START_SECONDS
                ask = functools.partial(self._room, bundle, count, room, seconds)
                if cluster.ask(ask, f"made room for pool {self.name}"):
                    wanted = range(self.planned - count)
                    self._wishes = [self._ask_for([bundle], room) for _ in wanted]
                    return count
            if time.monotonic() > until:
                raise RunError(
                    f"pool {self.name}: no room for {min(counts)} processes with "
                    f"{', '.join(f'{n:g} {kind}' for kind, n in bundle.items())} each within "
                    f"{START_SECONDS} seconds; the cluster has {_resources()}"
                )

    def _rooms(self, processes: int, least: int) -> list[Room]:
        """Where so many processes may stand; nowhere, if fewer would do and these do not fit."""
        cluster = self._cluster
        nodes, each = ray.nodes(), self.devices
        try:
            return rooms(nodes, self.name, cluster.platform, processes, each, cluster.together)
        except ConfigError:
            if processes == least:
                raise
            return []

    def _room(self, bundle: Mapping[str, float], count: int, room: Room, seconds: float) -> bool:
        """Ask for a place and wait for it a while; whether it was given."""
        self._group = self._ask_for([bundle] * count, room)
        if self._group.wait(seconds):
            return True
        remove_placement_group(self._group)
        self._group = None
        return False

    def _ask_for(self, bundles: list[Mapping[str, float]], room: Room) -> Any:
        labels = [dict(room.labels)] * len(bundles) if room.labels else None
        return placement_group(
            [dict(b) for b in bundles], strategy=room.strategy, bundle_label_selector=labels
        )

    def _make(self, rank: int, bundle: Mapping[str, float]) -> _Handle:
        cluster = self._cluster
        options: dict[str, Any] = {
            "num_cpus": bundle["CPU"],
            "max_concurrency": 1000,
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            ),
            "runtime_env": {"env_vars": cluster.environment},
        }
        if "GPU" in bundle:
            options["num_gpus"] = bundle["GPU"]
        if "TPU" in bundle:
            options["resources"] = {"TPU": bundle["TPU"]}
        actor = ray.remote(_Process).options(**options).remote()
        return _Handle(f"{self.name}:{rank}", actor, cluster.log_of(self.name, rank))

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
            done, left = ray.wait(left, timeout=0.5)
            for reference in done:
                self._one(reference, self._handles[references.index(reference)])
            if watched and left:
                for _ in self.beat(self._cluster.heartbeat_seconds):
                    pass
            if error := self._lost or self._cluster.down:
                raise _again(error)
            if left and time.monotonic() > until:
                late = ", ".join(self._handles[references.index(r)].name for r in left)
                raise ProcessLost(f"{late}: not done with {doing} within {START_SECONDS} seconds")
        return [self._one(r, h) for r, h in zip(references, self._handles, strict=True)]

    def _one(self, reference: Any, handle: _Handle) -> Any:
        """A result that is there."""
        try:
            return ray.get(reference)
        except ray.exceptions.RayActorError as error:
            raise ProcessLost(self._told(handle, "died", error)) from error
        except ray.exceptions.RayTaskError as error:
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
            _, missing = ray.wait(references, num_returns=len(references), timeout=left)
            if not missing:
                return ray.get(references)
            if error := self._lost or self._cluster.down:
                raise _again(error)
            if time.monotonic() >= until:
                raise RunError(late)

    def _kill(self) -> None:
        handles, groups = self.leave()
        for handle in handles:
            if self._cluster.down is None:
                with contextlib.suppress(Exception):  # it may be gone; ``end`` sees to it
                    ray.kill(handle.actor, no_restart=True)
            self._cluster.end(handle)
        for each in groups if self._cluster.down is None else ():
            with contextlib.suppress(Exception):  # Ray gives it up with the run at the latest
                room = f"given up the room of pool {self.name}"
                self._cluster.ask(functools.partial(remove_placement_group, each), room)

    def leave(self) -> tuple[list[_Handle], list[Any]]:
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
        with self._lock:
            self._fail_waiting(ProcessLost(f"pool {self.name} was started anew"))
            self._sequence = itertools.count()
            self._dropped, self._outbox, self._under_way = [], [], 0
        self._kill()
        self._cluster.revive()
        self._start(counts)

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

    # Messages

    def submit(self, message: Message) -> Future:
        """Send a message to every process of the pool."""
        with self._lock:
            if self._closed:
                raise RunError(f"{message.label} was called after its pool was closed")
            number = next(self._numbers)
            inner: concurrent.futures.Future = concurrent.futures.Future()
            future = RayFuture(self, number, inner, message.label)
            if self._lost is not None:
                inner.set_exception(_again(self._lost))
                return future
            used: list[Any] = []  # results that must stay until this message has run
            arguments = self._sent(message.arguments, message, used)
            options = self._sent(dict(message.options), message, used)
            if isinstance(message, Build):
                sent: Message = Build(message.role, message.worker, arguments, options)
            else:
                sent = Call(message.role, message.method, arguments, options, message.reads)
            written = write(sent, RayStore())
            dropped, self._dropped = self._dropped, []
            self._cluster.sent_bytes += len(written.data) * len(self._handles)
            sources = {x.executor for x in used if x.executor is not self}
            self._waiting[number] = inner, message.label, sources
            self._outbox.append((Posted(number, written, tuple(dropped)), message, used))
            self._send()
        return future

    def _send(self) -> None:
        """Send what waits, all in one, unless much is under way: then it waits for an answer.

        No two messages can wait for each other so: one takes results of earlier ones only, and
        those are sent before it.
        """
        if not self._outbox or self._under_way >= UNDER_WAY:
            return
        waiting, self._outbox = self._outbox, []
        parcel, sequence = [posted for posted, _, _ in waiting], next(self._sequence)
        references = [handle.actor.run.remote(sequence, parcel) for handle in self._handles]
        self._under_way += 1
        _Gather(self, [(posted.number, message, used) for posted, message, used in waiting],
                references, list(self._handles))  # fmt: skip

    def _sent(self, value: Any, message: Message, used: list[Any]) -> Any:
        """A message's values with results by reference, and large arrays cut by rows."""
        reads = message.reads if isinstance(message, Call) else None

        def leaf(x: Any) -> Any:
            if isinstance(x, RayFuture):
                used.append(x)
                if x.executor is not self:
                    return Elsewhere(tuple(x.executor.export(x, reads)))
                self._check_start(x)
                return ResultOf(x.number)
            if isinstance(x, Future):
                return x.result()
            if isinstance(x, jax.Array):
                x = np.asarray(x)
            if isinstance(x, np.ndarray) and x.nbytes >= LARGE and x.dtype.kind not in "OUSMm":
                return by_rows(x, self.processes)
            return x

        return pieces.map_leaves(leaf, value)

    def gathered(
        self, sent: Sequence[_Sent], answers: Sequence[Any], handles: Sequence[_Handle]
    ) -> None:
        """All processes have answered to messages that went together, or failed to."""
        for handle, answer in zip(handles, answers, strict=True):
            if isinstance(answer, ray.exceptions.RayActorError):
                self.lose(handle, "died", answer)
                return
        with self._lock:
            if list(handles) == self._handles:
                self._under_way -= 1
                self._send()
        for i, (number, message, _) in enumerate(sent):
            outcomes = [a if isinstance(a, BaseException) else a[i] for a in answers]
            self._ended(number, message, outcomes, handles)

    def _ended(
        self, number: int, message: Message, outcomes: Sequence[Any], handles: Sequence[_Handle]
    ) -> None:
        with self._lock:
            inner, _, _ = self._waiting.pop(number, (None, "", set()))
        if inner is None:
            return
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                inner.set_exception(RunError(f"{message.label}: {outcome}"))
                return
            if outcome.error is not None:
                inner.set_exception(from_bytes(outcome.error))
                return
        if isinstance(message, Call) and outcomes[0].phase:
            starts = [o.start + h.offset for o, h in zip(outcomes, handles, strict=True)]
            ends = [o.end + h.offset for o, h in zip(outcomes, handles, strict=True)]
            phase = outcomes[0].phase
            self._timeline.add(
                self.name, message.role, message.method, phase, min(starts), max(ends)
            )
        inner.set_result(None)

    def lose(self, handle: _Handle, how: str, error: Any = None) -> None:
        """A process is gone, and with it the pool's world; calls under way fail."""
        if handle in self._handles:
            self.fail(ProcessLost(self._told(handle, how, error)))

    def fail(self, error: ProcessLost) -> None:
        """The processes are of no use any more: end those that are left, which wait in vain."""
        with self._lock:
            if self._lost is not None or self._closed:
                return
            self._lost = error
            self._fail_waiting(error)
        for handle in list(self._handles):
            self._cluster.end(handle)

    def _fail_waiting(self, error: ProcessLost) -> None:
        waiting, self._waiting = list(self._waiting.values()), {}
        for inner, label, _ in waiting:
            told = _again(error)
            told.add_note(f"in the call {label}")
            if not inner.done():
                inner.set_exception(told)

    def _told(self, handle: _Handle, how: str, error: Any) -> str:
        where = f" (pid {handle.facts.pid} on {handle.facts.host})" if handle.facts else ""
        lines = last_lines(handle.log)
        if not lines and "creation task" in str(error):  # it never came so far as to have a log
            how += f" as it began: {str(error).strip().splitlines()[-1].strip()}"
        rest = f"; the last lines of {handle.log}:\n{lines}" if lines else ""
        return f"process {handle.name}{where} {how}{rest}"

    # Results

    def export(self, future: RayFuture, reads: frozenset[str] | None) -> list[Any]:
        """References to what each process writes down of a result."""
        self._check_start(future)
        return [handle.actor.export.remote(future.number, reads) for handle in self._handles]

    def _check_start(self, future: RayFuture) -> None:
        if future.start != self.starts:
            raise ProcessLost(f"{future.label}: its result went with pool {self.name}'s processes")

    def fetch(self, future: RayFuture, seconds: float) -> Any:
        """A result, brought to the controller."""
        with self._lock:
            if self._lost is not None:
                raise _again(self._lost)
            references = self.export(future, None)
        late = f"{future.label} has not been brought here within {seconds:g} seconds"
        try:
            value = pieces.whole(read_all(self._get(references, seconds, late)))
        except ray.exceptions.RayActorError as error:
            self._cluster.check()
            raise _again(self._lost or ProcessLost(f"pool {self.name}: {error}")) from None
        self._cluster.fetched_bytes += size_of(value)
        return value

    def forget(self, number: int) -> None:
        """Nobody will ask for a result; its processes are told with the next message."""
        self._dropped.append(number)

    # The cluster's questions

    def first_taking_from(self, others: set[RayExecutor]) -> _Taking | None:
        """The first call that was not answered and takes results of others.

        None where there is none, or one process alone, which waits for no other.
        """
        if self.processes == 1 or not others:
            return None
        with self._lock:
            waiting = list(self._waiting.items())
        for i, (number, (_, _, sources)) in enumerate(waiting):
            if sources & others:
                return _Taking(number, at_work=i == 0)
        return None

    def beat(self, seconds: float) -> Iterator[str]:
        """Look after every process; lines that somebody should see."""
        if not self._looking.acquire(blocking=False):
            return  # somebody else is
        try:
            yield from self._beat(seconds)
        finally:
            self._looking.release()

    def _beat(self, seconds: float) -> Iterator[str]:
        self._look_at_calls()
        for handle in list(self._handles):
            if self._lost is not None or self._closed:
                return
            if handle.facts is None:
                continue
            now = time.monotonic()
            if handle.beating is None:
                handle.beating = handle.actor.pulse.remote(), now
                continue
            reference, since = handle.beating
            done, _ = ray.wait([reference], timeout=0)
            if not done:
                if now - since > seconds:
                    self.lose(handle, f"has given no sign of life for {now - since:.0f} seconds")
                continue
            handle.beating = None
            try:
                pulse = ray.get(reference)
            except ray.exceptions.RayActorError as error:
                self.lose(handle, "died", error)
                return
            for line in pulse.lines:
                yield f"{handle.name} {line}"

    def _look_at_calls(self) -> None:
        """Processes that answer may hang in a program; a call may take so long and no more."""
        now, most = time.monotonic(), self._cluster.call_seconds
        with self._lock:
            number, (_, label, _) = next(iter(self._waiting.items()), (-1, (None, "", set())))
            if number != self._oldest[0]:
                self._oldest = number, now
        if number >= 0 and now - self._oldest[1] > most and self._handles:
            how = f"has been at {label} for {most:g} seconds (cluster.call_seconds)"
            self.lose(self._handles[0], how)

    def machine(self) -> list[dict[str, Any]]:
        """What each process's probe reads."""
        late = f"pool {self.name} has not said within 60 seconds how its machines are"
        return self._get([h.actor.machine.remote() for h in self._handles], 60, late)

    def close(self) -> None:
        """Let the message under way finish; see ``Executor``."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        for inner, label, _ in waiting:
            if not inner.done():
                inner.set_exception(RunError(f"{label} was not waited for: its pool was closed"))
        if self._lost is None:
            with contextlib.suppress(Exception):  # who does not stop in time is killed
                self._get([h.actor.stop.remote() for h in self._handles], STOP_SECONDS, "late")
        self._kill()
        self._cluster.closed(self)


@dataclasses.dataclass(frozen=True)
class _Taking:
    """A call that takes what may not come: its number, and whether all before it are answered."""

    number: int
    at_work: bool


# Number, message, and the results that must stay until it has run.
_Sent = tuple[int, Message, list[Any]]


class _Gather:
    """Waits for the answers of a pool's processes to messages that went together."""

    def __init__(
        self,
        executor: RayExecutor,
        sent: Sequence[_Sent],
        references: Sequence[Any],
        handles: Sequence[_Handle],
    ):
        self._executor, self._sent, self._handles = executor, sent, handles
        self._outcomes: list[Any] = [None] * len(references)
        self._left = len(references)
        self._lock = threading.Lock()
        later = executor.later
        for rank, reference in enumerate(references):
            # Called in a thread of Ray's own, which must not wait for anything.
            reference.future().add_done_callback(
                lambda done, rank=rank: later(lambda: self._done(rank, done))
            )

    def _done(self, rank: int, done: concurrent.futures.Future) -> None:
        error = done.exception()
        with self._lock:
            self._outcomes[rank] = error if error is not None else done.result()
            self._left -= 1
            if isinstance(error, ray.exceptions.RayActorError):
                # The others may wait for this one for ever.
                self._executor.lose(self._handles[rank], "died", error)
            if self._left:
                return
        self._executor.gathered(self._sent, self._outcomes, self._handles)
        self._sent = ()


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
      probe: read in every process, see ``Setup``.
      say: told what a person should see.

    Attributes:
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
        self.environment = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"}
        self._executors: list[RayExecutor] = []
        self.down: ProcessLost | None = None
        self._address, self._cores = address, processes + host_processes
        self._silent_since: float | None = None
        self._started = _connect(address, self._cores)
        try:
            self._meet()
            self.platform = _platform()
            self.each = devices_per_process or self._devices_of_a_host(processes)
            self.devices = [
                RemoteDevice(number, self.platform, self.memories)
                for number in range(processes * self.each)
            ]
        except BaseException:
            self._disconnect()
            raise
        self._answers: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.later = self._answers.put
        self._answering = threading.Thread(target=self._answer, name="answers", daemon=True)
        self._answering.start()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look_after, name="heartbeat", daemon=True)
        self._watch.start()

    def _devices_of_a_host(self, processes: int) -> int:
        if self.platform == "cpu":
            return max(available_cores() // processes, 1)
        kind = self.platform.upper()
        counts = {int(n["Resources"].get(kind, 0)) for n in ray.nodes() if n["Alive"]} - {0}
        if len(counts) != 1:
            raise ConfigError(
                f"cluster.devices_per_process=0: the hosts have {sorted(counts)} {kind}s; "
                "say how many each process takes"
            )
        return counts.pop()

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

    def setup(self, executor: RayExecutor, rank: int) -> Written:
        """What a process is told before it starts, written down."""
        log = self.log_of(executor.name, rank)
        platform = self.platform if executor.devices else "cpu"
        setup = Setup(
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
        return write(setup, RayStore())

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

    def _meet(self) -> None:
        """Take note of where Ray is."""
        context = ray.get_runtime_context()
        self._node, self._head = context.get_node_id(), context.gcs_address
        found = {pid: name_of(pid) for pid in children(os.getpid())}
        self._servers = {pid: name for pid, name in found.items() if name in SERVERS}
        self._kin: list[int] = []

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
                raise _again(self.down)
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
        since: dict[tuple[RayExecutor, int], float] = {}
        while True:
            gone = {executor for executor in self._executors if executor.lost is not None}
            behind = {e: e.first_taking_from(gone) for e in self._executors if e not in gone}
            if not any(behind.values()):
                return [executor for executor in self._executors if executor in gone]
            for executor, found in behind.items():
                if found is None or not found.at_work:
                    continue
                begun = since.setdefault((executor, found.number), time.monotonic())
                if time.monotonic() - begun > self.heartbeat_seconds:
                    # One of its processes has what it needs, and waits in a program for another
                    # that does not.
                    names = ", ".join(other.name for other in gone)
                    why = f"pool {executor.name} waits for what was lost with pool {names}"
                    executor.fail(ProcessLost(why))
            time.sleep(0.02)

    def check(self) -> None:
        """Look after every process now; waits until each has answered or is known to be gone."""
        self._look_at_servers()
        until = time.monotonic() + self.heartbeat_seconds + 1
        for executor in list(self._executors):
            for handle in list(executor._handles):
                if executor.lost is not None or self.down is not None:
                    break
                left = max(until - time.monotonic(), 0.1)
                try:
                    executor._get([handle.actor.pulse.remote()], left, "")
                except ray.exceptions.RayActorError as error:
                    executor.lose(handle, "died", error)
                except ProcessLost:
                    break
                except RunError:
                    executor.lose(handle, "does not answer")

    def _look_at_servers(self) -> None:
        """Without its servers Ray answers nobody, and ends this process after a minute."""
        if self.down is not None:
            return
        for pid, name in self._servers.items():
            if state(pid) in ("", "Z", "X"):
                return self._lose_servers(f"Ray's {name} (pid {pid} on this machine) died")
        self._kin = [kin for pid in self._servers for kin in descendants(pid)]
        stopped = [(pid, name) for pid, name in self._servers.items() if state(pid) in "Tt"]
        if not stopped and (self._servers or reachable(self._head)):
            self._silent_since = None
            return
        now = time.monotonic()
        since = self._silent_since = self._silent_since or now
        if now - since > self.heartbeat_seconds:
            pid, name = stopped[0] if stopped else (0, "")
            who = f"Ray's {name} (pid {pid} on this machine)" if pid else f"Ray at {self._head}"
            self._lose_servers(f"{who} has given no sign of life for {now - since:.0f} seconds")

    def _lose_servers(self, why: str) -> None:
        self.down = ProcessLost(why)
        for executor in list(self._executors):
            executor.fail(self.down)
        end_all([*self._servers, *self._kin])

    def revive(self) -> None:
        """Start Ray again if it is gone, and was started here."""
        if self.down is None or not self._started:
            return
        for executor in self._executors:
            executor.fail(self.down)
            for handle in executor.leave()[0]:
                self.end(handle)
        self._disconnect()
        _connect(self._address, self._cores)
        self._meet()
        self.down, self._silent_since = None, None

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

    def end(self, handle: _Handle) -> None:
        """End a process that may not hear any more."""
        if handle.facts is None:
            return
        if handle.node == self._node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(handle.facts.pid, signal.SIGKILL)
        elif self.down is None:
            with contextlib.suppress(Exception):  # its host may be gone
                strategy = NodeAffinitySchedulingStrategy(handle.node, soft=False)
                kill = ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=strategy)
                ray.get(kill.remote(handle.facts.pid, signal.SIGKILL), timeout=STOP_SECONDS)

    def machine(self) -> list[list[dict[str, Any]]]:
        """What every process's probe reads, by pool; a pool that is lost says nothing."""
        said = []
        for executor in list(self._executors):
            if executor.devices and executor.lost is None:
                # It may be lost while it is asked, and not be known to be.
                with contextlib.suppress(ProcessLost, ray.exceptions.RayActorError):
                    said.append(executor.machine())
        return said

    def closed(self, executor: RayExecutor) -> None:
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
        if self._started and ray.is_initialized():
            end_here()


_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def start_here(processes: int) -> None:
    """Start a Ray cluster of this machine alone; clusters made after use it, one or several.

    Args:
      processes: that it has room for.

    Raises:
      RunError: it does not start.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        # Ray asks for a token of itself; one of this cluster's own is written to no file.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray would let its workers give way to everything else on the machine; here they do the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with warnings.catch_warnings():
        # Where Ray is started again JAX is there already, of which no child makes use.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            with kept_signals():
                ray.init(
                    "local",
                    num_cpus=max(processes, available_cores()),
                    include_dashboard=False,
                    _node_ip_address=LOOPBACK,
                    **_QUIET,
                )
        except Exception as error:
            raise RunError(f"Ray did not start on this machine: {first_line(error)}") from error


def end_here() -> None:
    """End what ``start_here`` started."""
    ray.shutdown()


def _connect(address: str, processes: int) -> bool:
    """Join a cluster, or start one; returns whether it was started.

    Raises:
      ConfigError: there is none at the address.
    """
    if ray.is_initialized():
        return False
    if address in ("", "local"):
        start_here(processes)
        return True
    try:
        with kept_signals():
            ray.init(address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address!r}: no Ray cluster answers there ({first_line(error)}); "
            "start one with `ray start --head`, or leave it empty to start one on this machine"
        ) from error
    return False


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Afterwards SIGTERM means what it did: Ray's core takes it, to print where it came."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    """What an error says first; its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _platform() -> str:
    if (os.environ.get("JAX_PLATFORMS") or "").split(",")[0] == "cpu":
        return "cpu"
    resources = ray.cluster_resources()
    if resources.get("GPU"):
        return "gpu"
    return "tpu" if resources.get("TPU") else "cpu"


def _resources() -> str:
    kinds = ("CPU", "GPU", "TPU")
    return ", ".join(f"{n:g} {k}" for k, n in ray.cluster_resources().items() if k in kinds)


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


def _options() -> dict[str, Any]:
    options: Any = jax.config
    return {name: options.values[name] for name in _OPTIONS if name in options.values}


def _flags() -> str:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(f for f in flags if "xla_force_host_platform_device_count" not in f)


def by_rows(x: np.ndarray, parts: int) -> Any:
    """An array of the controller's, cut by rows, so that every process takes its own."""
    if not x.ndim or x.shape[0] < parts:
        return x
    ends = [x.shape[0] * i // parts for i in range(parts + 1)]
    rest = tuple((0, n) for n in x.shape[1:])
    cut = zip(ends[:-1], ends[1:], strict=True)
    return Pieces(x.shape, x.dtype, tuple((((a, b), *rest), x[a:b]) for a, b in cut))


def size_of(value: Any) -> int:
    """Bytes of the arrays in a value."""
    total = 0

    def leaf(x: Any) -> None:
        nonlocal total
        total += getattr(x, "nbytes", 0)

    pieces.map_leaves(leaf, value)
    return total


def last_lines(log: Path | None) -> str:
    """The end of a process's log."""
    try:
        lines = log.read_text(errors="replace").splitlines() if log is not None else []
    except OSError:
        return ""
    return "\n".join(lines[-LOG_LINES:])


def _again(error: ProcessLost) -> ProcessLost:
    """The same to be raised once more: notes gather on each by itself."""
    return ProcessLost(*error.args)


def reachable(address: str) -> bool:
    """Whether somebody takes connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True


def end_with(parent: int) -> None:
    """End this process soon after its parent, and the parent's other children.

    Ray's own do not all end where their raylet, the parent, was killed.
    """
    kin: list[int] = []
    while os.getppid() == parent:
        kin = children(parent)
        time.sleep(1)
    end_all(kin)
    os._exit(1)
