"""All calls of Ray: clusters, placement groups, actors, the object store.

This is the only file that imports Ray. Processes (``ray_process``), pools (``ray_pool``,
``ray_executor``) and the cluster (``ray_cluster``) build on it. Ray answers nothing without its own
server processes, so ``RayServers`` watches those from outside of Ray.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hjax.controller.futures import DEADLINE_SECONDS
from hjax.controller.hosts import ProcessPlacement
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.files import open_regular
from hjax.machine import (
    TEMPORARY_FOLDERS,
    available_cores,
    children,
    descendants,
    kill_all,
    process_name,
    process_state,
)

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as error:
    raise ConfigError(
        "config.cluster asks for processes of their own, which Ray starts, and it is not "
        f"installed ({error}): pip install 'hjax[cluster]'"
    ) from error

# An actor's process died; a remote call raised; the base class of both and of Ray's other errors.
ActorDied = ray.exceptions.RayActorError
TaskRaised = ray.exceptions.RayTaskError
RayFailed = ray.exceptions.RayError

# The cluster

# ``nodes`` are its hosts, each with ``Alive``, ``Resources``, ``Labels``, ``NodeID`` and more.
connected, nodes = ray.is_initialized, ray.nodes
_LOOPBACK = "127.0.0.1"
# Beginning of the name of a local cluster's folder; the number of its process follows.
_FOLDER = "hjax-ray-"
# Within it: the lock of that process, and the folder that Ray opens to every user.
_LOCK, _OPEN = "lock", "r"
# Bytes in the path of a Unix socket.
_MAX_SOCKET_PATH = 107
# For a connection to a cluster's address.
_CONNECT_SECONDS = 10.0
_QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}


def start_local_cluster(processes: int) -> None:
    """Start a Ray cluster on this machine alone, which later clusters use.

    Args:
      processes: that it must have room for.

    Raises:
      RunError: it does not start.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        # Ray requires a token; this one belongs to this cluster and is written to no file.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray would run its workers at low priority; here they do the work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    folder = _make_folder()
    with warnings.catch_warnings(), _bound_to_loopback():
        # After a restart of Ray JAX is loaded already; no child uses it.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            with kept_signals():
                ray.init(
                    "local",
                    num_cpus=max(processes, available_cores()),
                    include_dashboard=False,
                    _node_ip_address=_LOOPBACK,
                    _temp_dir=str(folder / _OPEN),
                    _system_config={"enable_metrics_collection": False},
                    **_QUIET,
                )
        except Exception as error:
            servers = [pid for pid in children(os.getpid()) if process_name(pid) in SERVER_NAMES]
            kill_all([*servers, *(kin for pid in servers for kin in descendants(pid))])
            end_here()
            free = shutil.disk_usage(folder.parent).free >> 20
            raise RunError(
                f"Ray did not start on this machine: {first_line(error)}; its folder is in "
                f"{folder.parent}, where {free} MiB are free (RAY_TMPDIR names another)"
            ) from error


def _make_folder() -> Path:
    """Make and lock the folder of a local cluster; those of ended processes are removed.

    Raises:
      RunError: it cannot be made.
    """
    parent = _folder_of_clusters()
    for left in parent.glob(f"{_FOLDER}*"):
        if _is_left_over(left):
            shutil.rmtree(left, ignore_errors=True)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-", dir=parent))
        TEMPORARY_FOLDERS[folder] = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        _lock(TEMPORARY_FOLDERS[folder])
        (folder / _OPEN).mkdir()
    except OSError as error:
        _remove_own_folders()
        raise RunError(
            f"Ray's folder cannot be made in {parent} ({error.strerror}); set RAY_TMPDIR"
        ) from error
    return folder


def _is_left_over(folder: Path) -> bool:
    """Whether the process that made a folder has ended.

    Its number may be of another container or host that shares the directory, so its lock counts
    too.
    """
    pid = folder.name.split("-")[2]
    if not os.path.isdir("/proc/self") or not pid.isdecimal() or process_state(int(pid)):
        return False
    try:
        with open(folder / _LOCK, "r+b", opener=open_regular) as file:
            return _lock(file.fileno())
    except OSError:
        return True  # it was killed before it had one


def _lock(handle: int) -> bool:
    """Lock a file until this process ends; False: another process has locked it."""
    try:
        import fcntl

        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # not a POSIX system, a file system without locks
        pass
    return True


def _remove_own_folders() -> None:
    while TEMPORARY_FOLDERS:
        folder, handle = TEMPORARY_FOLDERS.popitem()
        until = time.monotonic() + 5
        while folder.exists() and time.monotonic() < until:
            shutil.rmtree(folder, ignore_errors=True)  # servers that end may be writing
            time.sleep(0.05)
        os.close(handle)


