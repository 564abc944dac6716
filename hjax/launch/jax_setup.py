"""JAX setup before a backend starts: number of CPU devices, persistent compilation cache.

Only commands do this; a `Trainer` uses the devices it finds.

Corrupt entries of the compilation cache (after a kill or on a full disk) are deleted: JAX writes
entries in place and never replaces a corrupt one, but warns and recompiles in every run.
"""

import contextlib
import importlib
import math
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from hjax.config import flatten
from hjax.errors import ConfigError
from hjax.files import cache_folder
from hjax.machine import (
    MAX_DEVICES,
    available_cores,
    compile_quickly,
    ensure_threads,
    find_devices,
    pin_platform,
    requested_devices,
)
from hjax.settings.config_checks import on_cluster


def prepare_jax(config: ConfigDict, simulates: bool = False) -> str:
    """Set JAX's options for a run; returns a remark for the user, usually empty.

    If the devices are in a cluster, this process has one CPU device, or, if it ``simulates`` the
    cluster, as many as the cluster.

    On a CPU there is one simulated device per core, unless the user has set a number (in XLA_FLAGS
    or JAX_NUM_CPU_DEVICES). Compiled programs are cached on disk, so that a second start is fast
    (JAX_COMPILATION_CACHE_DIR sets the directory).
    """
    import jax

    options: Any = jax.config
    cluster = on_cluster(config)
    if cluster:
        # The cluster's processes use the devices; this one must not occupy its host's.
        options.update("jax_platforms", "cpu")
        every = config.cluster.processes * config.cluster.devices_per_process
        simulates = simulates or config.placement == "auto"
        if simulates and every > MAX_DEVICES:
            raise ConfigError(
                f"cluster.processes={config.cluster.processes} times cluster.devices_per_process="
                f"{config.cluster.devices_per_process} are {every} devices; at most {MAX_DEVICES} "
                "can be simulated here, for more see `python -m hjax.launch.compile`"
            )
        options.update("jax_num_cpu_devices", max(every, 1) if simulates else 1)
    else:
        pin_platform()
    _keep_compiled_programs(options)
    compile_quickly()
    # Without a configured platform JAX may find an accelerator; then this number has no effect.
    if cluster or (options.jax_platforms or "cpu").split(",")[0] != "cpu":
        return ""
    if requested_devices() != -1:
        ensure_threads(requested_devices())
        return ""
    cores = available_cores()
    devices = config.cluster.devices_per_process or dividing_devices(config, cores)
    options.update("jax_num_cpu_devices", devices)
    ensure_threads(devices)
    if config.cluster.devices_per_process or devices == cores:
        return ""
    return (
        f"{devices} of {cores} cores are used as devices, because the batch sizes divide by "
        f"{devices}; cluster.devices_per_process sets another number"
    )


def prepare_devices(count: int) -> None:
    """Set JAX's options for a command that uses the first ``count`` devices.

    On a CPU they are simulated, unless the user has set their number. Compiled programs are cached.
    """
    import jax

    options: Any = jax.config
    pin_platform()
    _keep_compiled_programs(options)
    compile_quickly()
    if count > 1:
        if requested_devices() == -1:
            options.update("jax_num_cpu_devices", count)
        ensure_threads(requested_devices())
    if (options.jax_platforms or "cpu") != "cpu":
        find_devices()  # a platform that does not start is refused here, in one line


def dividing_devices(config: ConfigDict, cores: int) -> int:
    """The largest number of devices up to ``cores`` that divides all batch sizes.

    If the user has set a layout or placement it is ``cores``, and the sizes are theirs to match.
    """
    from hjax.algorithms import get_algorithm

    custom = any(size not in (-1, 1) for size in flatten(config.layout).values())
    if custom or config.placement != "colocate":
        return cores
    algorithm = get_algorithm(config.algorithm.name)
    sizes = []
    if algorithm.generates:
        sizes = [config.rollout.prompts, config.algorithm.get("minibatch", 0)]
        sizes += [config.actor.micro_batch, config.critic.micro_batch]
    if not algorithm.generates or config.warm_start.steps:
        sizes += [config.warm_start.batch // algorithm.unit]
    common = math.gcd(*sizes)
    return max(n for n in range(1, cores + 1) if common % n == 0)


def _keep_compiled_programs(options: Any) -> None:
    import jax

    if options.jax_compilation_cache_dir is None:
        folder = cache_folder("programs", f"jax-{jax.__version__}")
        drop_corrupt_entries(folder)
        options.update("jax_compilation_cache_dir", str(folder))
        warnings.showwarning = _without_cache_warnings(folder, warnings.showwarning)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        options.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES" not in os.environ:
        options.update("jax_persistent_cache_min_entry_size_bytes", -1)


# Beginning of JAX's warning for each program that it cannot store.
_UNSTORED = "Error writing persistent compilation cache entry"


def _without_cache_warnings(folder: Path, show: Callable[..., None]) -> Callable[..., None]:
    """Like ``show``, which prints a warning, but programs that cannot be stored are one line in
    all; what is stored of them is removed."""
    said: list[str] = []

    def show_warning(message: Any, *where: Any, **more: Any) -> None:
        if not str(message).startswith(_UNSTORED):
            return show(message, *where, **more)
        drop_corrupt_entries(folder)
        if not said:
            said.append(str(message).rpartition("] ")[2])
            line = f"hjax: compiled programs cannot be stored in {folder}: {said[0]}"
            print(line, file=sys.stderr)

    return show_warning


# Entries older than this file's modification time have been checked.
_CHECKED = ".hjax-checked"
# Entries written this shortly before a check are checked again: they may have been incomplete.
_WRITING_SECONDS = 600.0
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def drop_corrupt_entries(folder: Path) -> int:
    """Delete corrupt entries of JAX's cache written since the last check; returns how many."""
    marker, now = folder / _CHECKED, time.time()
    try:
        checked = marker.stat().st_mtime
    except OSError:
        checked = 0.0
    dropped = 0
    with contextlib.suppress(OSError):  # the folder is missing or not writable
        for entry in os.scandir(folder):
            changed = entry.stat(follow_symlinks=False).st_mtime
            if not entry.name.endswith("-cache") or changed < checked:
                continue
            if not os.path.isfile(entry.path) or not _is_intact(Path(entry.path).read_bytes()):
                Path(entry.path).unlink(missing_ok=True)
                dropped += 1
        marker.touch()
        os.utime(marker, (now - _WRITING_SECONDS,) * 2)
    return dropped


def _is_intact(data: bytes) -> bool:
    """Whether a compressed entry can be decompressed to its end."""
    if not data.startswith(_ZSTANDARD):
        try:
            return len(zlib.decompress(data)) > 0
        except zlib.error:
            return False
    try:
        zstandard = importlib.import_module("zstandard")
    except ImportError:  # JAX cannot read it either, and says so
        return True
    try:
        return len(zstandard.ZstdDecompressor().decompress(data)) > 0
    except zstandard.ZstdError:
        return False
