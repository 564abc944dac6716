"""Execution backends of a run: this process alone, or the processes of a Ray cluster."""

from __future__ import annotations

import functools
import os
import resource
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from hjax.controller import ThreadExecutor
from hjax.controller.executors import ExecutorFactory
from hjax.controller.hosts import HostGroup, Hosts
from hjax.errors import ConfigError
from hjax.machine import ensure_threads, find_devices, requested_devices
from hjax.run.placement import Plan, pool_name
from hjax.settings.config_checks import on_cluster

LOGS = "logs"
RAY_LOG_SKIP = "A worker died or was killed|Raylet is terminated|has been marked dead"
_EVENT = "/jax/core/compile/backend_compile_duration"
# The event right before it: lowering has ended and compilation begins.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# JAX listeners cannot be removed. So there is one, which serves all live probes.
_probes: weakref.WeakSet[ProcessProbe] = weakref.WeakSet()
_lock = threading.Lock()


class Backend:
    """The devices and processes that a Trainer runs on.

    Attributes:
      devices: all devices, in rank order; abstract ones where they belong to other processes.
      platform: of the devices.
      device_kind: of the first, as JAX or Ray names it.
      executor: makes a pool's executor.
    """

    devices: Sequence[Any]
    platform: str
    device_kind: str
    executor: ExecutorFactory

    def place(self, plan: Plan) -> None:
        """Bind a plan's sets of roles to hosts, before their pools are made.

        Raises:
          ConfigError: the plan names hosts that the backend does not have.
        """

    def read(self) -> dict[str, Any]:
        """``peak_bytes`` of the fullest device, ``compiles`` so far, ``names`` of new programs."""
        raise NotImplementedError

    def lost_executors(self) -> Sequence[Any]:
        """Executors that have lost a process."""
        return ()

    def close(self) -> None:
        """Stop the processes that were started."""


class ProcessProbe:
    """Measures this process: memory, and programs compiled or loaded from the compilation cache.

    Args:
      on_compile: called with a program's name and None when its compilation begins, and with its
        name and seconds when it ends; in the thread that compiles.
    """

    def __init__(self, on_compile: Callable[[str, float | None], None] | None = None) -> None:
        self.count = 0
        self.seconds = 0.0
        self._on_compile = on_compile
        self._names: list[str] = []
        with _lock:
            _listen()
            _probes.add(self)

    def take_names(self) -> list[str]:
        """Names of the programs compiled since the last call."""
        with _lock:
            names, self._names = self._names, []
        return names

    def read(self) -> dict[str, Any]:
        """``peak_bytes``, ``compiles`` and ``names``, see ``Backend.read``."""
        names = self.take_names()
        return {"peak_bytes": peak_bytes(), "compiles": self.count, "names": names}

    def add(self, name: str, seconds: float) -> None:
        """Count a compiled program."""
        self.count += 1
        self.seconds += seconds
        self._names.append(name)

    def on_compile(self, name: str, seconds: float | None) -> None:
        """Report that a program's compilation begins (``seconds`` is None) or has ended."""
        if self._on_compile is not None:
            self._on_compile(name, seconds)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: str | int) -> None:
    if event not in (_EVENT, _LOWERED):
        return
    name = str(details.get("fun_name", "program"))
    if name.startswith("jit(") and name.endswith(")"):
        name = name[4:-1]
    with _lock:
        probes = list(_probes)
        for probe in probes if event == _EVENT else ():
            probe.add(name, duration_secs)
    for probe in probes:
        probe.on_compile(name, duration_secs if event == _EVENT else None)


class LocalBackend(Backend):
    """A run in this process alone, on the devices that it sees.

    Args:
      config: of the run.
      executor: makes a pool's executor.
      on_compile: called about compilations, see ``ProcessProbe``.
    """

    def __init__(
        self,
        config: ConfigDict,
        executor: ExecutorFactory = ThreadExecutor,
        on_compile: Callable[[str, float | None], None] | None = None,
    ):
        self._probe = ProcessProbe(on_compile)
        self._dry_run = on_cluster(config)
        self.devices = local_devices(config)
        self.platform = self.devices[0].platform
        self.device_kind = self.devices[0].device_kind
        self.executor = executor

    def place(self, plan: Plan) -> None:
        """See ``Backend``; the dry run of a cluster's config accepts any hosts."""
        if any(plan.where) and not self._dry_run:
            raise ConfigError(
                f"the placement wants hosts with {dict(next(w for w in plan.where if w))}, but "
                "this run is in one process; set cluster.address, or leave `where` out of the plan"
            )

    def read(self) -> dict[str, Any]:
        """See ``Backend``."""
        return self._probe.read()

    def close(self) -> None:
        """See ``Backend``; later runs of this process are not reported here."""
        with _lock:
            _probes.discard(self._probe)