def sockets_removed() -> str:
    """The folder of the cluster that this process started if Ray's sockets in it were removed;
    empty: they are there. Without them it works, but no further process can join."""
    socket = f"{_OPEN}/session_latest/sockets/raylet"
    return next((str(x) for x in TEMPORARY_FOLDERS if not (x / socket).exists()), "")


def _folder_of_clusters() -> Path:
    """Where folders of local clusters go: RAY_TMPDIR, or the temporary directory.

    Raises:
      ConfigError: RAY_TMPDIR's path is too long for Ray's sockets, or not ASCII. A temporary
        directory of such a path is not used, but /tmp.
    """
    named, pid = os.environ.get("RAY_TMPDIR"), os.getpid()
    parent = Path(named or tempfile.gettempdir()).absolute()
    session = f"session_2000-01-01_00-00-00_000000_{pid}"
    longest = f"/{_FOLDER}{pid}-12345678/{_OPEN}/{session}/sockets/plasma_store"
    room = _MAX_SOCKET_PATH - len(longest)
    if os.name != "posix" or (str(parent).isascii() and len(str(parent)) <= room):
        return parent
    if named:
        raise ConfigError(
            f"RAY_TMPDIR={named}: Ray's sockets go there, so its full path must be ASCII and "
            f"have at most {room} characters; name another directory"
        )
    return Path("/tmp")


@contextlib.contextmanager
def _bound_to_loopback() -> Iterator[None]:
    """Ray's servers that start in the block listen on the loopback address alone.

    Unless it believes that there are no clusters on this system Ray replaces that address by one
    that other machines reach.
    """
    constants, name = ray._private.ray_constants, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, variable = getattr(constants, "ENABLE_RAY_CLUSTER", True), os.environ.get(name)
    constants.ENABLE_RAY_CLUSTER, os.environ[name] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if variable is None:
            del os.environ[name]
        else:
            os.environ[name] = variable


def end_here() -> None:
    """Leave the cluster; one that ``start_local_cluster`` started ends, and its folder goes."""
    ray.shutdown()
    _remove_own_folders()


def connect(address: str, processes: int) -> bool:
    """Join a cluster, or start one; returns whether it was started.

    Raises:
      ConfigError: there is none at the address.
    """
    if connected():
        return False
    if address in ("", "local"):
        start_local_cluster(processes)
        return True
    check_answers(address)
    try:
        with kept_signals():
            ray.init(address, **_QUIET)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address!r}: no Ray cluster answers there ({first_line(error)}); "
            "start one with `ray start --head`, or leave it empty to start one on this machine"
        ) from error
    return False


def check_answers(address: str) -> None:
    """Open a connection to a cluster's ``HOST:PORT``: Ray would try one in vain for minutes.

    Raises:
      ConfigError: nothing answers there.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():  # a word of Ray's own, such as `auto`
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({first_line(error)}); did "
            "`node.sh head` run on that machine, and is the port open from here?"
        ) from error


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Restore SIGTERM's handler afterwards: Ray replaces it to print a stack."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def whereabouts() -> tuple[str, str]:
    """Ray's id of this process's host, and the address of the cluster's head server."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.gcs_address


def host_id() -> str:
    """Ray's id of this process's host."""
    return ray.get_runtime_context().get_node_id()


def host_address() -> str:
    """The address at which the cluster's other hosts reach this one."""
    return ray.util.get_node_ip_address()


def platform() -> str:
    """What the cluster computes on: ``cpu``, ``gpu`` or ``tpu``."""
    if (os.environ.get("JAX_PLATFORMS") or "").split(",")[0] == "cpu":
        return "cpu"
    resources = ray.cluster_resources()
    if resources.get("GPU"):
        return "gpu"
    return "tpu" if resources.get("TPU") else "cpu"


def resources() -> str:
    """The cluster's resources, as text."""
    kinds = ("CPU", "GPU", "TPU")
    return ", ".join(f"{n:g} {k}" for k, n in ray.cluster_resources().items() if k in kinds)


def request_placement(bundles: Sequence[Mapping[str, float]], room: ProcessPlacement) -> Any:
    """Request a placement group, by the resources of each process; it may become ready later."""
    labels = [dict(room.labels)] * len(bundles) if room.labels else None
    return placement_group(
        [dict(b) for b in bundles], strategy=room.strategy, bundle_label_selector=labels
    )


# Releases a placement group; processes in it end.
release_placement = remove_placement_group


def start_process(
    kind: type, bundle: Mapping[str, float], group: Any, rank: int, environment: Mapping[str, str]
) -> Any:
    """Start an actor in its placement group; returns its handle at once.

    Args:
      kind: its class.
      bundle: its resources: ``CPU``, and ``GPU`` or ``TPU``.
      group: of ``request_placement``.
      rank: of the process in the group.
      environment: variables of its process.
    """
    options: dict[str, Any] = {
        "num_cpus": bundle["CPU"],
        "max_concurrency": 1000,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=rank
        ),
        "runtime_env": {"env_vars": dict(environment)},
    }
    if "GPU" in bundle:
        options["num_gpus"] = bundle["GPU"]
    if "TPU" in bundle:
        options["resources"] = {"TPU": bundle["TPU"]}
    return ray.remote(kind).options(**options).remote()


