"""A process of a pool: runs its share of every message and exports results to other processes.

A pool of several processes is one world (``jax.distributed``): each process runs every message, in
the same order, on its own devices. Results stay on the devices. When another pool or the controller
asks for one, it is written to the object store, each region of an array once, by the process that
holds it. This module does not depend on the store or the transport (``ray_process``).
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import logging
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from hjax import sharded_values
from hjax.controller.executors import MessageQueue, run_message
from hjax.controller.messages import (
    BuildWorker,
    Call,
    Message,
    ResultOf,
    deserialize,
    picklable_error,
    select,
    serialize,
)
from hjax.controller.worker_host import CallResult, WorkerHost
from hjax.errors import RunError
from hjax.files import open_regular
from hjax.machine import ensure_threads
from hjax.sharded_values import ArrayRegions
from hjax.user_code import provide_files

# Arrays of so many bytes or more are stored on their own, smaller ones with what surrounds them.
LARGE_ARRAY_BYTES = 32 << 10
KEPT_LINES = 20


class ObjectStore(Protocol):
    """A store through which processes exchange arrays."""

    def put(self, value: np.ndarray) -> sharded_values.ArrayHandle:
        """Store an array; the handle fetches it in any process."""

    def get(self, references: Sequence[Any]) -> list[Any]:
        """The objects behind references that came with a message."""

    def is_reference(self, value: Any) -> bool:
        """Whether a value is a reference, which must be sent out-of-band."""


@dataclasses.dataclass(frozen=True)
class ProcessSetup:
    """Settings of a process, sent before it starts.

    Attributes:
      pool: its name.
      rank, processes: of the process, and of the pool.
      devices: that it contributes; 0: it computes on the host.
      platform: of JAX; empty: what JAX finds.
      options: of ``jax.config``, by name.
      environment: variables to set.
      log: file for its output; empty: none.
      files: the user's files, as the controller has them, see ``hjax.user_code``.
      probe: built once the devices exist; its ``read()`` reports on the machine.
      seconds: timeout of starting the world.
    """

    pool: str
    rank: int
    processes: int
    devices: int
    platform: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    log: str = ""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    probe: Callable[[], Any] | None = None
    seconds: int = 120


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """What a process says of itself.

    Attributes:
      host, pid: where it is.
      address: host and a free port, for the world that this process would lead.
      versions: of what must be the same everywhere, by name.
    """

    host: str
    pid: int
    address: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class MessageOutcome:
    """The outcome of a message.

    Attributes:
      phase, start, end: as of ``CallResult``, by this process's clock.
      error: serialized; None: success.
    """

    phase: str = ""
    start: float = 0.0
    end: float = 0.0
    error: bytes | None = None


@dataclasses.dataclass(frozen=True)
class SerializedValue:
    """A serialized value.

    Attributes:
      data: pickled bytes.
      kept: out-of-band references.
      failed: the value is an error, to be raised by the reader.
      stored_bytes: bytes of its arrays in the store.
    """

    data: bytes
    kept: tuple[Any, ...] = ()
    failed: bool = False
    stored_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class QueuedMessage:
    """A message in transit.

    Attributes:
      number: under which its result is kept.
      message: serialized.
      dropped: numbers of results that nobody needs after the messages before.
    """

    number: int
    message: SerializedValue
    dropped: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class RemoteResult:
    """Placeholder in a message for a result of another pool: what each of its processes exported.

    Attributes:
      references: to a dict of ``SerializedValue`` by entry, in rank order.
    """

    references: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A heartbeat: the process's clock, and log lines to show."""

    clock: float
    lines: tuple[str, ...]


def serialize_value(value: Any, store: ObjectStore) -> SerializedValue:
    """A value or message serialized, its large arrays in the store."""
    stored_bytes = 0

    def leaf(x: Any) -> Any:
        nonlocal stored_bytes
        if isinstance(x, jax.Array):
            # Imported here: the controller itself knows no devices.
            from hjax.sharding.global_arrays import local_regions

            x = local_regions(x)
        elif is_large(x) and x.dtype.kind not in "OUSMm":
            x = ArrayRegions(x.shape, x.dtype, ((tuple((0, n) for n in x.shape), x),))
        if isinstance(x, ArrayRegions):
            stored_bytes += sum(data.nbytes for _, data in x.parts if is_large(data))
            parts = tuple((region, store_if_large(data, store)) for region, data in x.parts)
            return dataclasses.replace(x, parts=parts)
        return x

    kept: list[Any] = []
    if isinstance(value, BuildWorker | Call):
        arguments, options = (
            sharded_values.map_leaves(leaf, values)
            for values in (value.arguments, dict(value.options))
        )
        value = dataclasses.replace(value, arguments=arguments, options=options)
    else:
        value = sharded_values.map_leaves(leaf, value)
    data = serialize(value, kept, store.is_reference)
    return SerializedValue(data, tuple(kept), stored_bytes=stored_bytes)


