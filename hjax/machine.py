"""The machine before JAX starts on it: its cores, its compilers' settings, simulated devices."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from hjax.errors import ConfigError


def available_cores() -> int:
    """CPU cores this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no control group, or an older kind: affinity alone
    return cores or 1


def only_cpus() -> bool:
    """Whether JAX will run on CPUs: it is told so, or has no plugin for anything else."""
    named = os.environ.get("JAX_PLATFORMS")
    if named:
        return named.split(",")[0] == "cpu"
    import importlib.metadata
    import importlib.util

    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and not any(map(importlib.util.find_spec, ("jax_plugins", "libtpu")))


def compile_quickly() -> None:
    """Let XLA spend less on optimising CPU programs; before JAX starts a backend.

    At LLVM's first level they compile in four fifths of the time (drawing parameters in a third)
    and run no slower: products are a library's, the rest waits for memory. A level that the user
    has set in XLA_FLAGS stays, and so does everything where JAX may find an accelerator.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if only_cpus() and "xla_backend_optimization_level" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=1".strip()


def quiet_tpu_compiler() -> None:
    """Where JAX has found no TPU, let an installed libtpu find so too, without asking the network.

    JAX tries it before it falls back to the CPU; these say what it would otherwise complain about.
    """
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX as it is imported
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")


def simulated_devices(count: int) -> list[Any]:
    """``count`` devices: the machine's, or simulated ones where it has too few."""
    import jax

    # Before JAX starts: a smaller number that the environment asks for would not do.
    options: Any = jax.config
    if options.jax_num_cpu_devices < count:
        pattern = r"--xla_force_host_platform_device_count=(\d+)"
        asked = re.search(pattern, os.environ.get("XLA_FLAGS", ""))
        if asked is None or int(asked[1]) < count:
            os.environ["XLA_FLAGS"] = re.sub(pattern, "", os.environ.get("XLA_FLAGS", "")).strip()
            options.update("jax_num_cpu_devices", count)
    quiet_tpu_compiler()
    devices = jax.devices()
    if len(devices) < count:
        devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(f"{count} devices are needed, there are {len(devices)}")
    return devices[:count]
