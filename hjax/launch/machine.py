"""What must be set before JAX starts a backend: the number of CPU devices, the program cache.

Only the command does this; a `Trainer` uses the devices it finds.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.launch.config_keys import flatten
from hjax.launch.huge_pages import only_cpus


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