def store_if_large(data: Any, store: ObjectStore) -> Any:
    """A small array unchanged; for a large one its handle in the store."""
    return store.put(np.ascontiguousarray(data)) if is_large(data) else data


def is_large(data: Any) -> bool:
    """Whether a value is an array that is stored on its own."""
    return isinstance(data, np.ndarray) and data.nbytes >= LARGE_ARRAY_BYTES


def deserialize_value(written: SerializedValue) -> Any:
    """The value of ``serialize_value``; an error is raised."""
    value = deserialize(written.data, written.kept)
    if written.failed:
        raise value
    return value


def merge_exports(exports: Sequence[Mapping[Any, SerializedValue]]) -> Any:
    """The value of a result, merged from the exports of all processes of a pool."""

    def merged(key: Any) -> Any:
        return sharded_values.merge([deserialize_value(export[key]) for export in exports])

    return merged(None) if None in exports[0] else {key: merged(key) for key in exports[0]}


class HostProcess:
    """A process of a pool.

    Args:
      store: for results that others ask for.
      address: of this host, as the pool's other processes reach it.
    """

    def __init__(self, store: ObjectStore, address: str):
        self._store, self._address = store, address
        self._results: dict[int, concurrent.futures.Future] = {}
        self._lock = threading.Lock()
        # Messages may arrive out of order; they run in the order in which they were sent.
        self._next_sequence = 0
        self._out_of_order: dict[int, tuple[Any, ...]] = {}
        self._exports: dict[tuple[int, Any], concurrent.futures.Future] = {}
        self._lines: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._host: WorkerHost | None = None
        self._messages: MessageQueue | None = None
        self._probe: Any = None
        self._exported_bytes = 0

    def prepare(self, setup: ProcessSetup) -> ProcessInfo:
        """Apply the settings, before JAX starts a backend."""
        self._setup = setup
        if setup.log:
            redirect(Path(setup.log))
            where = f"pid {os.getpid()} on {socket.gethostname()}, {self._address}"
            name = f"process {setup.rank} of {setup.processes} of pool {setup.pool}"
            print(f"{name}: {where}", flush=True)
        logging.getLogger().addHandler(_Notices(self._lines))
        os.environ.update(setup.environment)
        provide_files(setup.files)
        options: Any = jax.config
        for name, value in setup.options.items():
            options.update(name, value)
        if setup.platform:
            options.update("jax_platforms", setup.platform)
        if setup.platform == "cpu":
            options.update("jax_num_cpu_devices", max(setup.devices, 1))
            ensure_threads(setup.devices)
        address = free_address(self._address)
        return ProcessInfo(socket.gethostname(), os.getpid(), address, versions())

    def join(self, coordinator: str) -> dict[str, Any]:
        """Join the world that rank 0 coordinates; returns what its devices are like.

        Raises:
          RunError: there are more or fewer devices than expected.
        """
        setup = self._setup
        devices: list[Any] = []
        if setup.devices:
            if setup.processes > 1:
                jax.distributed.initialize(
                    coordinator, setup.processes, setup.rank,
                    initialization_timeout=setup.seconds, cluster_detection_method="deactivate",
                    coordinator_bind_address=coordinator,  # not every address of the host
                )  # fmt: skip
            here, devices = jax.local_devices(), jax.devices()
            if len(here) != setup.devices or len(devices) != setup.devices * setup.processes:
                raise RunError(
                    f"process {setup.rank} of pool {setup.pool} sees {len(here)} devices, and "
                    f"{len(devices)} in all, not {setup.devices} and "
                    f"{setup.devices * setup.processes}; set cluster.devices_per_process to what "
                    "every process has"
                )
        self._host = WorkerHost(devices, (setup.rank, setup.processes))
        self._messages = MessageQueue(self._run, setup.pool)
        self._probe = setup.probe() if setup.probe is not None else None
        if not devices:
            return {"platform": "cpu", "memories": ()}
        kinds = tuple(memory.kind for memory in jax.local_devices()[0].addressable_memories())
        return {"platform": devices[0].platform, "memories": kinds}

    def stop(self) -> None:
        """Wait for the running message, and leave the world."""
        if self._messages is not None:
            self._messages.close()
        if self._setup.devices and self._setup.processes > 1:
            jax.distributed.shutdown()

    def submit(self, number: int, sent: Sequence[QueuedMessage]) -> list[concurrent.futures.Future]:
        """Queue messages; the futures get their ``MessageOutcome``.

        Args:
          number: position of the parcel among the pool's parcels, from 0.
          sent: messages that are sent together.
        """
        outcomes: list[concurrent.futures.Future] = [concurrent.futures.Future() for _ in sent]
        assert self._messages is not None
        with self._lock:
            self._out_of_order[number] = tuple(zip(sent, outcomes, strict=True))
            while self._next_sequence in self._out_of_order:
                items = self._out_of_order.pop(self._next_sequence)
                self._next_sequence += 1
                for item in items:
                    unread = Call("", "a message that was not read yet")
                    self._messages.put(unread, item, item[1].set_exception)
        return outcomes

    def _run(self, item: tuple[QueuedMessage, concurrent.futures.Future]) -> None:
        queued, outcome = item
        for old in queued.dropped:
            self._drop(old)
        result = self.result(queued.number)
        try:
            message: Message = deserialize_value(queued.message)
            answer = run_message(message, lambda: self._answer(message))
            ends = MessageOutcome(answer.phase, answer.start, answer.end)
            if not answer.background:
                result.set_result(answer.value)
                outcome.set_result(ends)
                return

            def succeed(value: Any) -> None:
                result.set_result(value)
                outcome.set_result(ends)

            assert self._messages is not None
            self._messages.finish_in_background(
                message, answer.value, succeed, lambda error: _set_failed(result, outcome, error)
            )
        except BaseException as error:
            _set_failed(result, outcome, error)

    def _answer(self, message: Message) -> CallResult:
        assert self._host is not None
        arguments = self._resolve(message.arguments)
        options = self._resolve(dict(message.options))
        return self._host.run(dataclasses.replace(message, arguments=arguments, options=options))

    def _resolve(self, value: Any) -> Any:
        """The value with its placeholders replaced by results."""

        def leaf(x: Any) -> Any:
            if isinstance(x, ResultOf):
                return self.result(x.number).result()
            if isinstance(x, RemoteResult):
                return merge_exports(self._store.get(x.references))
            return x

        return sharded_values.map_leaves(leaf, value)

    def result(self, number: int) -> concurrent.futures.Future:
        """The future of a message's result."""
        with self._lock:
            return self._results.setdefault(number, concurrent.futures.Future())

    def pending(self, number: int, reads: frozenset[str] | None) -> list[concurrent.futures.Future]:
        """Futures that ``export`` of a finished result would wait for."""
        found: list[concurrent.futures.Future] = []

        def leaf(x: Any) -> None:
            if isinstance(x, sharded_values.PendingValue) and x.future is not None:
                found.append(x.future)

        sharded_values.map_leaves(leaf, select(self.result(number).result(0), reads))
        return found

    def export(self, number: int, reads: frozenset[str] | None) -> dict[Any, SerializedValue]:
        """Serialize a finished result; of a dict only the entries that are read."""
        try:
            value = self.result(number).result(0)
        except BaseException as error:
            return {None: SerializedValue(serialize(picklable_error(error)), failed=True)}
        if not isinstance(value, Mapping):
            return {None: self._exported(number, None, value)}
        keys = [key for key in value if reads is None or key in reads]
        return {key: self._exported(number, key, value[key]) for key in keys}

    def _exported(self, number: int, key: Any, value: Any) -> SerializedValue:
        """A serialized entry, computed once for all who ask."""
        with self._lock:
            known = self._exports.get((number, key))
            written = self._exports[number, key] = known or concurrent.futures.Future()
        if known is not None:
            return known.result()
        try:
            if self._setup.rank:
                # Replicated values are taken from rank 0; other ranks export only their shards.
                value = sharded_values.map_leaves(
                    lambda x: x if isinstance(x, jax.Array | sharded_values.PartialValue) else None,
                    value,
                )
            written.set_result(serialize_value(value, self._store))
        except BaseException as error:
            written.set_exception(error)
        with self._lock:
            if number not in self._results:  # dropped meanwhile
                self._exports.pop((number, key), None)
            if written.exception() is None:
                self._exported_bytes += len(written.result().data) + written.result().stored_bytes
        return written.result()

    def _drop(self, number: int) -> None:
        with self._lock:
            self._results.pop(number, None)
            for key in [key for key in self._exports if key[0] == number]:
                del self._exports[key]

    def heartbeat(self) -> Heartbeat:
        """A heartbeat with the log lines since the last one."""
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return Heartbeat(time.perf_counter(), tuple(lines))

    def machine(self) -> dict[str, Any]:
        """The probe's figures, and ``given_bytes`` of exported results."""
        read = self._probe.read() if self._probe is not None else {}
        return {"given_bytes": self._exported_bytes, **read}


def _set_failed(result: Any, outcome: Any, error: BaseException) -> None:
    result.set_exception(error)
    outcome.set_result(MessageOutcome(error=serialize(picklable_error(error))))


class _Notices(logging.Handler):
    """Keeps warnings and errors for the next heartbeat."""

    def __init__(self, lines: collections.deque[str]):
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname.lower()}: {record.getMessage()}".splitlines()[0])


def redirect(path: Path) -> None:
    """Redirect all output of this process to a file, that of libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open_regular(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def free_address(host: str) -> str:
    """A free port on a host's address."""
    with socket.socket() as found:
        found.bind((host, 0))
        return f"{host}:{found.getsockname()[1]}"


def versions() -> dict[str, str]:
    """Versions that must be the same in every process."""
    import importlib.metadata

    import hjax

    package = Path(hjax.__file__).parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(str(file.relative_to(package)).encode())
        code.update(file.read_bytes())
    return {
        "Python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "numpy": np.__version__,
        "hjax": f"{hjax.__version__} ({code.hexdigest()[:12]})",
    }
