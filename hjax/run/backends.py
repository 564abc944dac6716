"""Where a run's processes are: this one alone, or those of a cluster."""

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
from hjax.machine import ensure_threads, requested_devices
from hjax.run.placement import Plan, set_name
from hjax.settings.config_checks import on_cluster

LOGS = "logs"
RAY_SAYS = "A worker died or was killed|Raylet is terminated|has been marked dead"
_EVENT = "/jax/core/compile/backend_compile_duration"
# The last thing before it.
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# JAX's listeners stay for good, so that there is one, which tells the counters still in use.
_counters: weakref.WeakSet[ProcessProbe] = weakref.WeakSet()
_lock = threading.Lock()


class Backend:
    """What a Trainer asks of the machines it runs on.

    Attributes:
      devices: all of them, in rank order; stand-ins where they are other processes'.
      platform: of the devices.
      executor: makes what carries out a pool's calls.
    """

    devices: Sequence[Any]
    platform: str
    executor: ExecutorFactory

    def place(self, plan: Plan) -> None:
        """Told where the sets of a plan are to stand, before their pools are made.

        Raises:
          ConfigError: on hosts of which there are none.
        """

    def read(self) -> dict[str, Any]:
        """``peak_bytes`` of the largest device, ``compiles`` so far, ``names`` of the new ones."""
        raise NotImplementedError

    def lost(self) -> Sequence[Any]:
        """Executors whose processes are gone."""
        return ()

    def close(self) -> None:
        """End what was started."""


class ProcessProbe:
    """Memory of this process, and programs compiled in it since this was made (or loaded from the
    disk cache).

    Args:
      tell: is told of each program's name as its compilation begins, with None, and as it ends,
        with the seconds it took; in whatever thread compiles.
    """

    def __init__(self, tell: Callable[[str, float | None], None] | None = None) -> None:
        self.count = 0
        self.seconds = 0.0
        self._tell = tell
        self._names: list[str] = []
        with _lock:
            _listen()
            _counters.add(self)

    def take_names(self) -> list[str]:
        """Names of the programs compiled since last asked."""
        with _lock:
            names, self._names = self._names, []
        return names

    def read(self) -> dict[str, Any]:
        """``peak_bytes``, ``compiles``, ``names``, see ``Backend``."""
        names = self.take_names()
        return {"peak_bytes": peak_bytes(), "compiles": self.count, "names": names}

    def add(self, name: str, seconds: float) -> None:
        """One more program."""
        self.count += 1
        self.seconds += seconds
        self._names.append(name)

    def tell(self, name: str, seconds: float | None) -> None:
        """Its compilation begins (None), or has ended."""
        if self._tell is not None:
            self._tell(name, seconds)


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_heard)


def _heard(event: str, duration_secs: float, **details: str | int) -> None:
    if event not in (_EVENT, _LOWERED):
        return
    name = str(details.get("fun_name", "program"))
    if name.startswith("jit(") and name.endswith(")"):
        name = name[4:-1]
    with _lock:
        counters = list(_counters)
        for counter in counters if event == _EVENT else ():
            counter.add(name, duration_secs)
    for counter in counters:
        counter.tell(name, duration_secs if event == _EVENT else None)


class LocalBackend(Backend):
    """All in this process, on the devices that it sees.

    Args:
      config: of the run.
      executor: makes what carries out a pool's calls.
      tell: of compilations, see ``ProcessProbe``.
    """

    def __init__(
        self,
        config: ConfigDict,
        executor: ExecutorFactory = ThreadExecutor,
        tell: Callable[[str, float | None], None] | None = None,
    ):
        self._probe = ProcessProbe(tell)
        self._rehearses = on_cluster(config)
        self.devices = local_devices(config)
        self.platform = self.devices[0].platform
        self.executor = executor

    def place(self, plan: Plan) -> None:
        """See ``Backend``; a run on a cluster may be tried dry here."""
        if any(plan.where) and not self._rehearses:
            raise ConfigError(
                f"the placement wants hosts with {dict(next(w for w in plan.where if w))}, but "
                "this run is in one process; set cluster.address, or leave `where` out of the plan"
            )

    def read(self) -> dict[str, Any]:
        """See ``Backend``."""
        return self._probe.read()


class ClusterBackend(Backend):
    """Processes of a Ray cluster; the controller's own process only conducts.

    Args:
      config: of the run.
      workdir: whose folder ``logs`` takes what the processes print.
      say: told what a person should see.
    """

    def __init__(self, config: ConfigDict, workdir: str | Path | None, say: Callable[[str], None]):
        # Ray prints of a lost process what is said here in a line: it reads this as it is imported.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RAY_SAYS)
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
        self.executor = self.cluster.executor

    def place(self, plan: Plan) -> None:
        """See ``Backend``."""
        self.cluster.pool_labels = {set_name(plan, i): w for i, w in enumerate(plan.where) if w}

    def read(self) -> dict[str, Any]:
        """Of every pool's first process and this one; the peak is that of the largest of all."""
        pools = self.cluster.machine()
        firsts = [self._probe.read(), *(pool[0] for pool in pools)]
        return {
            "peak_bytes": max((x["peak_bytes"] for pool in pools for x in pool), default=0),
            "compiles": sum(first["compiles"] for first in firsts),
            "names": [name for first in firsts for name in first["names"]],
        }

    def lost(self) -> Sequence[Any]:
        """Executors whose processes died, hang or cannot be reached."""
        return self.cluster.lost()

    def close(self) -> None:
        """End every process, and the cluster if it was started for this run."""
        self.cluster.close()


def look_at_hosts(config: ConfigDict) -> Hosts:
    """The hosts of the cluster that a config names, for a plan.

    Raises:
      ConfigError: there is no cluster, none of its hosts takes a process, or they compute on CPUs
        of which this process cannot simulate as many as the run takes.
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
    """This process's devices, as many of them as the config wants.

    For a run on a cluster, which is planned or tried dry here, as many simulated ones as it has.

    Raises:
      ConfigError: there are fewer.
    """
    if not on_cluster(config):
        ensure_threads(requested_devices())  # where JAX has not started
    devices = jax.devices()
    limit = config.cluster.devices_per_process
    if on_cluster(config):
        every = limit * config.cluster.processes
        if not limit or devices[0].platform != "cpu" or len(devices) < every:
            raise ConfigError(
                f"a cluster of {config.cluster.processes} processes with "
                f"cluster.devices_per_process={limit} cannot be planned or tried dry here: that "
                "takes CPU devices of a number that is set; for a cluster's hardware use python "
                "-m hjax.launch.plan and .compile, and give the plan.json as placement"
            )
        return devices[:every]
    if limit > len(devices):
        raise ConfigError(
            f"cluster.devices_per_process={limit}, but this process sees {len(devices)} devices"
        )
    return devices[: limit or None]


def peak_bytes() -> int:
    """Largest memory use so far of any local device; of the process where devices keep no count."""
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in jax.local_devices()]
    return max(peaks) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
