"""Where a run's processes are: this one alone, or those of a cluster."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from ml_collections import ConfigDict

from hjax.controller import ThreadExecutor
from hjax.controller.executors import ExecutorFactory
from hjax.errors import ConfigError
from hjax.run.compile_counter import CompileCounter
from hjax.settings.checking import on_cluster

LOGS = "logs"
RAY_SAYS = "A worker died or was killed|Raylet is terminated|has been marked dead"


class Machines(Protocol):
    """What a Trainer asks of the machines it runs on.

    Attributes:
      devices: all of them, in rank order; stand-ins where they are other processes'.
      platform: of the devices.
      executor: makes what carries out a pool's calls.
    """

    devices: Sequence[Any]
    platform: str
    executor: ExecutorFactory

    def read(self) -> dict[str, Any]:
        """``peak_bytes`` of the largest device, ``compiles`` so far, ``names`` of the new ones."""

    def lost(self) -> Sequence[Any]:
        """Executors whose processes are gone."""

    def close(self) -> None:
        """End what was started."""


class MachineProbe:
    """Memory and compilations of one process."""

    def __init__(self) -> None:
        self._compiles = CompileCounter()

    def read(self) -> dict[str, Any]:
        """``peak_bytes``, ``compiles``, ``names``, see ``Machines``."""
        return {
            "peak_bytes": peak_bytes(),
            "compiles": self._compiles.count,
            "names": self._compiles.take_names(),
        }


class ThisProcess:
    """All in this process, on the devices that it sees.

    Args:
      config: of the run.
      executor: makes what carries out a pool's calls.
    """

    def __init__(self, config: ConfigDict, executor: ExecutorFactory = ThreadExecutor):
        self._probe = MachineProbe()
        self.devices: Sequence[Any] = local_devices(config)
        self.platform: str = self.devices[0].platform
        self.executor = executor

    def read(self) -> dict[str, Any]:
        """See ``Machines``."""
        return self._probe.read()

    def lost(self) -> Sequence[Any]:
        """None: who asks would be gone too."""
        return ()

    def close(self) -> None:
        """Nothing was started."""


class OnCluster:
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

        self._probe = MachineProbe()
        settings = config.cluster
        self.cluster = RayCluster(
            settings.address,
            settings.processes,
            settings.devices_per_process,
            host_processes=settings.reward_processes,
            logs=None if workdir is None else Path(workdir) / LOGS,
            heartbeat_seconds=settings.heartbeat_seconds,
            call_seconds=settings.call_seconds,
            together=settings.together,
            probe=MachineProbe,
            say=say,
        )
        self.devices: Sequence[Any] = self.cluster.devices
        self.platform: str = self.cluster.platform
        self.executor: ExecutorFactory = self.cluster.executor

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


def local_devices(config: ConfigDict) -> list[jax.Device]:
    """This process's devices, as many of them as the config wants.

    For a run on a cluster, which is planned or tried dry here, as many simulated ones as it has.

    Raises:
      ConfigError: there are fewer.
    """
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
