"""What must be set before JAX starts a backend: the number of CPU devices, the program cache.

Only the command does this; a `Trainer` uses the devices it finds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.launch.config_keys import flatten


def prepare_jax(config: ConfigDict) -> str:
    """Set JAX's options for a run; returns a remark for the user, mostly empty.

    On a CPU there is one simulated device per core; a number that the user has set (in XLA_FLAGS
    or JAX_NUM_CPU_DEVICES) stays. Compiled programs are kept on disk, so that a second start is
    quick (JAX_COMPILATION_CACHE_DIR moves the place).
    """
    import jax

    options: Any = jax.config
    quiet_tpu_compiler()
    _keep_compiled_programs(options)
    platform = (options.jax_platforms or "cpu").split(",")[0]
    already_set = (
        "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
        or options.jax_num_cpu_devices != -1
    )
    compile_quickly()
    # Without a named platform JAX may find an accelerator; then this number has no effect.
    if platform != "cpu" or already_set:
        return ""
    cores = available_cores()
    devices = config.cluster.devices_per_process or dividing_devices(config, cores)
    options.update("jax_num_cpu_devices", devices)
    if config.cluster.devices_per_process or devices == cores:
        return ""
    return (
        f"{devices} of {cores} cores are used as devices, because the batch sizes divide by "
        f"{devices}; cluster.devices_per_process sets another number"
    )


def dividing_devices(config: ConfigDict, cores: int) -> int:
    """The largest number of devices up to ``cores`` over which all batches split evenly.

    With a layout or placement of the user's own it is all cores: then sizes are theirs to match.
    """
    layout = flatten(config.layout)
    own = any(size not in (-1, 1) for size in layout.values())
    if own or config.placement != "colocate":
        return cores
    sizes = [config.rollout.prompts]
    sizes += [config.algorithm.get("minibatch", 0)]
    sizes += [config.actor.micro_batch, config.critic.micro_batch]
    if config.algorithm.name == "SFT":
        sizes = []
    if config.algorithm.name == "SFT" or config.warm_start.steps:
        sizes += [config.warm_start.batch]
    common = math.gcd(*sizes)
    return max(n for n in range(1, cores + 1) if common % n == 0)


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


# Which memory gets huge pages: [always], [madvise]: what programs ask them for, or [never].
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# By these users set malloc's ways themselves.
_MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_")


def use_huge_pages() -> None:
    """Start this process anew with glibc told to ask for huge pages, where that is of use.

    A program on the CPU takes its temporary memory anew in each run, which the kernel then maps
    page by page: a fifth of a small model's step in pages of 4 KiB, little in those of 2 MiB. glibc
    (2.35 on) reads the setting once, as a process starts; the command, its process id and its
    output stay the same. Nothing is done where it would change nothing (another C library, a kernel
    that gives huge pages to all or to none), where JAX may find an accelerator, and where the
    environment sets malloc's ways.
    """
    if huge_pages_wait():
        environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def huge_pages_wait() -> bool:
    """Whether glibc could give this process huge pages, and has not been told to."""
    if not only_cpus() or any(name in os.environ for name in _MALLOC_VARIABLES):
        return False
    try:
        library, version = os.confstr("CS_GNU_LIBC_VERSION").split()  # type: ignore[union-attr]
        offered = "[madvise]" in _HUGE_PAGES.read_text()
    except (AttributeError, OSError, ValueError):
        return False  # no glibc, or no such kernel
    return offered and tuple(map(int, version.split(".")[:2])) >= (2, 35)


def quiet_tpu_compiler() -> None:
    """Where JAX has found no TPU, let an installed libtpu find so too, without asking the network.

    JAX tries it before it falls back to the CPU; these say what it would otherwise complain about.
    """
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":  # set by JAX as it is imported
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")


def _keep_compiled_programs(options: Any) -> None:
    import jax

    if options.jax_compilation_cache_dir is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "hjax" / "programs" / f"jax-{jax.__version__}"
        options.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        options.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES" not in os.environ:
        options.update("jax_persistent_cache_min_entry_size_bytes", -1)