class ClusterBackend(Backend):
    """A run on the processes of a Ray cluster; the controller's process computes nothing.

    Args:
      config: of the run.
      workdir: its folder ``logs`` receives the processes' output.
      say: called with messages for the user.
    """

    def __init__(self, config: ConfigDict, workdir: str | Path | None, say: Callable[[str], None]):
        # Suppresses Ray's own report of a lost process; Ray reads this variable at import.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_LOG_SKIP)
        from hjax.controller.ray_cluster import RayCluster

        self._probe = ProcessProbe()
        settings = config.cluster
        self.cluster = RayCluster(
            settings.address,
            settings.processes,
            settings.devices_per_process,
            host_processes=settings.reward_processes,
            logs=None if workdir is None else Path(workdir) / LOGS,
            heartbeat_seconds=settings.heartbeat_seconds,
            call_seconds=settings.call_seconds,
            colocation_label=settings.colocation_label,
            probe=ProcessProbe,
            say=say,
        )
        self.devices, self.platform = self.cluster.devices, self.cluster.platform
        self.device_kind = self.cluster.device_kind()
        self.executor = self.cluster.executor

    def place(self, plan: Plan) -> None:
        """See ``Backend``."""
        self.cluster.pool_labels = {pool_name(plan, i): w for i, w in enumerate(plan.where) if w}
        self.cluster.expect({pool_name(plan, i): n for i, n in enumerate(plan.allocation)})

    def read(self) -> dict[str, Any]:
        """Compilations of this process and each pool's first; peak memory over all processes."""
        pools = self.cluster.machine()
        firsts = [self._probe.read(), *(pool[0] for pool in pools)]
        return {
            "peak_bytes": max((x["peak_bytes"] for pool in pools for x in pool), default=0),
            "compiles": sum(first["compiles"] for first in firsts),
            "names": [name for first in firsts for name in first["names"]],
        }

    def lost_executors(self) -> Sequence[Any]:
        """Executors with a process that died, hangs or cannot be reached."""
        return self.cluster.lost()

    def close(self) -> None:
        """Stop every process, and the cluster if this run started it."""
        self.cluster.close()


def discover_hosts(config: ConfigDict) -> Hosts:
    """The hosts of the cluster that a config names, for the planner.

    Raises:
      ConfigError: there is no cluster, none of its hosts takes a process, or it computes on CPUs
        and this process cannot simulate that many devices.
    """
    settings = config.cluster
    on_cpus = (os.environ.get("JAX_PLATFORMS") or "").split(",")[0] == "cpu"
    if on_cpus and settings.address in ("", "local"):
        each = len(local_devices(config)) // settings.processes
        return Hosts("cpu", each, (HostGroup((), "", (1,) * settings.processes),))
    from hjax.controller.ray_hosts import discover_hosts

    names = ("address", "processes", "devices_per_process", "colocation_label")
    found = discover_hosts(**{name: settings[name] for name in names})
    if found.platform == "cpu":
        local_devices(config)
    return found


def local_devices(config: ConfigDict) -> list[jax.Device]:
    """The devices of this process that the config uses.

    To plan or dry-run a cluster's config here, simulated devices stand for the cluster's.

    Raises:
      ConfigError: this process has fewer devices.
    """
    if not on_cluster(config):
        ensure_threads(requested_devices())  # where JAX has not started
    devices = find_devices()
    limit = config.cluster.devices_per_process
    if on_cluster(config):
        every = limit * config.cluster.processes
        if not limit or devices[0].platform != "cpu" or len(devices) < every:
            raise ConfigError(
                f"a cluster of {config.cluster.processes} processes with "
                f"cluster.devices_per_process={limit} cannot be planned or tried dry here: that "
                "needs CPU devices and a devices_per_process above 0; for a cluster's hardware use "
                "python -m hjax.launch.plan and .compile, and give the plan.json as placement"
            )
        return devices[:every]
    if limit > len(devices):
        raise ConfigError(
            f"cluster.devices_per_process={limit}, but this process sees {len(devices)} devices"
        )
    return devices[: limit or None]


def peak_bytes() -> int:
    """Peak memory of the fullest local device; of this process where devices do not report it."""
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()]
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
