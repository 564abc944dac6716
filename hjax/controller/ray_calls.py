"""Ray as hjax uses it: starting and joining a cluster, rooms, actors, the object store.

The only file that imports Ray. What hjax makes of it stands beside: processes (``ray_process``),
the pools that they make up (``ray_pool``, ``ray_executor``), the cluster (``ray_cluster``).
``Servers`` are Ray's own processes: without them it answers nobody, so they are watched from
outside of it.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hjax.controller.futures import DEADLINE_SECONDS
from hjax.controller.hosts import ProcessPlacement
from hjax.errors import ConfigError, ProcessLost, RunError
from hjax.machine import available_cores, children, descendants, end_all, name_of, state

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

# Of this machine alone. What is called 127.0.0.1 Ray replaces by an address that others reach.
LOOPBACK = "127.0.0.9" if sys.platform == "linux" else "127.0.0.1"
# An actor's process is gone; a call of it raised; whatever Ray has to say, these two included.
Died = ray.exceptions.RayActorError
Raised = ray.exceptions.RayTaskError
Failed = ray.exceptions.RayError

# The cluster

# Leave it: one that ``start_here`` started ends; whether this process is in one; its hosts, with
# ``Alive``, ``Resources``, ``Labels``, ``NodeID`` and more of each.
end_here, connected, nodes = ray.shutdown, ray.is_initialized, ray.nodes
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


def connect(address: str, processes: int) -> bool:
    """Join a cluster, or start one; returns whether it was started.

    Raises:
      ConfigError: there is none at the address.
    """
    if connected():
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


def whereabouts() -> tuple[str, str]:
    """Ray's id of this process's host, and the address of the cluster's first server."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.gcs_address


def host_id() -> str:
    """Ray's id of this process's host."""
    return ray.get_runtime_context().get_node_id()


def host_address() -> str:
    """At which the cluster's other hosts reach this one."""
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
    """What the cluster has, in words."""
    kinds = ("CPU", "GPU", "TPU")
    return ", ".join(f"{n:g} {k}" for k, n in ray.cluster_resources().items() if k in kinds)


# Rooms and actors


def ask_for(bundles: Sequence[Mapping[str, float]], room: ProcessPlacement) -> Any:
    """Ask for a place for processes, by what each takes; it may be given later."""
    labels = [dict(room.labels)] * len(bundles) if room.labels else None
    return placement_group(
        [dict(b) for b in bundles], strategy=room.strategy, bundle_label_selector=labels
    )


# Give a place back; what stands in it ends.
give_up = remove_placement_group


def start_process(
    kind: type, bundle: Mapping[str, float], group: Any, rank: int, environment: Mapping[str, str]
) -> Any:
    """Start an actor in its place; returns its handle at once.

    Args:
      kind: its class.
      bundle: what it takes of its host: ``CPU``, and ``GPU`` or ``TPU``.
      group: of ``ask_for``.
      rank: which of its places.
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
    """End an actor's process."""
    ray.kill(actor, no_restart=True)


def kill_at(node: str, pid: int) -> Any:
    """Have a process of another host ended; a reference that is there once that is done."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=strategy)
    return task.remote(pid, signal.SIGKILL)


def ask_host(address: str, function: Callable[[], Any], takes: Mapping[str, float]) -> Any:
    """Have a function called on the host of an address; a reference to what it returns.

    Args:
      takes: of the host meanwhile, besides no CPU: ``GPU``.
    """
    where = {f"node:{address}": 0.001}
    task = ray.remote(function).options(num_cpus=0, num_gpus=takes.get("GPU", 0), resources=where)
    return task.remote()


# References and the store


# What stands behind references that are known to be there.
get = ray.get


def wait(references: Sequence[Any], seconds: float, count: int = 1) -> tuple[list[Any], list[Any]]:
    """Those that are there and those that are not, once ``count`` are there or time is up."""
    return ray.wait(list(references), num_returns=count, timeout=seconds)


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
    except (Died, ray.exceptions.ObjectLostError) as error:
        why = first_line(error)
        raise ProcessLost(f"what another process made was lost with it: {why}") from None


# Without these of its processes no part of Ray works.
NAMES = ("gcs_server", "raylet")


class Servers:
    """Those of the cluster that this process is in.

    Attributes:
      node: Ray's id of this host.
    """

    def __init__(self) -> None:
        self.meet()

    def meet(self) -> None:
        """Take note of where Ray is, and which of its processes were started here."""
        self.node, self._head = whereabouts()
        found = {pid: name_of(pid) for pid in children(os.getpid())}
        self._here = {pid: name for pid, name in found.items() if name in NAMES}
        self._kin: list[int] = []
        self._silent_since: float | None = None

    def failure(self, seconds: float) -> str:
        """Why Ray is of no use any more; empty: it is.

        Args:
          seconds: without a sign of life after which it is not.
        """
        for pid, name in self._here.items():
            if state(pid) in ("", "Z", "X"):
                return f"Ray's {name} (pid {pid} on this machine) died"
        self._kin = [kin for pid in self._here for kin in descendants(pid)]
        stopped = [(pid, name) for pid, name in self._here.items() if state(pid) in "Tt"]
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
        """End those that were started here, and what they started."""
        end_all([*self._here, *self._kin])


def reachable(address: str) -> bool:
    """Whether somebody takes connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True