def kill(actor: Any) -> None:
    """Kill an actor's process."""
    ray.kill(actor, no_restart=True)


def kill_on_node(node: str, pid: int) -> Any:
    """Kill a process on another host; returns a reference that is ready once that is done."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=strategy)
    return task.remote(pid, signal.SIGKILL)


def run_on_host(address: str, function: Callable[[], Any], takes: Mapping[str, float]) -> Any:
    """Call a function on the host of an address; returns a reference to its result.

    Args:
      takes: resources in the meantime, besides no CPU: ``GPU``.
    """
    where = {f"node:{address}": 0.001}
    task = ray.remote(function).options(num_cpus=0, num_gpus=takes.get("GPU", 0), resources=where)
    return task.remote()


# The object store. ``get`` is for references known to be ready.
get = ray.get


def wait(references: Sequence[Any], seconds: float, count: int = 1) -> tuple[list[Any], list[Any]]:
    """References that are ready and those that are not, once ``count`` are ready or time is up."""
    return ray.wait(list(references), num_returns=count, timeout=seconds)


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in Ray's object store."""

    reference: Any

    def fetch(self) -> np.ndarray:
        """The array, read-only; without a copy if it is in this host's store."""
        return _get_with_deadline(self.reference)


class RayStore:
    """Ray's object store, in a process."""

    def put(self, value: np.ndarray) -> StoredArray:
        """Store an array."""
        return StoredArray(ray.put(value))

    def get(self, references: Sequence[Any]) -> list[Any]:
        """The objects behind references; waits for them."""
        return _get_with_deadline(list(references))

    def is_reference(self, value: Any) -> bool:
        """Whether a value is a reference into the store."""
        return isinstance(value, ray.ObjectRef)


def _get_with_deadline(references: Any) -> Any:
    try:
        return ray.get(references, timeout=DEADLINE_SECONDS)
    except ray.exceptions.GetTimeoutError:
        raise RunError(
            f"what another process made has not arrived within {DEADLINE_SECONDS:g} seconds"
        ) from None
    except (ActorDied, ray.exceptions.ObjectLostError) as error:
        why = first_line(error)
        raise ProcessLost(f"what another process made was lost with it: {why}") from None


# Ray's server processes, without which nothing of it works.
SERVER_NAMES = ("gcs_server", "raylet")
# Children of the raylet, with which it ends, by the beginning of their names that the system keeps.
AGENT_NAMES = {"ray::DashboardA": "dashboard agent", "ray::RuntimeEnv": "environment agent"}


class RayServers:
    """Watches the Ray servers of this process's cluster.

    Attributes:
      node: Ray's id of this host.
    """

    def __init__(self) -> None:
        self.find_processes()

    def find_processes(self) -> None:
        """Find the cluster's head, and the Ray servers that this process started."""
        self.node, self._head = whereabouts()
        found = {pid: process_name(pid) for pid in children(os.getpid())}
        self._here = {pid: name for pid, name in found.items() if name in SERVER_NAMES}
        self._agents: dict[int, str] = {}
        self._descendants: list[int] = []
        self._silent_since: float | None = None

    def failure(self, seconds: float) -> str:
        """Why Ray has failed; empty: it works.

        Args:
          seconds: without response after which it has failed.
        """
        for pid, name in {**self._agents, **self._here}.items():
            if process_state(pid) in ("", "Z", "X"):
                return f"Ray's {name} (pid {pid} on this machine) died"
        found = ((kin, process_name(kin)) for pid in self._here for kin in children(pid))
        self._agents = {pid: AGENT_NAMES[name] for pid, name in found if name in AGENT_NAMES}
        self._descendants = [kin for pid in self._here for kin in descendants(pid)]
        stopped = [(pid, name) for pid, name in self._here.items() if process_state(pid) in "Tt"]
        if not stopped and (self._here or reachable(self._head)):
            self._silent_since = None
            return ""
        now = time.monotonic()
        since = self._silent_since = self._silent_since or now
        if now - since <= seconds:
            return ""
        pid, name = stopped[0] if stopped else (0, "")
        who = f"Ray's {name} (pid {pid} on this machine)" if pid else f"Ray at {self._head}"
        return f"{who} has given no sign of life for {now - since:.0f} seconds"

    def end(self) -> None:
        """Kill the servers started here, and their descendants."""
        kill_all([*self._here, *self._descendants])


def reachable(address: str) -> bool:
    """Whether HOST:PORT accepts connections."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
